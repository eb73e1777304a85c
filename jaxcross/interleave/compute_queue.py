"""Which compute segment the device gets next. Every rank's own affair: orders may differ between ranks."""

from __future__ import annotations

from jaxcross.interleave.policy import Policy, Turns

Key = tuple[int, int, int]  # job, its call, segment


class ComputeQueue:
    """The compute lane of one rank.

    Args:
        jobs: How many jobs there are.
        policy: Whose turn it is.
        depth: How many segments may be on the device at once.
    """

    def __init__(self, jobs: int, policy: Policy, depth: int) -> None:
        self.depth = depth
        self.on_device: set[Key] = set()
        self._ready: dict[int, int] = {}  # jobs that have a segment for the lane, and which
        self._turns = Turns(policy, jobs)  # in nanoseconds

    def join(self, job: int) -> None:
        """A job comes in."""
        self._turns.add(job)

    def leave(self, job: int) -> None:
        """A job is over. What it has on the device comes to its end there."""
        self._ready.pop(job, None)
        self._turns.remove(job)

    def set_ready(self, job: int, segment: int | None) -> None:
        """The segment is what the job has for the lane, or it has none."""
        if segment is None:
            self._ready.pop(job, None)
        else:
            self._ready[job] = segment

    def next(self) -> tuple[int, int] | None:
        """The job whose turn begins, and its segment, if there is one and the device has room."""
        if len(self.on_device) >= self.depth or not self._ready:
            return None
        job = self._turns.next(self._ready)
        self._turns.begin(job)
        return job, self._ready[job]

    def ended(self, key: Key, ns: int = 0) -> None:
        """The segment has left the device, which it had for so long."""
        self.on_device.discard(key)
        if ns:
            self._turns.charge(key[0], ns)

    def busy(self, job: int) -> bool:
        """Whether the device has a segment of the job."""
        return any(key[0] == job for key in self.on_device)
