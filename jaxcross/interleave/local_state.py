"""The part of the interleaver's state that this rank has for itself: calls, and what waits here."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobBallot, JobRequest

PointKind = Literal["step", "batch", "sync", "end"]


class Wait(NamedTuple):
    """What a job waits for between two exchanges: the other ranks or, its `own` affair, something of this rank.

    `moved` changes with whatever moves on meanwhile.
    """

    step: int
    what: str
    own: bool = False
    moved: int = 0

    @property
    def point(self) -> tuple[int, str, bool]:
        """Which wait it is."""
        return self.step, self.what, self.own


@dataclass(frozen=True, slots=True)
class Point:
    """What a job's thread waits to do together with all ranks."""

    kind: PointKind
    hash: int
    text: str
    index: int = -1


@dataclass(slots=True)
class LocalCall:
    """One call of a step on this rank."""

    number: int
    graph: StepGraph
    counts: bool = True  # as a step of the job
    issued: set[int] = field(default_factory=set)  # compute segments handed to the lane
    dispatched: set[int] = field(default_factory=set)  # compute segments handed to the device
    exchanged: set[int] = field(default_factory=set)
    admitted: bool = False
    committed: bool = False
    finite: bool = True  # what was exchanged, as far as it was looked at
    skipped: bool = False  # the step keeps its state
    _unmet: list[int] = field(init=False)  # how many needs of each segment were neither issued nor exchanged
    _able: list[int] = field(init=False)  # the compute segments that have none and were not issued, in order
    _behind: list[int] = field(init=False)  # the same behind the commit

    def __post_init__(self) -> None:
        self._unmet = [len(set(needs)) for needs in self.graph.needs]
        self._able, self._behind = [], []
        for segment, kind in enumerate(self.graph.kinds):
            if kind == "compute" and not self._unmet[segment]:
                self._side(segment).append(segment)

    def ready(self) -> int | None:
        """The first compute segment that may go to the lane."""
        first = [*self._able[:1], *(self._behind[:1] if self.committed else ())]
        return min(first, default=None)

    def issue(self, segment: int) -> None:
        """The ready segment goes to the lane."""
        del self._side(segment)[0]
        self.issued.add(segment)
        self._has(segment)

    def exchange_done(self, segment: int) -> None:
        """A collective segment was run."""
        self.exchanged.add(segment)
        self._has(segment)

    def _has(self, segment: int) -> None:
        for reader in self.graph.readers[segment]:
            self._unmet[reader] -= 1
            if not self._unmet[reader]:
                insort(self._side(reader), reader)

    def _side(self, segment: int) -> list[int]:
        return self._behind if segment in self.graph.after_commit else self._able

    def complete(self) -> bool:
        """Whether the caller can have its results."""
        return len(self.dispatched) + len(self.exchanged) == len(self.graph.kinds) and (
            self.committed or not self.graph.collectives
        )


@dataclass(slots=True)
class LocalJob:
    """What this rank alone knows of a job."""

    started: bool = False
    local_steps: int = 0  # steps since the last one that all ranks made together: they exchanged nothing
    other_calls: int = 0  # calls that were made like steps and do not count as such, as evaluations
    other_local_calls: int = 0  # those of them that are in `local_steps`
    call: LocalCall | None = None
    calls: int = 0
    waits: bool = False  # the thread waits for an answer
    point: Point | None = None  # and for the other ranks
    failed: str | None = None
    ejects: bool = False  # what failed is what its policy ejects it for
    returned: bool = False  # its function returned
    request: JobRequest = JobRequest.NONE  # not yet said to the others
    stream: int = -1
    syncs: int = 0
    replayed: int = 0  # batches that were dropped on the way to where a restart goes on
    prepared: dict[int, int] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)

    def current(self, call: int) -> LocalCall | None:
        """The call of that number, unless it is over."""
        return self.call if self.call is not None and self.call.number == call else None

    def add_request(self, request: JobRequest) -> None:
        """Somebody here wishes so; the last one counts, but a stop is for good."""
        if self.request is not JobRequest.STOP:
            self.request = request

    def ready(self) -> int | None:
        """The compute segment that may go to the lane next."""
        return None if self.call is None or self.failed is not None else self.call.ready()

    def called(self) -> tuple[int, ...] | str:
        """What it waits for: the collective segments of the step that it called, or the kind of its point."""
        assert self.point is not None
        if self.point.kind != "step":
            return self.point.kind
        assert self.call is not None
        return self.call.graph.collectives

    def has_update(self) -> bool:
        """Whether a vote could change something for it, as far as this rank knows."""
        if self.failed is not None:
            return True
        if self.point is None or self.point.kind != "batch":
            return self.point is not None
        prepared, limit = self.prepared.get(self.stream, 0), self.limits.get(self.stream)
        return prepared > self.point.index or (limit is not None and limit <= self.point.index)

    def pending_wait(self, committed: int, progress: int) -> Wait | None:
        """What it waits for between two exchanges.

        Args:
            committed: How many steps are.
            progress: A number that changes with whatever moves on in any job: its end may wait for that.
        """
        step = committed + 1
        if self.failed is not None:
            return Wait(step, "other ranks, to leave")
        if self.call is not None and self.call.committed:
            return Wait(committed, "end of the step", own=True, moved=len(self.call.dispatched))
        if self.point is None:
            return None
        if self.point.kind == "batch":
            what = f"batch {self.point.index + 1} of data {self.stream + 1}"
            return Wait(step, what) if self.has_update() else Wait(step, what, own=True, moved=self.replayed)
        if self.point.kind == "sync":
            return Wait(step, self.point.text.partition("\n")[0], moved=self.syncs)
        if self.point.kind == "end":
            return Wait(step, "end of the job", moved=progress)
        return Wait(step, "call of the step", moved=self.calls)

    def ballot(self) -> JobBallot:
        """What this rank says of it in a vote."""
        return JobBallot(
            point=self.point.hash if self.point is not None else None,
            good=self.failed is None,
            stream=self.stream,
            prepared=self.prepared.get(self.stream, 0),
            limit=self.limits.get(self.stream),
            request=self.request,
            finite=self.call is None or self.call.finite,
            received_commit=self.failed is not None or self.call is None or not self.call.committed,
        )

    def text(self) -> str:
        """What this rank tells people of it, where ranks disagree or it failed."""
        if self.failed is not None:
            return f"{'ejected' if self.ejects else 'failed'}\n{self.failed}"
        return f"{self.point.kind}\n{self.point.text}" if self.point is not None else ""
