"""Decides what each lane does next. A pure state machine: events in, instructions out.

The interleaver decides the order in which the jobs' computations and exchanges run, but leaves
running them to others: it has no threads and no clock, and uses neither JAX nor MPI. That way, the
same class makes the decisions in real runs, in the simulator and in the model check, under any
policy. Its state changes only in `handle` (except that `announcement` empties the list of submitted
texts), and `check` tests its invariants.

**Compute lane.** Each rank orders its own compute segments, and keeps at most `depth` of them on
the device at once. Whenever there's room and at least one job has a segment ready, we immediately
dispatch the segment of the job that the policy picks. The lane is therefore work-conserving: it
never holds the device back to wait for a job that isn't ready. A compute segment is ready once

- its call may run: unless the job has failed here, a call may begin as soon as nothing holds the
  job back (a pause, the policy or a joint start), and it may continue once it has begun or has been
  admitted,
- all compute segments it depends on have been dispatched (the device runs them in that order),
- all exchanges it depends on have completed, and
- the step has been committed, if the segment overwrites the step's input state.

**Exchange lane.** All ranks run the same exchanges and votes in the same order. We call each
position in that order a slot. Every rank works out the next slot on its own, from `SharedState`,
which is identical everywhere. The only thing a rank decides for itself is *when* to start the slot:

- It starts an exchange as soon as the segments that produce the exchange's inputs have been
  dispatched on this rank. If the job has failed on this rank, it starts the exchange immediately,
  with zeros as inputs.
- It doesn't wait before a commit vote (may this step overwrite the state?), a sync (communication
  requested by a job's thread) or a gathering (of announcements). The same goes for the vote that
  takes place, at most once between two exchanges, when the job whose turn it is hadn't called its
  next step by the previous vote. It asks whether the job has done so by now; if not, another job's
  exchange goes first.
- A comparison, in which the ranks exchange texts about a job that can't continue, starts once the
  job's calls have completed or failed on this rank. The exception is a call with exchanges that was
  never committed. It can't have overwritten the state, so it doesn't matter if some of its segments
  are still on the device.
- If nothing else is due, the next slot is a `deferrable` vote. So are a few votes before the first
  exchange, which give late jobs time to call their first step. A rank enters such a vote
  immediately if it has something to report about the job that the vote is for. Otherwise it waits
  until the driver's backoff has elapsed.

**Why it can't deadlock.** We claim that a rank that has finished slot i starts slot i + 1 within
bounded time, whatever the other ranks do. Since all ranks have the same slots, it follows that all
ranks enter each collective operation and, by induction, that every slot ends. For most kinds of
slots, the claim follows directly from the list above, because a backoff is bounded and happens at
most once per slot. Two kinds wait for computation:

- An exchange waits for the compute segments that produce its inputs. These segments depend neither
  on a later exchange nor on the step's commit (`StepGraph` rejects such programs), so all they need
  is the compute lane.
- A comparison waits for calls of the job that have already received everything they need from the
  exchange lane.

Neither wait can last forever, because this rank can finish all of that computation without any help
from the others. Policies must not starve a job, a call that has begun or has been admitted doesn't
need another vote to run these segments, and whatever is on the device finishes eventually.

**Why it doesn't spin.** If ranks could enter deferrable votes whenever they liked, they'd vote in a
busy loop while all jobs are computing. So a rank skips the backoff only if the job that the vote is
for (`Slot.job`) is waiting or has failed on this rank, or just once after an event that has to
reach all ranks soon, such as a request or an added job (`BallotWriter.urgent`). If all ranks skip
the backoff because the same job is waiting or has failed on each of them, the vote achieves
something: the job's step is admitted, its batch or sync is granted, or the job ends. Otherwise some
rank has nothing to report, and its backoff holds up the vote for everyone.

**Membership.** Jobs are numbered, and numbers are never reused. So when an event arrives after its
job has left the run, we can tell that it's stale and isn't about a newer job. A job added during
the run joins between two votes, once all ranks have added it (`PendingJobs`).

**Joint start.** A run may hold back its jobs' first steps until all jobs are ready to make theirs;
see `JointStart` for why this wait always ends. Whenever a job calls a step during the joint start,
or is excused from it, the rank enters the next vote immediately, because that vote may end the
joint start. Once a job has reached its first step on all ranks, it gives no rank any further reason
to skip the backoff, since the votes are now for jobs that are still awaited.

**Failure.** If a rank fails in the middle of an admitted step, the other ranks are still going to
enter the step's remaining exchanges, so the failed rank takes part in them with zeros. It then
reports the failure in the commit vote, and no rank runs the segments that would overwrite the input
state. If a rank fails between two steps, it reports the failure in the next vote. Either way, all
ranks exchange texts that describe what happened, and the job ends.

There's one exception. A call that may already have overwritten the state (because it's committed,
or because it has no exchanges and has begun) is first allowed to run to completion on the device.
Otherwise ranks that didn't fail could be left with half an update. If the call fails there too, the
text says so as well.
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

_MAX_BACKOFF_LEVEL = 16  # the driver's backoff reaches its maximum long before this level


class Interleaver:
    """One rank's decisions in a run of several jobs.

    Args:
        jobs: Number of jobs, identical across ranks.
        policy: Picks the next job on each lane. Must be identical across ranks.
        depth: Maximum number of compute segments on the device at once.
    """

    def __init__(self, jobs: int, policy: Policy, depth: int = DEFAULT_DEPTH) -> None:
        if jobs < 1 or depth < 1:
            raise ValueError(
                f"`jobs` and `depth` of an interleaver must be at least 1, got {jobs} and {depth}"
            )
        self.shared = SharedState(jobs, policy)
        self._jobs = {
            job: LocalJob() for job in range(jobs)
        }  # all jobs that haven't left, by number
        self._compute = ComputeQueue(jobs, policy, depth)
        self._ballot_writer = BallotWriter(jobs)
        self._slot: Slot | None = None  # the exchange lane's current slot
        self._backing_off = False  # the driver is already backing off before the next slot
        self._idle_votes = 0  # consecutive votes that changed nothing
        self._starting = False  # a joint start is holding back the jobs' first steps
        # Counts progress of any kind: exchanges, calls that returned, votes that changed something.
        self._moves = 0
        self._out: list[m.Instruction] = []

    @property
    def finished(self) -> bool:
        """Whether all jobs have ended on all ranks and the exchange lane has been told to stop."""
        return self._slot is not None and self._slot.kind == "done"

    def step(self, job: int) -> int:
        """Returns how many steps a job has made on this rank, including local steps."""
        return (
            self.shared.jobs[job].step + self._jobs[job].local_steps - self._jobs[job].other_calls
        )

    def announcement(self) -> str:
        """Returns the text that this rank contributes to a `GatherAnnouncements`.

        Call this exactly once per gathering, right before the ranks exchange their announcements.
        It empties the list of submitted texts, so a second call would return an announcement
        without them.
        """
        return self._ballot_writer.pending.announcement()

    def pending_waits(self) -> dict[int, Wait]:
        """Returns what each job is waiting for, by job number.

        Leaves out jobs that aren't waiting, are held back, or have exchanges left in their step.
        """
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
        """Returns the unfinished jobs if all are paused and only a `resume` can get them going.

        Returns an empty list if the run is being stopped or can still make progress on its own,
        i.e. if some unfinished job isn't paused, is in the middle of its exchanges, or has a thread
        that's still running the job's own code on this rank.
        """
        left = {number: job for number, job in self.shared.jobs.items() if not job.finished}
        if self.shared.stopping or not all(
            job.paused and not job.remaining for job in left.values()
        ):
            return []
        for number in left:
            mine = self._jobs[number]
            # A paused job can't make steps, but it still gets its batches. So a thread that's
            # waiting for a batch isn't at rest: it may soon run again, up to its next step.
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
        # If the joint start has just ended, any job may have become ready.
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
        """Applies an event that concerns the whole run or comes from a lane."""
        match event:
            # `match` tries the cases in order, so the events that occur for every segment come
            # first.
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
                # The ranks have exchanged texts about a job that can't continue. Each text begins
                # with its kind: a rank may report that the job failed, or that it ejected the job
                # because of invalid values, such as a loss that isn't finite. On a rank where
                # nothing went wrong, the text just says where the job's thread is waiting. So the
                # job counts as ejected if at least one rank ejected it and no rank reports a
                # failure.
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
        """Applies an event that's about a single job and doesn't come from a lane."""
        match event:
            case m.StepCalled(job):
                self._jobs[job].begin_call(event, self.step(job))
                self._ballot_writer.urgent |= self._starting
            case m.SyncWanted(job, label, text):
                self._jobs[job].want_sync(label, text)
            case m.BatchWanted(job, stream, index):
                self._jobs[job].want_batch(stream, index)
                self._grant_batch(job)
            case m.StreamBegun(job, still_open):
                mine = self._jobs[job]
                shared = self.shared.jobs[job]
                for known in (mine.prepared, mine.limits, shared.streams):
                    # Keep the most recently read stream even if it's closed, because this rank's
                    # ballots still report its progress.
                    for stream in known.keys() - {
                        *still_open,
                        mine.stream,
                    }:
                        del known[stream]
            case m.StepsRestored(job, step):
                self.shared.jobs[job].step = step  # only for reports, never for a decision
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
        """Applies an event of a job that has already left or hasn't joined yet."""
        match event:
            # A job may leave the run while some of its computations are still queued on the device.
            # Each of them takes up room on the compute lane until it completes or fails, so make
            # that room available now.
            case m.SegmentCompleted(job, call, segment) | m.SegmentFailed(job, call, segment):
                self._compute.ended((job, call, segment))
            # The job has ended on all ranks, but its thread didn't know yet.
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
            # A delivered text may add a job on every rank, and added jobs can only join in a
            # gathering, in which the ranks exchange announcements. So queue another gathering right
            # away. Otherwise, if no other job was left, the run would end before the new job could
            # join.
            self.shared.queue.append(Slot("gather"))
            self._out += [m.TextDelivered(text) for text in delivered]

    def _update_job(self, job: int) -> None:
        """Updates everything that follows from a job's state, which may just have changed."""
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
        # Report the number of steps made on all ranks. `shared.step` also counts calls that aren't
        # steps, such as evaluations. Subtract them, except for local calls since the last exchange,
        # which it doesn't include yet.
        step = shared.step - (mine.other_calls - mine.other_local_calls)
        self._out.append(m.JobFinished(job, status, step, texts, stop_requested=shared.stop))
        if mine.is_waiting and not ended:
            self._answer(job, m.Raised(job))
        del self._jobs[job]
        self._compute.leave(job)
        self._ballot_writer.leave(job, shared.row)

    def _answer_thread(self, job: int) -> None:
        """Lets a job's thread continue if its step is complete, or proposes the job's end.

        Once a job's function has returned on this rank, the rank proposes to end the job in the
        next vote. Before that, it waits for the job's last computation to leave the device. The
        computation could still fail, in which case the job has to end with an error.
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
        while (chosen := self._compute.next()) is not None:
            job, segment = chosen
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
                f"the exchange lane reports the end of a slot `{kind}` of job {job}, but its "
                f"current slot is {slot}"
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
                raise InternalError(
                    f"job {slot.job} has been given a slot for a step it never called"
                )
            zero = mine.failed is not None
            # Bail out if some inputs haven't been dispatched here yet. Every later event brings us
            # back here.
            if not zero and not call.may_exchange(slot.segment):
                return
            step, other_calls = mine.position(call, self.step(slot.job))
            instruction = m.RunExchange(
                slot.job, call.number, step, slot.segment, zero, other_calls
            )
        elif slot.kind == "vote":
            urgent = not slot.deferrable or self._ballot_writer.urgent
            urgent = urgent or (slot.job >= 0 and self._jobs[slot.job].has_update())
            # This rank has nothing to report, so ask the driver to back off before the vote, but
            # only once per slot.
            if not (urgent or backoff_over):
                if not self._backing_off:
                    self._backing_off = True
                    self._out.append(m.Backoff(self._idle_votes))
                return
            instruction = m.CastVote(self._ballot_writer.cast(self._jobs, self.shared.jobs))
        elif slot.kind == "compare":
            mine = self._jobs[slot.job]
            if mine.must_complete() or self._compute.busy(slot.job, but=mine.open_call()):
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
            raise InternalError(f"job {job} made an exchange, but has no call")
        call.exchange_done(segment, finite=finite)
        self.shared.exchange_done(job, call.graph.nbytes[segment] if call.graph.nbytes else 1)

    def _vote_done(self, verdict: Verdict) -> None:
        running = self.shared.running
        outcomes = self.shared.apply(verdict, lambda job: self._jobs[job].called())
        # Back off longer and longer while votes change nothing.
        self._idle_votes = 0 if outcomes else min(self._idle_votes + 1, _MAX_BACKOFF_LEVEL)
        self._moves += bool(outcomes)
        for outcome in outcomes:
            self._apply_outcome(outcome)
            if outcome.job in self._jobs:
                self._update_job(outcome.job)
        if self.shared.running is not running:
            for job in self._jobs:
                # The policy may now let different jobs begin a step.
                self._note_ready(job)

    def _apply_outcome(self, outcome: Outcome) -> None:
        job = outcome.job
        call = self._jobs[outcome.job].call
        # Every commit increments the `shared.step` counter, even if the call isn't a step, e.g. an
        # evaluation that exchanges something. Count such calls here, so that the `step` method can
        # subtract them.
        if outcome.kind in ("committed", "skipped") and call is not None and not call.counts:
            self._jobs[job].other_calls += 1
        if outcome.kind in (
            "committed",
            "skipped",
            "ended",
            "stopped",
        ):
            # Ranks make their local steps, i.e. steps without exchanges, independently of each
            # other. By now, all of them have made the same number, so it's safe to add it to the
            # count that's identical across ranks.
            self.shared.jobs[job].step += self._jobs[job].local_steps
            self._jobs[job].local_steps = 0
            self._jobs[job].other_local_calls = 0
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
        """Raises InternalError if the state is inconsistent.

        Only tests and simulations call this after every event, because it takes about as long as
        handling the event.
        """
        check_lanes(self._compute, self._jobs, self.shared)
        if self._out:
            raise _broken(f"instructions were not returned: {self._out}")


def check_lanes(compute: ComputeQueue, jobs: Mapping[int, LocalJob], shared: SharedState) -> None:
    """Raises InternalError if a segment ran too early, or the compute lane is needlessly idle."""
    # Tests call this after every event, so only build a message if a rule is broken.
    on_device = compute.on_device
    depth = compute.depth
    if len(on_device) > depth:
        raise _broken(f"{len(on_device)} segments are on the compute lane, whose depth is {depth}")
    if jobs.keys() != shared.jobs.keys():
        raise _broken(f"the jobs are {list(jobs)} here, but {list(shared.jobs)} on all ranks")
    rows = [job.row for job in shared.jobs.values()]
    if not len(set(rows)) == len(rows) <= shared.rows:
        raise _broken(f"the jobs' rows {rows} must be different, and at most {shared.rows} rows")
    for job, mine in jobs.items():
        if shared.jobs[job].remaining and (mine.call is None or not mine.call.admitted):
            raise _broken(f"job {job} has exchanges left, but no admitted step")
        if mine.call is not None:
            _check_call(job, mine, mine.call, shared)
    if len(on_device) < depth:
        for job, mine in jobs.items():
            may_begin = shared.may_begin(
                job, is_step=mine.call is not None and mine.call.graph.is_step
            )
            if mine.ready(may_begin=may_begin) is not None:
                raise _broken(
                    f"job {job} has a ready segment, although the compute lane is not full"
                )


def _check_call(job: int, mine: LocalJob, call: LocalCall, shared: SharedState) -> None:
    if not mine.is_waiting:
        raise _broken(f"job {job} has a call, but its thread is not waiting")
    if not call.dispatched <= call.issued:
        early = call.dispatched - call.issued
        raise _broken(f"job {job}: segments {early} were dispatched, but never issued")
    if call.ready() in call.issued:
        raise _broken(f"job {job}: segment {call.ready()} is both issued and ready")
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
                raise _broken(
                    f"job {job}: segment {segment} ran before all of {call.graph.needs[segment]}"
                    ", which it needs"
                )


def _broken(rule: str) -> InternalError:
    return InternalError(f"interleaver: {rule}")
