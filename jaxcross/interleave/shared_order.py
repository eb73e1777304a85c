"""The state that's identical across ranks, and the exchange lane's order, which follows from it.

An exchange blocks its lane until all ranks have arrived. So if two ranks ran the exchanges of two
jobs in different orders, they would deadlock. The order can't follow from which job is ready,
because that differs between ranks at any moment. Ranks could agree before each exchange, but that
would cost a round trip each time, and a barrier after each round of jobs would make all ranks wait
for the slowest one each time.

Instead, one vote admits all exchanges of a step at once, as soon as all ranks have called the step,
and each rank merges the admitted exchanges of all jobs into one sequence by itself. For that, the
policy only gets numbers that are identical across ranks: it charges the jobs for bytes rather than
for measured time.

Nothing here depends on a clock, a device or anything else that is rank-local. The state changes
only when a slot of the exchange lane ends or a vote delivers its verdict, and both are identical
across ranks. So `slot()` returns the same next slot on all ranks, even though they ask at different
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

    If no exchange remains, a vote is `deferrable`: a rank may delay it. Such a vote's `job` is the
    one whose turn it is, or -1 if all jobs are paused.
    """

    kind: SlotKind
    job: int = -1
    segment: int = -1
    deferrable: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One decision of a vote about one job."""

    kind: OutcomeKind
    job: int


@dataclass(slots=True)
class StreamProgress:
    """What is known of all ranks' progress in one stream of batches."""

    prepared: int = 0
    limit: int | None = None


@dataclass(slots=True)
class SharedJob:
    """A job's state, as far as it's identical across ranks.

    Attributes:
        row: The job's row in the ballot. A job that joins may reuse the row of one that has left.
        step: Committed steps.
        remaining: The admitted step's exchanges that are still to come.
        started: Whether the policy has ever let the job run.
        held: The job may not begin a step for now, because it's paused or the policy lets other
            jobs run first.
        paused: Whether the job is paused.
        stop: Whether some rank has requested that the job stop.
        finished: The job makes no more steps. The ranks may still have to compare their texts about
            it.
        streams: The job's streams of batches, by number. No slot depends on them, so a rank may
            drop closed ones.
    """

    row: int
    step: int = 0
    remaining: deque[int] | None = None
    started: bool = False
    held: bool = True
    paused: bool = False
    stop: bool = False
    finished: bool = False
    streams: dict[int, StreamProgress] = field(default_factory=dict)


_OPENING_VOTES = 16  # about half a second of backoff


class SharedState:
    """Merges the jobs' exchanges into one sequence, and places the votes between them."""

    def __init__(self, jobs: int, policy: Policy) -> None:
        # Jobs that haven't left, by number, in ascending order.
        self.jobs: dict[int, SharedJob] = {}
        self.count = 0  # how many jobs there have ever been, including those that have left
        self.rows = 0  # number of rows in the ballot
        self.policy = policy
        self.turns = Turns(policy, 0)  # charged in bytes
        self.commit: int | None = None  # the job whose step's last exchange has just ended
        self.voted = False  # whether there was a vote since the last exchange
        self.stopping = False
        # Votes that may still be spent on waiting for all jobs' first steps before the first
        # exchange.
        self.opening = _OPENING_VOTES
        self.start = JointStart()
        # Comparisons, syncs and gatherings. They precede everything except a commit vote.
        self.queue: deque[Slot] = deque()
        self.running: tuple[int, ...] = ()  # the jobs that the policy lets run now
        self._free: list[int] = []  # a heap of the rows that departed jobs have freed
        self._job_of_row: dict[int, int] = {}
        self._next: Slot | None = None  # caches the answer of `slot` until something changes
        self._previous: Verdict | None = None
        # Jobs whose row in the last verdict couldn't be acted upon yet. The next vote looks at
        # these jobs again, even if their rows haven't changed.
        self._unapplied: set[int] = set()
        for _ in range(jobs):
            self._add()
        self._choose_running()

    def start_together(self) -> None:
        """Holds back the first steps of all jobs until each of them has reached its own.

        Does nothing if fewer than two jobs may run. Call this once, before the first slot.
        """
        if len(self.running) > 1:
            self.start.begin(self.jobs)

    def may_begin(self, job: int, *, is_step: bool) -> bool:
        """Whether one of the job's calls may begin before it's admitted."""
        return not (self.jobs[job].held or (is_step and self.start.holds(job)))

    def join(self) -> int:
        """Adds a job between two votes and returns its number."""
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
        """Removes a finished job and returns its state."""
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
        # A job can stop only when its thread waits on all ranks. Suppose that the job is paused, or
        # that another job has its turn, while some rank is still at a step that exchanges nothing:
        # that rank would never get to such a wait. So a job that has to stop keeps running until
        # then.
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
        """Returns the exchange lane's next slot. Identical across ranks."""
        if self._next is None:
            self._next = self._decide()
        return self._next

    def _decide(self) -> Slot:
        if self.commit is not None:
            # The step's results are held back until its commit, so nothing else may delay this
            # vote.
            return Slot("vote")
        if self.queue:
            return self.queue[0]
        if not self.jobs:
            return Slot("done")
        running = self.running
        job = self.turns.next(running) if running else -1
        idle = job < 0 or not self.jobs[job].remaining
        # If a job was paused in the middle of a step, or the policy now holds it back, the step's
        # exchanges still take place, so that other jobs don't wait for a half-finished step.
        pending = [n for n, each in self.jobs.items() if each.remaining] if idle else [job]
        if not pending:
            # If the joint start awaits a job, give the vote to that one. A job that is held back
            # has nothing new to vote on, yet it waits at its step, so at its turn all ranks would
            # vote again and again without a backoff.
            return Slot("vote", next(iter(self.start.awaited(running)), job), deferrable=True)
        if self.opening:
            late = [n for n in running if not (self.jobs[n].remaining or self.start.holds(n))]
            if late:
                # Give these jobs a moment to call their first steps. A job that comes just after
                # the first exchange has begun has to wait for all of that exchange.
                return Slot("vote", late[0], deferrable=True)
        if idle and not self.voted:
            # An idle job has the turn. Vote immediately on whether it has called a step by now, but
            # only once between two exchanges, because another job's exchange is ready.
            return Slot("vote")
        job = self.turns.next(pending)
        remaining = self.jobs[job].remaining
        assert remaining
        return Slot("exchange", job, remaining[0])

    def exchange_done(self, job: int, nbytes: int) -> None:
        """Ends the slot `Slot("exchange", job, ...)`.

        `nbytes` must be identical across ranks, because the order of turns follows from it.
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
        """Ends the comparison, sync or gathering at the head of the queue, and returns its slot."""
        self._next = None
        return self.queue.popleft()

    def apply(
        self, verdict: Verdict, called: Callable[[int], Sequence[int] | str]
    ) -> list[Outcome]:
        """Applies a vote's verdict and returns its outcomes in order of their effect.

        Args:
            verdict: The verdict.
            called: Returns what a job waits for on this rank: the collective segments of the step
                that it called, "end", "sync" or "batch". It's called only for jobs that wait at the
                same point on all ranks, so its answer is identical across ranks.
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
        # If a job's row hasn't changed, an earlier verdict already decided everything about the
        # job, unless the job was then in the middle of its exchanges, or held back, and no longer
        # is. So the cost of a vote depends on how much has changed, rather than on the number of
        # jobs.
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
            # Some rank still has to receive the results of the last committed step. If the job
            # ended now, that rank would be one step behind the others, which can't go back. The
            # ranks keep voting, so that a rank that hangs while receiving is reported as the only
            # culprit.
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
            # Stop a started job only when it waits on all ranks. Otherwise some rank may still have
            # to receive the results of its last step.
            job.finished = True
            outcomes.append(Outcome("stopped", number))
        elif job.held:
            # The job waits but may not begin anything, so look at it again in the next vote.
            self._unapplied.add(number)
        elif what == "sync":
            self.queue.append(Slot("sync", number))
            outcomes.append(Outcome("sync", number))
        elif self.start.holds(number):
            self._unapplied.add(number)  # as above
        elif what is not None and not isinstance(what, str):
            job.remaining = deque(what)
            outcomes.append(Outcome("admitted", number))
        return outcomes

    @staticmethod
    def _apply_batches(job: SharedJob, verdict: JobVerdict) -> bool:
        if verdict.stream is None or verdict.stream < 0:
            return False
        stream = job.streams.setdefault(verdict.stream, StreamProgress())
        before = (stream.prepared, stream.limit)
        stream.prepared = max(stream.prepared, verdict.prepared)
        if verdict.limit is not None:
            stream.limit = verdict.limit
        return before != (stream.prepared, stream.limit)
