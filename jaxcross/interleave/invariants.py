"""The invariants of an interleaver: they hold between any two events."""

from __future__ import annotations

from collections.abc import Mapping

from jaxcross.errors import InternalError
from jaxcross.interleave.compute_queue import ComputeQueue
from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.shared_state import SharedState


def check_lanes(compute: ComputeQueue, jobs: Mapping[int, LocalJob], shared: SharedState) -> None:
    """Raises InternalError if a segment ran too early, or the compute lane idles although one is ready."""

    def must(holds: bool, violation: str) -> None:
        if not holds:
            raise InternalError(f"interleaver: {violation}")

    on_device, depth = compute.on_device, compute.depth
    must(len(on_device) <= depth, f"{len(on_device)} segments on a lane of depth {depth}")
    must(jobs.keys() == shared.jobs.keys(), f"jobs {list(jobs)} here, {list(shared.jobs)} on all ranks")
    rows = [job.row for job in shared.jobs.values()]
    must(len(set(rows)) == len(rows) <= shared.rows, f"jobs share rows {rows} of {shared.rows}")
    for job, mine in jobs.items():
        call = mine.call
        must(call is None or mine.is_waiting, f"job {job} has a call, but its thread does not wait")
        admitted = call is not None and call.admitted
        must(not shared.jobs[job].remaining or admitted, f"job {job} has exchanges left of no admitted step")
        if call is None:
            continue
        must(call.dispatched <= call.issued, f"job {job}: dispatched what was not issued")
        must(call.ready() not in call.issued, f"job {job}: a segment both issued and ready")
        after = call.issued & call.graph.after_commit
        early = shared.start.holds(job) and call.graph.is_step and call.issued
        must(not early, f"job {job}: segments {early} ran before the joint start")
        must(call.committed or not after, f"job {job}: segments {after} ran before the commit")
        for segment in call.issued | call.exchanged:
            needs = call.graph.needs[segment]
            met = all(need in call.issued or need in call.exchanged for need in needs)
            must(met or mine.failed is not None, f"job {job}: segment {segment} ran before its needs")
    if len(on_device) < depth:
        for job, mine in jobs.items():
            call = mine.call
            may = call is not None and (call.admitted or shared.may_begin(job, is_step=call.graph.is_step))
            must(not may or mine.ready() is None, f"job {job} has a ready segment but the compute lane is not full")
