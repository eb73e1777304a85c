"""The part of the interleaver's state that every rank shares, and the order of the exchange lane
that follows from it.

Nothing in here depends on a clock, a device or anything else that only one rank knows. It changes
by two things, both the same on all ranks: the end of a slot of the exchange lane, and the verdict
of a vote. So `slot()` returns the same next slot on all ranks, although they ask at different
times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from jaxcross.interleave.joint_start import JointStart
from jaxcross.interleave.policy import Policy, Turns
from jaxcross.interleave.vote import JobRequest, JobVerdict, Verdict

SlotKind = Literal["exchange", "vote", "compare", "sync", "gather", "done"]
OutcomeKind = Literal[
    "committed",
    "skipped",
    "admitted",
    "ended",
    "stopped",
    "compare",
    "sync",
    "batches",
    "paused",
    "resumed",
    "here",
    "excused",
    "late",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """One action on the exchange lane.

    A vote is `deferrable` where no exchange remains: a rank may delay it. Its `job` is the one
    whose turn it is, -1 if all are paused.
    """

    kind: SlotKind
    job: int = -1
    segment: int = -1
    deferrable: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One thing that a vote decided about one job."""

    kind: OutcomeKind
    job: int


@dataclass(slots=True)
class Stream:
    """The progress of all ranks in one stream of batches, as far as it is known."""

    prepared: int = 0
    limit: int | None = None


@dataclass(slots=True)
class SharedJob:
    """The state of a job that all ranks share.

    Attributes:
        row: Its row in the ballot. A job that joins gets the row of one that has left.
        step: Committed steps.
        remaining: Exchanges of the admitted step that are still to be made.
        started: The policy has let it run.
        held: It begins no step for now: it is paused, or the policy lets other jobs go first.
        stop: A rank has requested that it stops.
        finished: It makes no more steps; the ranks' texts about it may still have to be compared.
        streams: Its streams of batches, by number. No slot follows from them, so a rank may forget
            closed ones.
    """

    row: int
    step: int = 0
    remaining: deque[int] | None = None
    started: bool = False
    held: bool = True
    paused: bool = False
    stop: bool = False
    finished: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)


_OPENING_VOTES = 16  # about half a second of backoff


class SharedState:
    """Merges the jobs' exchanges, one at a time, and places the votes between them."""

    def __init__(self, jobs: int, policy: Policy) -> None:
        self.jobs: dict[
            int, SharedJob
        ] = {}  # those that have not left, by number, in ascending order
        self.count = 0  # all jobs ever, those that have left included
        self.rows = 0  # rows of the ballot
        self.policy = policy
        self.turns = Turns(policy, 0)  # in bytes
        self.commit: int | None = None  # the job whose step's last exchange was just made
        self.voted = False  # whether there was a vote since the last exchange
        self.stopping = False
        # Votes that may still wait for every job's first step before the first exchange.
        self.opening = _OPENING_VOTES
        self.start = JointStart()
        self.queue: deque[Slot] = (
            deque()
        )  # comparisons, syncs, gatherings: they precede everything but a commit vote
        self.running: tuple[int, ...] = ()  # the jobs that the policy lets run now
        self._free: list[int] = []  # rows of jobs that have left, a heap
        self._job_of_row: dict[int, int] = {}
        self._next: Slot | None = None  # the answer of `slot`, until something changes
        self._previous: Verdict | None = None
        # Jobs whose row of the last verdict was not acted upon: the next vote looks at them again,
        # changed or not.
        self._unapplied: set[int] = set()
        for _ in range(jobs):
            self._add()
        self._choose_running()

    def start_together(self) -> None:
        """Holds back the first steps of several jobs that may run until all have come to theirs.

        Called once, before the first slot.
        """
        if len(self.running) > 1:
            self.start.begin(self.jobs)

    def may_begin(self, job: int, *, is_step: bool) -> bool:
        """Whether a call of the job's may begin before it is admitted."""
        return not (self.jobs[job].held or (is_step and self.start.holds(job)))

    def join(self) -> int:
        """Adds a job, between two votes, and returns its number."""
        number = self._add()
        self._choose_running()
        return number

    def _add(self) -> int:
        number = self.count
        self.count += 1
        if self._free:
            row = heappop(self._free)
        else:
            row = self.rows
            self.rows += 1
        self.jobs[number] = SharedJob(row)
        self._job_of_row[row] = number
        self.turns.add(number)
        self._unapplied.add(number)
        return number

    def leave(self, number: int) -> SharedJob:
        """Removes a job that is over."""
        job = self.jobs.pop(number)
        heappush(self._free, job.row)
        del self._job_of_row[job.row]
        self.turns.remove(number)
        self._unapplied.discard(number)
        self.start.leave(number)
        self._choose_running()
        return job

    def _choose_running(self) -> None:
        able = [n for n, job in self.jobs.items() if not (job.paused or job.finished)]
        self.running = self.policy.running(able) if able else ()
        self._next = None
        # A job can stop only where it waits on all ranks. If it is paused (or another job has its
        # turn) while a rank is still at a step that exchanges nothing, that rank never gets there:
        # so a job that is to stop runs until then.
        stopping = (
            n for n, job in self.jobs.items() if job.started and (job.stop or self.stopping)
        )
        self.running += tuple(
            n for n in stopping if n not in self.running and not self.jobs[n].finished
        )
        for number, job in self.jobs.items():
            job.held = number not in self.running
            job.started |= not job.held
        self.start.settle(self.running)

    def slot(self) -> Slot:
        """Returns the next slot of the exchange lane, the same on every rank."""
        if self._next is None:
            self._next = self._decide()
        return self._next

    def _decide(self) -> Slot:
        if self.commit is not None:
            # Results of a step are held back until its commit: nothing else may delay that vote.
            return Slot("vote")
        if self.queue:
            return self.queue[0]
        if not self.jobs:
            return Slot("done")
        running = self.running
        job = self.turns.next(running) if running else -1
        idle = job < 0 or not self.jobs[job].remaining
        # A job that was paused in the middle of a step, or that the policy now holds back, still
        # makes that step's exchanges: other jobs must not wait for a half-made step.
        pending = [n for n, each in self.jobs.items() if each.remaining] if idle else [job]
        if not pending:
            # A job that is held back has nothing new for a vote: at its turn all ranks would vote
            # without a pause.
            return Slot("vote", next(iter(self.start.awaited(running)), job), deferrable=True)
        if self.opening:
            late = [n for n in running if not (self.jobs[n].remaining or self.start.holds(n))]
            if late:
                # Once the first exchange is under way, a job that comes just after it waits for its
                # whole length.
                return Slot("vote", late[0], deferrable=True)
        if idle and not self.voted:
            # An idle job has the turn: vote at once on whether it has called a step by now, but
            # never twice between two exchanges, since another job's exchange is ready to go.
            return Slot("vote")
        job = self.turns.next(pending)
        remaining = self.jobs[job].remaining
        assert remaining
        return Slot("exchange", job, remaining[0])

    def exchange_done(self, job: int, nbytes: int) -> None:
        """Ends the slot `Slot("exchange", job, ...)`. `nbytes` must be the same on all ranks: turns
        follow from it.
        """
        remaining = self.jobs[job].remaining
        assert remaining
        remaining.popleft()
        self.turns.begin(job)
        self.turns.charge(job, nbytes)
        self.voted = False
        self.opening = 0
        self._next = None
        if not remaining:
            self.commit = job

    def queued_done(self) -> Slot:
        """Ends the comparison, sync or gathering of texts at the head of the queue."""
        self._next = None
        return self.queue.popleft()

    def apply(
        self, verdict: Verdict, called: Callable[[int], Sequence[int] | str]
    ) -> list[Outcome]:
        """Applies the verdict of a vote, and returns its outcomes in the order of their effect.

        Args:
            verdict: The verdict.
            called: Returns what a job waits for on this rank: the collective segments of the step
                that it called, "end", "sync" or "batch". Called only for jobs that wait at the same
                point on all ranks, so that the answer is the same on all.
        """
        committing = self.commit
        self.commit = None
        self.voted = True
        self._next = None
        if self.opening and any(job.remaining for job in self.jobs.values()):
            self.opening -= 1
        if verdict.stop and not self.stopping:
            self.stopping = True
            self._choose_running()
        if (
            verdict.gather
            and not self.stopping
            and not any(slot.kind == "gather" for slot in self.queue)
        ):
            self.queue.append(Slot("gather"))
        # Where a job's row has not changed, an earlier verdict decided everything, unless the job
        # was then amid its exchanges, or held back, and no longer is. So a vote costs as much as
        # has changed, however many jobs there are.
        changed = {
            self._job_of_row[row]: None
            for row in verdict.changed_rows(self._previous)
            if row in self._job_of_row
        }
        self._unapplied.update(changed)
        self._previous = verdict
        outcomes = self._apply_requests(verdict, changed)
        at_start = {
            n: verdict.job(self.jobs[n].row).at_start for n in changed if self.start.holds(n)
        }
        outcomes += [
            Outcome(arrival, n) for n, arrival in self.start.apply(at_start) if arrival != "coming"
        ]
        self.start.settle(self.running)
        for number in tuple(self.jobs) if self.stopping else sorted(self._unapplied):
            job = self.jobs[number]
            again = not job.remaining and (
                self.stopping or job.stop or not job.held or number == committing
            )
            if (number in changed or again) and not job.finished:
                outcomes += self._apply_job(
                    number, verdict.job(job.row), number == committing, called
                )
        if any(outcome.kind in ("compare", "ended", "stopped") for outcome in outcomes):
            self._choose_running()
        return outcomes

    def _apply_requests(self, verdict: Verdict, jobs: Iterable[int]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        stops = False
        for number in jobs:
            job = self.jobs[number]
            request = verdict.job(job.row).request
            if request is JobRequest.STOP:
                job.stop = stops = True
            if not job.finished and request is (
                JobRequest.RESUME if job.paused else JobRequest.PAUSE
            ):
                job.paused = not job.paused
                outcomes.append(Outcome("paused" if job.paused else "resumed", number))
        if outcomes or stops:
            self._choose_running()
        return outcomes

    def _apply_job(
        self,
        number: int,
        verdict: JobVerdict,
        committing: bool,
        called: Callable[[int], Sequence[int] | str],
    ) -> list[Outcome]:
        job = self.jobs[number]
        outcomes = []
        if self._apply_batches(job, verdict):
            outcomes.append(Outcome("batches", number))
        if job.remaining:
            return outcomes
        self._unapplied.discard(number)
        if not verdict.good and not verdict.received_commit:
            # Some rank still has to receive the results of the last committed step: it would be one
            # step behind the others, which cannot go back. Ranks go on to vote, so that a rank that
            # hangs there is named by itself.
            self._unapplied.add(number)
            return outcomes
        if not verdict.good or (verdict.waiting and not verdict.same_point):
            job.remaining = None
            job.finished = True
            self.queue.append(Slot("compare", number))
            return [*outcomes, Outcome("compare", number)]
        if committing:
            job.step += 1
            job.remaining = None
            outcomes.append(Outcome("committed" if verdict.finite else "skipped", number))
        what = called(number) if verdict.waiting else None
        if what == "end":
            job.finished = True
            outcomes.append(Outcome("ended", number))
        elif (self.stopping or job.stop) and (verdict.waiting or not job.started):
            # Only where it waits on every rank: elsewhere it may still have to receive the results
            # of its last step.
            job.finished = True
            outcomes.append(Outcome("stopped", number))
        elif job.held:
            self._unapplied.add(
                number
            )  # it waits, but may not begin anything: look again in the next vote
        elif what == "sync":
            self.queue.append(Slot("sync", number))
            outcomes.append(Outcome("sync", number))
        elif self.start.holds(number):
            self._unapplied.add(number)  # likewise
        elif what is not None and not isinstance(what, str):
            job.remaining = deque(what)
            outcomes.append(Outcome("admitted", number))
        return outcomes

    @staticmethod
    def _apply_batches(job: SharedJob, verdict: JobVerdict) -> bool:
        if verdict.stream is None or verdict.stream < 0:
            return False
        stream = job.streams.setdefault(verdict.stream, Stream())
        before = (stream.prepared, stream.limit)
        stream.prepared = max(stream.prepared, verdict.prepared)
        if verdict.limit is not None:
            stream.limit = verdict.limit
        return before != (stream.prepared, stream.limit)
