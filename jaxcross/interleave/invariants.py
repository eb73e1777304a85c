"""The interleaver's invariants, which hold between any two events."""

from __future__ import annotations

from collections.abc import Mapping

from jaxcross.errors import InternalError
from jaxcross.interleave.compute_queue import ComputeQueue
from jaxcross.interleave.local_state import LocalCall, LocalJob
from jaxcross.interleave.shared_state import SharedState


def check_lanes(compute: ComputeQueue, jobs: Mapping[int, LocalJob], shared: SharedState) -> None:
    """Raises InternalError if a segment ran too early, or the compute lane idles without need."""
    # This is called after every event, so don't build a message unless it's needed.
    on_device = compute.on_device
    depth = compute.depth
    if len(on_device) > depth:
        raise _broken(f"{len(on_device)} segments on a lane of depth {depth}")
    if jobs.keys() != shared.jobs.keys():
        raise _broken(f"jobs {list(jobs)} here, {list(shared.jobs)} on all ranks")
    rows = [job.row for job in shared.jobs.values()]
    if not len(set(rows)) == len(rows) <= shared.rows:
        raise _broken(f"jobs share rows {rows} of {shared.rows}")
    for job, mine in jobs.items():
        if shared.jobs[job].remaining and (mine.call is None or not mine.call.admitted):
            raise _broken(f"job {job} has exchanges left of no admitted step")
        if mine.call is not None:
            _check_call(job, mine, mine.call, shared)
    if len(on_device) < depth:
        for job, mine in jobs.items():
            may_begin = shared.may_begin(
                job, is_step=mine.call is not None and mine.call.graph.is_step
            )
            if mine.ready(may_begin=may_begin) is not None:
                raise _broken(f"job {job} has a ready segment but the compute lane is not full")


def _check_call(job: int, mine: LocalJob, call: LocalCall, shared: SharedState) -> None:
    if not mine.is_waiting:
        raise _broken(f"job {job} has a call, but its thread does not wait")
    if not call.dispatched <= call.issued:
        raise _broken(f"job {job}: dispatched what was not issued")
    if call.ready() in call.issued:
        raise _broken(f"job {job}: a segment both issued and ready")
    if call.issued and call.graph.is_step and shared.start.holds(job):
        raise _broken(f"job {job}: segments {call.issued} ran before the joint start")
    if not call.committed:
        after = call.issued & call.graph.after_commit
        if after:
            raise _broken(f"job {job}: segments {after} ran before the commit")
    if mine.failed is None:
        done = call.issued | call.exchanged
        for segment in done:
            if not done.issuperset(call.graph.needs[segment]):
                raise _broken(f"job {job}: segment {segment} ran before its needs")


def _broken(rule: str) -> InternalError:
    return InternalError(f"interleaver: {rule}")
