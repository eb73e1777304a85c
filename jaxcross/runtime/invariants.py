"""What must always hold between two events of an interleaver."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxcross.errors import InternalError
from jaxcross.runtime.agreed import Agreed
from jaxcross.runtime.local import LocalJob


def check_lanes(
    depth: int, on_device: Collection[tuple[int, int, int]], jobs: Sequence[LocalJob], agreed: Agreed
) -> None:
    """Raises InternalError if a segment ran too early, or the compute lane idles beside a ready one."""

    def must(holds: bool, what: str) -> None:
        if not holds:
            raise InternalError(f"interleaver: {what}")

    must(len(on_device) <= depth, f"{len(on_device)} segments on a lane of depth {depth}")
    for job, (mine, shared) in enumerate(zip(jobs, agreed.jobs, strict=True)):
        call = mine.call
        must(call is None or mine.waits, f"job {job} has a call that nobody waits for")
        admitted = call is not None and call.admitted
        must(not shared.remaining or admitted, f"job {job} has exchanges left of no admitted step")
        if call is None:
            continue
        must(call.dispatched <= call.issued, f"job {job}: dispatched what was not issued")
        must(not call.issued & set(call.waiting), f"job {job}: a segment both issued and waiting")
        after = call.issued & call.outline.after_commit
        must(call.committed or not after, f"job {job}: segments {after} ran before the commit")
        for segment in call.issued | call.exchanged:
            needs = call.outline.needs[segment]
            met = all(need in call.issued or need in call.exchanged for need in needs)
            must(met or mine.failed is not None, f"job {job}: segment {segment} ran before its needs")
    if len(on_device) < depth:
        for job, mine in enumerate(jobs):
            idle = mine.call is not None and mine.failed is None and not mine.closed and mine.call.ready() is not None
            must(not idle, f"job {job} has a ready segment but the compute lane is not full")
