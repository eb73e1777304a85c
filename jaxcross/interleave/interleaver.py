"""Decides what each lane does next. A pure state machine: events in, instructions out.

It has no thread and no clock, and knows neither JAX nor MPI. One class serves all policies and
simulators: `handle` is its only mutator, and `check` states the invariants.

**Compute lane.** Its order is local to this rank. Up to `depth` segments are on the device.
Whenever fewer are, and any job has a ready one, the policy's choice is dispatched: the lane never
idles by choice (it conserves work). A compute segment is ready when its compute producers were
dispatched (the device keeps their order), its exchanges are done and, if it consumes the step's
input state, the step is committed.

**Exchange lane.** Its order is the same on all ranks, because it follows from `SharedState` alone.
A rank only decides *when* it begins the next slot:

- an exchange, when its producers were dispatched here (or have failed: then with zeros, at once);
- a commit vote, the vote for an idle job's turn, a sync, a comparison once no call of its job goes
  on: at once;
- the vote while no exchange remains (`deferrable`): at once if the job whose turn it is has
  something to report here, otherwise when the driver's backoff has elapsed.

**Why it cannot hang.** Claim: a rank that is through with slot i begins slot i + 1 within bounded
time, whatever the other ranks do. Then, slots being the same everywhere, every collective is
entered by all ranks, and by induction every slot ends. For all but exchanges and comparisons the
claim is the list above; a backoff is bounded, and begun once a slot. An exchange waits for its
producers: compute segments that neither need a later exchange nor a commit (`StepGraph` refuses
both), and a comparison for those of a call that needs neither any more, in a lane whose every
segment ends by itself. A call that has begun waits for no vote there, and no policy passes over it
for ever.

**Why it does not spin.** The deferrable vote is entered at once only for a job that waits, or
failed, here, or once for each request and each job that was added. If all ranks enter it for that
reason, the vote changes something: it admits, ends, grants or ejects. Otherwise a rank that has
nothing to report paces the vote by its backoff.

**Membership.** A job's number is never used again, so that a late event of a job that has left is
known to be late. A job that was added during the run joins between two votes, once all ranks have
added it (`PendingJobs`).

**Joint start.** First steps may be held back until all jobs have come to theirs. `JointStart` says
why that ends; a job that is held back has nothing to vote on, so it does not make its rank vote at
once.

**Failure.** A rank that fails inside an admitted step still makes the step's remaining exchanges,
with zeros, and says so in the commit vote; then no rank runs the segments that would overwrite the
input state. A rank that fails between steps says so in any vote. In both cases all ranks compare
texts and finish the job, but first a call goes on to its end that may have overwritten the state:
one that is committed, or has begun and exchanges nothing. That is its end on the device: the text
says what fails there.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxcross._endings import JobStatus
from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.ballot_writer import BallotWriter
from jaxcross.interleave.compute_queue import DEFAULT_DEPTH, ComputeQueue
from jaxcross.interleave.local_state import LocalCall, LocalJob, Point, Wait
from jaxcross.interleave.policy import Policy
from jaxcross.interleave.shared_order import Outcome, SharedState, Slot
from jaxcross.interleave.vote import AtStart, Verdict, point_hash

_MAX_BACKOFF_LEVEL = 16  # the driver's waits stop growing long before this level


class Interleaver:
    """One rank's state in a run of several jobs.

    Args:
        jobs: Number of jobs, identical across ranks.
        policy: Decides whose turn it is, identical across ranks.
        depth: Number of compute segments that may be on the device at once.
    """

    def __init__(self, jobs: int, policy: Policy, depth: int = DEFAULT_DEPTH) -> None:
        if jobs < 1 or depth < 1:
            raise ValueError(
                f"`jobs` and `depth` of an interleaver must be at least 1, got {jobs} and {depth}"
            )
        self.shared = SharedState(jobs, policy)
        self._jobs = {job: LocalJob() for job in range(jobs)}  # jobs that haven't left, by number
        self._compute = ComputeQueue(jobs, policy, depth)
        self._ballot_writer = BallotWriter(jobs)
        self._slot: Slot | None = None  # the exchange lane's current slot
        self._backing_off = False  # a backoff has begun for the next slot
        self._idle_votes = 0  # consecutive votes that changed nothing
        self._starting = False  # a joint start holds back first steps
        self._moves = 0  # exchanges, calls that returned, and votes that changed something
        self._out: list[m.Instruction] = []

    @property
    def finished(self) -> bool:
        """Whether all jobs have ended on all ranks and the exchange lane has its `Finish`."""
        return self._slot is not None and self._slot.kind == "done"

    def step(self, job: int) -> int:
        """Returns a job's step count on this rank: committed steps plus local ones since then."""
        return (
            self.shared.jobs[job].step + self._jobs[job].local_steps - self._jobs[job].other_calls
        )

    def announcement(self) -> str:
        """Returns this rank's text for a `GatherAnnouncements`.

        Call this once per gathering, when the gathering begins, because it hands over the submitted
        texts.
        """
        return self._ballot_writer.pending.announcement()

    def pending_waits(self) -> dict[int, Wait]:
        """Returns what each job waits for, unless it's held back or has an exchange to come."""
        found = {}
        for number, mine in self._jobs.items():
            shared = self.shared.jobs[number]
            if shared.held or shared.remaining or self.shared.start.is_here(number):
                continue
            wait = mine.pending_wait(self.step(number), self._moves)
            if wait is not None:
                found[number] = wait
        return found

    def all_paused(self) -> list[int]:
        """Returns the remaining jobs if all are paused and their threads wait for a `resume`.

        Otherwise returns an empty list.
        """
        left = {number: job for number, job in self.shared.jobs.items() if not job.finished}
        if self.shared.stopping or not all(
            job.paused and not job.remaining for job in left.values()
        ):
            return []
        for number in left:
            mine = self._jobs[number]
            # A paused job still gets a batch. Its function then runs until it calls its step.
            at_rest = mine.point is not None and mine.point.kind != "batch"
            if mine.thread_started and not at_rest:
                return []
        return list(left)

    def coming(self) -> list[int]:
        """Returns the jobs that a joint start awaits and that aren't ready on this rank yet."""
        awaited = self.shared.start.awaited(self.shared.running)
        return [job for job in awaited if self._jobs[job].at_start is AtStart.COMING]

    def handle(self, event: m.Event) -> tuple[m.Instruction, ...]:
        """Applies an event and returns the resulting instructions. Never waits or communicates."""
        job: int | None = getattr(event, "job", None)
        if job is None or job in self._jobs:
            self._apply(event)
        else:
            self._apply_to_absent_job(event)
        if job in self._jobs:
            self._update_job(job)
        if self._starting and not self.shared.start:
            self._starting = False
            for each in self._jobs:
                self._note_ready(each)
        self._fill_compute_lane()
        self._begin_slot()
        out = tuple(self._out)
        self._out = []
        return out

    def _apply(self, event: m.Event) -> None:
        """Applies an event of the run or of its lanes."""
        match event:
            # The events that come with every segment are first, because cases are tried in order.
            case m.SegmentDispatched(job):
                self._jobs[job].note(event)
            case m.SegmentCompleted(job, call, segment, ns):
                self._compute.ended((job, call, segment), ns)
            case m.ExchangeDone(job, segment, finite):
                self._exchange_done(job, segment, finite)
            case m.SegmentFailed(job, call, segment):
                self._compute.ended((job, call, segment))
                self._jobs[job].segment_failed(event)
            case m.RunStarted(together):
                if together:
                    self.shared.start_together()
                    self._starting = bool(self.shared.start)
                self._start_jobs()
            case m.JobAdded(name):
                self._ballot_writer.add(name)
            case m.TextSubmitted(text):
                self._ballot_writer.submit(text)
            case m.StopRequested():
                self._ballot_writer.stop()
            case m.BackoffElapsed():
                self._begin_slot(backoff_over=True)
            case m.VoteDone(verdict):
                self._expect("vote")
                self._vote_done(verdict)
                self._start_jobs()
            case m.TextsCompared(job, texts):
                self._expect("compare", job)
                self.shared.queued_done()
                # A rank that noticed no failure sends the point at which its job waits. The job was
                # ejected only if some rank ejected it and no rank failed.
                kinds = {text.partition("\n")[0] for text in texts}
                failed = JobStatus.FAILED in kinds or JobStatus.EJECTED not in kinds
                self._finish_job(job, JobStatus.FAILED if failed else JobStatus.EJECTED, texts)
            case m.AnnouncementsGathered(texts):
                self._expect("gather")
                self.shared.queued_done()
                self._announcements_gathered(texts)
                self._start_jobs()
            case m.SyncDone(job):
                self._expect("sync", job)
                self.shared.queued_done()
                self._answer(job, m.SyncReturned(job, self.shared.count == 1))
            case _:
                self._apply_to_job(event)

    def _apply_to_job(self, event: m.Event) -> None:
        """Applies an event from one of the job's own threads."""
        match event:
            case m.StepCalled(job):
                self._jobs[job].begin_call(event, self.step(job))
                self._ballot_writer.urgent |= self._starting
            case m.SyncWanted(job, label):
                self._jobs[job].want_sync(label)
            case m.BatchWanted(job, stream, index):
                self._jobs[job].want_batch(stream, index)
                self._grant_batch(job)
            case m.StreamBegun(job, still_open):
                mine = self._jobs[job]
                shared = self.shared.jobs[job]
                for known in (mine.prepared, mine.limits, shared.streams):
                    # The stream read last stays, because ballots still report on it.
                    for stream in known.keys() - {
                        *still_open,
                        mine.stream,
                    }:
                        del known[stream]
            case m.StepsRestored(job, step):
                self.shared.jobs[job].step = step  # for reports only: no decision depends on it
            case m.JobRaised(job, text):
                self._jobs[job].fail(text)
            case m.JobRequested(job, _, request):
                self._jobs[job].add_request(request)
                self._ballot_writer.urgent = True
            case m.StartExcused(job):
                self._jobs[job].note(event)
                self._ballot_writer.urgent = True
            case (
                m.BatchDropped()
                | m.BatchPrepared()
                | m.StreamEnded()
                | m.JobReturned()
                | m.FirstStepMade()
            ):
                self._jobs[event.job].note(event)
            case _:
                raise InternalError(f"the interleaver does not know the event {event!r}")

    def _apply_to_absent_job(self, event: m.Event) -> None:
        """Applies an event of a job that has left or hasn't joined yet."""
        match event:
            case m.SegmentCompleted(job, call, segment) | m.SegmentFailed(job, call, segment):
                self._compute.ended((job, call, segment))
            case m.StepCalled(job) | m.BatchWanted(job) | m.SyncWanted(job):
                self._out.append(m.Raised(job))
            case m.JobRequested(_, name, request):
                self._ballot_writer.pending.request(name, request)
            case m.ExchangeDone(job) | m.TextsCompared(job) | m.SyncDone(job):
                raise InternalError(
                    f"the exchange lane reports `{event}`, but there is no job {job}"
                )

    # Jobs.

    def _start_jobs(self) -> None:
        for job in self.shared.running:
            if not self._jobs[job].thread_started:
                self._jobs[job].thread_started = True
                self._out.append(m.StartJob(job))

    def _announcements_gathered(self, texts: tuple[str, ...]) -> None:
        joined, delivered = self._ballot_writer.pending.apply(texts)
        for name, local in joined:
            number = self.shared.join()
            self._jobs[number] = local
            self._compute.join(number)
            self._ballot_writer.join(number, self.shared.rows)
            self._out.append(m.JobJoined(number, name))
        if delivered:
            # The delivered texts may add jobs before the next slot. Queue another gathering, so
            # that those jobs can join even if no other job is left.
            self.shared.queue.append(Slot("gather"))
            self._out += [m.TextDelivered(text) for text in delivered]

    def _update_job(self, job: int) -> None:
        """Updates what follows from a job's state: its thread's answer, ready segment, ballot."""
        self._answer_thread(job)
        self._note_ready(job)
        self._ballot_writer.touch(job)

    def _answer(self, job: int, instruction: m.Instruction) -> None:
        mine = self._jobs[job]
        mine.is_waiting = False
        mine.point = None
        if isinstance(instruction, m.StepReturned | m.Raised):
            mine.call = None
        self._out.append(instruction)

    def _grant_batch(self, job: int) -> None:
        mine = self._jobs[job]
        stream = self.shared.jobs[job].streams.get(mine.stream)
        granted = None if stream is None else mine.batch_granted(stream.prepared, stream.limit)
        if granted is not None:
            self._answer(job, m.BatchGranted(job, granted))

    def _finish_job(self, job: int, status: JobStatus, texts: tuple[str, ...] = ()) -> None:
        mine = self._jobs[job]
        shared = self.shared.leave(job)
        ended = mine.point is not None and mine.point.kind == "end"
        # Steps that all ranks have made.
        step = shared.step - (mine.other_calls - mine.other_local_calls)
        self._out.append(m.JobFinished(job, status, step, texts, stop_requested=shared.stop))
        if mine.is_waiting and not ended:
            self._answer(job, m.Raised(job))
        del self._jobs[job]
        self._compute.leave(job)
        self._ballot_writer.leave(job, shared.row)

    def _answer_thread(self, job: int) -> None:
        """Answers a job's thread if its step is complete.

        Once a job's function has returned, proposes the job's end, but only after its last segment
        has left the device: until then a segment could still fail.
        """
        mine = self._jobs[job]
        if (
            mine.call is not None
            and mine.is_waiting
            and not mine.call.broken
            and mine.call.complete()
        ):
            mine.count(mine.call)
            self._moves += 1
            self._answer(job, m.StepReturned(job, self.step(job), mine.call.skipped))
        if mine.returned and not self._compute.busy(job):
            mine.returned = False
            mine.wait_at(
                Point(
                    "end", point_hash("end", mine.local_steps), f"ended after step {self.step(job)}"
                )
            )

    # The compute lane.

    def _note_ready(self, job: int) -> None:
        mine = self._jobs[job]
        may_begin = mine.call is not None and self.shared.may_begin(
            job, is_step=mine.call.graph.is_step
        )
        self._compute.set_ready(job, mine.ready(may_begin=may_begin))

    def _fill_compute_lane(self) -> None:
        while (turn := self._compute.next()) is not None:
            job, segment = turn
            call = self._jobs[job].call
            assert call is not None
            call.issue(segment)
            self._compute.on_device.add((job, call.number, segment))
            step, other_calls = self._jobs[job].position(call, self.step(job))
            self._out.append(m.Dispatch(job, call.number, step, segment, other_calls))
            self._note_ready(job)

    # The exchange lane.

    def _expect(self, kind: str, job: int = -1) -> None:
        slot = self._slot
        self._slot = None
        if slot is None or slot.kind != kind or (job >= 0 and slot.job != job):
            raise InternalError(
                f"the exchange lane reports a {kind} of job {job}, but its slot is {slot}"
            )

    def _begin_slot(self, backoff_over: bool = False) -> None:
        if self._slot is not None:
            return
        slot = self.shared.slot()
        instruction: m.Instruction
        if slot.kind == "exchange":
            mine = self._jobs[slot.job]
            call = mine.call
            if call is None:
                raise InternalError(f"job {slot.job} has an admitted step but no call")
            zero = mine.failed is not None
            if not zero and not call.may_exchange(slot.segment):
                return
            step, other_calls = mine.position(call, self.step(slot.job))
            instruction = m.RunExchange(
                slot.job, call.number, step, slot.segment, zero, other_calls
            )
        elif slot.kind == "vote":
            urgent = not slot.deferrable or self._ballot_writer.urgent
            urgent = urgent or (slot.job >= 0 and self._jobs[slot.job].has_update())
            if not (urgent or backoff_over):
                if not self._backing_off:
                    self._backing_off = True
                    self._out.append(m.Backoff(self._idle_votes))
                return
            instruction = m.CastVote(self._ballot_writer.cast(self._jobs, self.shared.jobs))
        elif slot.kind == "compare":
            mine = self._jobs[slot.job]
            if mine.goes_on() or self._compute.busy(slot.job, but=mine.open_call()):
                return
            instruction = m.CompareTexts(slot.job, mine.text(), self.step(slot.job))
        elif slot.kind == "gather":
            instruction = m.GatherAnnouncements()
        elif slot.kind == "sync":
            instruction = m.RunSync(slot.job, self.step(slot.job))
        else:
            instruction = m.Finish(self._ballot_writer.pending.names)
        self._slot = slot
        self._backing_off = False
        self._out.append(instruction)

    def _exchange_done(self, job: int, segment: int, finite: bool) -> None:
        self._expect("exchange", job)
        self._moves += 1
        call = self._jobs[job].call
        if call is None:
            raise InternalError(f"job {job} made an exchange but has no call")
        call.exchange_done(segment, finite=finite)
        self.shared.exchange_done(job, call.graph.nbytes[segment] if call.graph.nbytes else 1)

    def _vote_done(self, verdict: Verdict) -> None:
        running = self.shared.running
        outcomes = self.shared.apply(verdict, lambda job: self._jobs[job].called())
        self._idle_votes = 0 if outcomes else min(self._idle_votes + 1, _MAX_BACKOFF_LEVEL)
        self._moves += bool(outcomes)
        for outcome in outcomes:
            self._apply_outcome(outcome)
            if outcome.job in self._jobs:
                self._update_job(outcome.job)
        if self.shared.running is not running:
            for job in self._jobs:
                # Different jobs may begin a step now.
                self._note_ready(job)

    def _apply_outcome(self, outcome: Outcome) -> None:
        job = outcome.job
        call = self._jobs[outcome.job].call
        if outcome.kind in ("committed", "skipped") and call is not None and not call.counts:
            self._jobs[job].other_calls += 1
        if outcome.kind in (
            "committed",
            "skipped",
            "ended",
            "stopped",
        ):
            # At this point all ranks have made the same steps.
            self.shared.jobs[job].step += self._jobs[job].local_steps
            self._jobs[job].local_steps = self._jobs[job].other_local_calls = 0
        if outcome.kind == "admitted":
            assert call is not None
            call.admitted = True
            self._jobs[job].point = None
        elif outcome.kind in ("committed", "skipped"):
            assert call is not None
            call.committed = True
            call.skipped = outcome.kind == "skipped"
            if call.skipped:
                self._out.append(m.SkipStep(job, call.number))
        elif outcome.kind in ("here", "excused", "late"):
            awaited = self.shared.start.awaited(self.shared.running)
            self._out.append(m.JobAtStart(job, outcome.kind, awaited))
        elif outcome.kind in ("paused", "resumed"):
            self._out.append(m.JobPaused(job, outcome.kind == "paused"))
        elif outcome.kind in ("ended", "stopped"):
            self._finish_job(job, JobStatus(outcome.kind))
        elif outcome.kind == "batches":
            self._grant_batch(job)

    def check(self) -> None:
        """Raises InternalError if the state contradicts itself.

        This is for tests, because it costs about as much as an event.
        """
        check_lanes(self._compute, self._jobs, self.shared)
        if self._out:
            raise InternalError("interleaver: instructions were left behind")


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
