"""The part of the interleaver's state that every rank shares, and the order of the exchange lane that follows from it.

Nothing in here is told of a clock, a device or anything else that only one rank knows. It changes by two things, both
the same on all ranks: a slot of the exchange lane was done, and what a vote said. So `slot()` names the same next
slot on all ranks, although they ask at different times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxcross.runtime.policy import Policy, Turns
from jaxcross.runtime.vote import JobVerdict, Verdict

SlotKind = Literal["exchange", "vote", "compare", "sync", "done"]
OutcomeKind = Literal["committed", "admitted", "ended", "stopped", "compare", "sync", "batches"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The next thing on the exchange lane.

    `job` of a vote is the job whose turn it is where no exchange remains: then a rank may take its time (`lazy`).
    """

    kind: SlotKind
    job: int = -1
    segment: int = -1
    lazy: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One thing that a vote decided about one job."""

    kind: OutcomeKind
    job: int


@dataclass(slots=True)
class Stream:
    """How far all ranks are known to be with one stream of batches."""

    prepared: int = 0
    limit: int | None = None


@dataclass(slots=True)
class SharedJob:
    """What all ranks know of a job."""

    step: int = 0  # committed steps
    remaining: deque[int] | None = None  # exchanges of the admitted step that are still to be made
    finished: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)


_OPENING_VOTES = 16  # about half a second of patience


class Agreed:
    """Merges the jobs' exchanges, one at a time, and places the votes between them."""

    def __init__(self, jobs: int, policy: Policy) -> None:
        self.jobs = [SharedJob() for _ in range(jobs)]
        self.policy = policy
        self.turns = Turns(policy, jobs)  # in bytes
        self.commit: int | None = None  # the job whose step's last exchange was just made
        self.voted = False  # since the last exchange
        self.stopping = False
        self.opening = _OPENING_VOTES  # votes that may still wait for every job's first step before the first exchange
        self.queue: deque[Slot] = deque()  # comparisons and syncs: they go before everything but a commit
        self.running = policy.running([False] * jobs)  # the unfinished jobs that the policy lets run now
        self._next: Slot | None = None  # until something changes
        self._before: Verdict | None = None
        self._unheard = set(range(jobs))  # jobs whose row of the verdict was not acted upon

    def slot(self) -> Slot:
        """The next slot of the exchange lane, on every rank."""
        if self._next is None:
            self._next = self._decide()
        return self._next

    def _decide(self) -> Slot:
        if self.commit is not None:
            return Slot("vote")
        if self.queue:
            return self.queue[0]
        running = self.running
        if not running:
            return Slot("done")
        job = self.turns.next(running)
        idle = not self.jobs[job].remaining
        pending = [n for n in running if self.jobs[n].remaining] if idle else [job]
        if not pending:
            return Slot("vote", job, lazy=True)
        if self.opening and (late := [n for n in running if not self.jobs[n].remaining]):
            # Once the first exchange is under way, a job that comes just after it waits for its whole length.
            return Slot("vote", late[0], lazy=True)
        if idle and not self.voted:
            # Its turn: ask at once whether it has come back, but never twice between two exchanges.
            return Slot("vote")
        job = self.turns.next(pending)
        remaining = self.jobs[job].remaining
        assert remaining
        return Slot("exchange", job, remaining[0])

    def exchange_done(self, job: int, nbytes: int) -> None:
        """The slot `Slot("exchange", job, ...)` is over; `nbytes` as all ranks know it."""
        remaining = self.jobs[job].remaining
        assert remaining
        remaining.popleft()
        self.turns.begin(job)
        self.turns.charge(job, nbytes)
        self.voted, self.opening, self._next = False, 0, None
        if not remaining:
            self.commit = job

    def queued_done(self) -> Slot:
        """The comparison or sync at the head of the queue is over."""
        self._next = None
        return self.queue.popleft()

    def apply(self, verdict: Verdict, called: Callable[[int], Sequence[int] | str]) -> list[Outcome]:
        """The vote is over. `called` tells what a job waits for here: the collective segments of the step it called,
        "end", "sync" or "batch". Asked only of jobs that wait at the same point on all ranks, hence equal on all.
        """
        committing, self.commit, self.voted, self._next = self.commit, None, True, None
        if self.opening and any(job.remaining for job in self.jobs):
            self.opening -= 1
        self.stopping |= verdict.stop
        # Of a job that nobody says anything new about, everything was decided.
        self._unheard.update(range(len(self.jobs)) if self._before is None else verdict.news(self._before))
        self._before = verdict
        outcomes: list[Outcome] = []
        for number in self.running:
            if number in self._unheard or self.stopping:
                outcomes += self._hear(number, verdict.job(number), number == committing, called)
        if self.stopping:  # jobs whose turn to start has not come
            outcomes += self._stop_others()
        if any(outcome.kind in ("compare", "ended", "stopped") for outcome in outcomes):
            self.running = self.policy.running([job.finished for job in self.jobs])
        return outcomes

    def _hear(
        self, number: int, said: JobVerdict, committing: bool, called: Callable[[int], Sequence[int] | str]
    ) -> list[Outcome]:
        job, outcomes = self.jobs[number], []
        if self._hear_of_batches(job, said):
            outcomes.append(Outcome("batches", number))
        if job.remaining:
            return outcomes
        self._unheard.discard(number)
        if not said.good or (said.waiting and not said.agreed):
            job.remaining, job.finished = None, True
            self.queue.append(Slot("compare", number))
            return [*outcomes, Outcome("compare", number)]
        if committing:
            job.step, job.remaining = job.step + 1, None
            outcomes.append(Outcome("committed", number))
        what = called(number) if said.waiting else None
        if what == "end":
            job.finished = True
            outcomes.append(Outcome("ended", number))
        elif self.stopping and said.waiting:
            # Only where it waits on every rank: elsewhere it may still have to receive what its last step made.
            job.finished = True
            outcomes.append(Outcome("stopped", number))
        elif what == "sync":
            self.queue.append(Slot("sync", number))
            outcomes.append(Outcome("sync", number))
        elif what is not None and not isinstance(what, str):
            job.remaining = deque(what)
            outcomes.append(Outcome("admitted", number))
        return outcomes

    def _stop_others(self) -> list[Outcome]:
        others = [n for n, job in enumerate(self.jobs) if not job.finished and n not in self.running]
        for number in others:
            self.jobs[number].finished = True
        return [Outcome("stopped", number) for number in others]

    @staticmethod
    def _hear_of_batches(job: SharedJob, said: JobVerdict) -> bool:
        if said.stream is None or said.stream < 0:
            return False
        stream = job.streams.setdefault(said.stream, Stream())
        before = (stream.prepared, stream.limit)
        stream.prepared = max(stream.prepared, said.prepared)
        if said.limit is not None:
            stream.limit = said.limit
        return before != (stream.prepared, stream.limit)
