"""The interleaver's state that's identical across ranks, and the order of exchanges it determines.

An exchange blocks its lane until all ranks have entered it, so two ranks that start the exchanges
of two jobs in different orders deadlock. That rules out letting each rank start whichever job is
ready first, because at any moment different jobs are ready on different ranks. Agreeing on a job
before every exchange would work, but at the price of a round trip per exchange. So would
synchronizing after each round of jobs, but then all ranks would wait for the slowest rank in every
round.

Instead, once all ranks have called a step, a single vote admits all of its exchanges. From then on,
each rank merges the admitted exchanges of all jobs into one sequence on its own, asking the policy
for the next job whenever an exchange ends. All ranks get the same answer, because the policy's
inputs are identical across ranks: on this lane, jobs are charged for the bytes they send rather
than for measured time.

Nothing in this module depends on a clock, a device or anything else that's local to a rank. The
state only changes when a slot of the exchange lane ends or a vote delivers its verdict, and all
ranks process these events in the same order. So `slot()` returns the same next slot on all ranks,
even though they call it at different times.
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
    """One operation on the exchange lane, which all ranks perform together.

    A vote is `deferrable` if there's nothing else to do, or if it's one of the few votes before the
    first exchange that give late jobs time to call their first step. A rank may put off entering
    such a vote for a little while, unless it has something to report about `job`. That's the job
    whose turn it is or, during a joint start and in those first votes, a job that the others are
    waiting for (-1 if all jobs are paused).
    """

    kind: SlotKind
    job: int = -1
    segment: int = -1
    deferrable: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Something that a vote has decided about a job."""

    kind: OutcomeKind
    job: int


@dataclass(slots=True)
class StreamProgress:
    """All ranks' progress in a stream of batches."""

    prepared: int = 0
    limit: int | None = None


@dataclass(slots=True)
class SharedJob:
    """The part of a job's state that's identical across ranks.

    Attributes:
        row: The job's row in the ballot. Rows of jobs that have left are reused.
        step: Number of committed steps.
        remaining: The exchanges of the admitted step that haven't taken place yet.
        started: Whether the policy has ever let the job run.
        held: Whether the job is currently kept from beginning a step, because it's paused or the
            policy lets other jobs run first.
        paused: Whether the job is paused.
        stop: Whether some rank has asked the job to stop.
        finished: Whether the job has made its last step. The ranks may still have to compare their
            texts about it.
        streams: The job's streams of batches, by number. The order of slots doesn't depend on them,
            so each rank may drop closed streams whenever it likes.
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
    """Merges all jobs' exchanges into one sequence, and inserts votes into it."""

    def __init__(self, jobs: int, policy: Policy) -> None:
        # All jobs that haven't left, by number, in ascending order.
        self.jobs: dict[int, SharedJob] = {}
        self.count = 0  # number of jobs so far, including those that have left
        self.rows = 0  # number of rows in the ballot
        self.policy = policy
        self.turns = Turns(policy, 0)  # charged in bytes
        self.commit: int | None = None  # the job whose step has just made its last exchange
        self.voted = False  # whether there was a vote since the last exchange
        self.stopping = False
        # Before the first exchange, the ranks may spend several votes on waiting for all jobs to
        # call their first steps. This is how many of those votes are left.
        self.opening = _OPENING_VOTES
        self.start = JointStart()
        # Comparisons, syncs and gatherings that are due. They take precedence over everything
        # except a commit vote.
        self.queue: deque[Slot] = deque()
        self.running: tuple[int, ...] = ()  # jobs that may run now, according to the policy
        self._free: list[int] = []  # a heap of the rows that departed jobs have freed
        self._job_of_row: dict[int, int] = {}
        self._next: Slot | None = None  # the result of `slot`, cached until something changes
        self._previous: Verdict | None = None
        # A vote only considers jobs whose row has changed since the previous vote, plus the jobs in
        # this set, which the previous vote couldn't decide on yet, e.g. because they were held
        # back.
        self._unapplied: set[int] = set()
        for _ in range(jobs):
            self._add()
        self._choose_running()

    def start_together(self) -> None:
        """Holds back all jobs' first steps until every job is ready to make its own.

        A no-op if fewer than two jobs may run. Call this once, before the first slot.
        """
        if len(self.running) > 1:
            self.start.begin(self.jobs)

    def may_begin(self, job: int, *, is_step: bool) -> bool:
        """Whether the compute segments of a job's call may start before the call is admitted."""
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
        # A job can only stop at a point where its thread is waiting on all ranks. If we held the
        # job back now, because it's paused or it's another job's turn, it might never get there: on
        # some rank, it may be in the middle of a step without exchanges, which it then couldn't
        # finish. So once a job has been asked to stop, it keeps running until it has stopped.
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
            # The segments that wait for the commit can't start before this vote, so nothing may
            # delay it.
            return Slot("vote")
        if self.queue:
            return self.queue[0]
        if not self.jobs:
            return Slot("done")
        running = self.running
        job = self.turns.next(running) if running else -1
        idle = job < 0 or not self.jobs[job].remaining
        # A job may have been paused, or held back by the policy, in the middle of a step. We
        # complete the exchanges of that step anyway. Otherwise the step would stay half finished
        # for as long as the job is paused, and other jobs might end up waiting for it.
        pending = [n for n, each in self.jobs.items() if each.remaining] if idle else [job]
        if not pending:
            # During a joint start, spend this vote on a job that the others are still waiting for.
            # A held-back job would be the wrong choice: its thread is already waiting at its first
            # step on all ranks, so every rank would enter the vote without backing off, the vote
            # would change nothing, and the ranks would end up voting in a busy loop.
            return Slot("vote", next(iter(self.start.awaited(running)), job), deferrable=True)
        if self.opening:
            late = [n for n in running if not (self.jobs[n].remaining or self.start.holds(n))]
            if late:
                # Give all jobs a moment to call their first steps before kicking off the first
                # exchange. Otherwise, a job that's just a little late would have to sit through the
                # whole exchange.
                return Slot("vote", late[0], deferrable=True)
        if idle and not self.voted:
            # As far as the ranks know, the job whose turn it is hasn't called its next step yet.
            # Rather than wait for it, we vote right away on whether it has by now. If it hasn't,
            # another job's exchange goes ahead. We do this at most once between two exchanges,
            # because such a vote delays an exchange that's ready to start.
            return Slot("vote")
        job = self.turns.next(pending)
        remaining = self.jobs[job].remaining
        assert remaining
        return Slot("exchange", job, remaining[0])

    def exchange_done(self, job: int, nbytes: int) -> None:
        """Records that the slot `Slot("exchange", job, ...)` has ended.

        `nbytes` must be identical across ranks, because the order of later exchanges depends on it.
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
        """Removes and returns the comparison, sync or gathering at the head of the queue."""
        self._next = None
        return self.queue.popleft()

    def apply(
        self, verdict: Verdict, called: Callable[[int], Sequence[int] | str]
    ) -> list[Outcome]:
        """Applies a vote's verdict and returns its outcomes in the order in which they take effect.

        Args:
            verdict: The verdict.
            called: Returns what a job is waiting for on this rank: the collective segments of the
                step it called, or "end", "sync" or "batch". Only called for jobs that are waiting
                at the same point on all ranks, so its result is identical across ranks.
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
        # Skip jobs whose rows haven't changed since the previous vote, which has already decided
        # everything about them. The exceptions (`_unapplied`) are jobs that it couldn't handle,
        # because they were held back or in the middle of their exchanges, which may no longer be
        # the case. That way, the cost of a vote depends on how much has changed rather than on the
        # number of jobs.
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
                job.stop = True
                stops = True
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
            # The job has failed, but some rank hasn't received the results of the last committed
            # step yet. If the job ended now, that rank's state would be one step behind, and the
            # other ranks can't go back. So we wait, and the ranks keep voting. If that rank hangs,
            # its own watchdog reports it, and no other rank gets the blame.
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
            # Only stop a job while its thread is waiting on all ranks, unless it was never started.
            # Otherwise some rank may not have received the results of the job's last step yet.
            job.finished = True
            outcomes.append(Outcome("stopped", number))
        elif job.held:
            # The job is waiting on all ranks, but may not begin anything right now. Reconsider it
            # in the next vote.
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
