"""Chooses the next compute segment for this rank's device. Ranks may choose differently."""

from __future__ import annotations

from collections.abc import Mapping

from jaxcross.interleave.policy import Policy, Turns

Key = tuple[int, int, int]  # job, its call, segment
DEFAULT_DEPTH = 2
"""How many compute segments to keep on a device, unless measurements suggest a better number.

With two, the next segment is already queued by the time one finishes, so the device doesn't have to
wait for the host.
"""
# Other backends can be added once `benchmarks/gpu.py --cases depth` has measured them.
_OF_BACKEND: Mapping[str, int] = {"cpu": DEFAULT_DEPTH}


def depth_of(backend: str) -> int:
    """Returns how many compute segments to keep on a device of the given JAX backend."""
    return _OF_BACKEND.get(backend, DEFAULT_DEPTH)


class ComputeQueue:
    """The compute lane of one rank.

    Args:
        jobs: Number of jobs.
        policy: Chooses which job to dispatch next.
        depth: Maximum number of segments on the device at once.
    """

    def __init__(self, jobs: int, policy: Policy, depth: int) -> None:
        self.depth = depth
        self.on_device: set[Key] = set()
        self._ready: dict[int, int] = {}  # each job's ready segment, if it has one
        self._turns = Turns(policy, jobs)  # charged in nanoseconds of device time

    def join(self, job: int) -> None:
        self._turns.add(job)

    def leave(self, job: int) -> None:
        """Removes a job. Segments that are already on the device still run to completion."""
        self._ready.pop(job, None)
        self._turns.remove(job)

    def set_ready(self, job: int, segment: int | None) -> None:
        """Sets the segment that the job can run next, or None if it can't run any."""
        if segment is None:
            self._ready.pop(job, None)
        else:
            self._ready[job] = segment

    def next(self) -> tuple[int, int] | None:
        """Chooses the next job, records its turn, and returns the job and its segment.

        Returns None if the device is full or no job has a ready segment.
        """
        if len(self.on_device) >= self.depth or not self._ready:
            return None
        job = self._turns.next(self._ready)
        self._turns.begin(job)
        return job, self._ready[job]

    def ended(self, key: Key, ns: int = 0) -> None:
        """Records that a segment left the device after occupying it for `ns` nanoseconds."""
        self.on_device.discard(key)
        if ns:
            self._turns.charge(key[0], ns)

    def busy(self, job: int, *, but: int = 0) -> bool:
        """Whether the job has a segment on the device, not counting those of its call `but`."""
        return any(key[0] == job and key[1] != but for key in self.on_device)
