"""Passes each instruction to the thread that carries it out, and stores the jobs by number."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import final

from jaxcross._endings import JobStatus
from jaxcross.errors import InternalError, JobError
from jaxcross.interleave import Listeners
from jaxcross.interleave import messages as m
from jaxcross.runtime.failure_text import describe, explain, printing_ranks
from jaxcross.runtime.job_record import JobRecord, StepCall
from jaxcross.runtime.paused_run import PausedRun
from jaxcross.runtime.start_gate import late_warning, note_at_start

_log = logging.getLogger("jaxcross")


@final
class Router:
    """Knows the jobs and the lanes of a run, and passes instructions to them.

    It's called with the driver's lock held, in the order of the interleaver's instructions.

    Args:
        records: The run's initial jobs, in the order of their numbers.
        compute: Puts a segment into the compute lane's queue.
        exchange: Puts an instruction into the exchange lane's queue. The second argument is the
            call that an exchange belongs to.
        listeners: Receive all notes.
        rank: This rank.
        ranks: Number of ranks.

    Attributes:
        jobs: The jobs that have joined and whose threads haven't ended, by the interleaver's
            number.
        joining: The jobs that were added but haven't joined yet, by name.
        threads: The jobs' threads. Some of them may have ended.
        paused_run: Ends the run if all of its jobs would stay paused forever.
        texts: Texts that the driver has to deliver once it has released the lock.
        left_out: After the run, the names of jobs that were added on this rank but never joined.
    """

    def __init__(
        self,
        records: Sequence[JobRecord],
        compute: Callable[[m.Dispatch, StepCall], None],
        exchange: Callable[[m.Instruction, StepCall | None], None],
        *,
        listeners: Listeners,
        rank: int,
        ranks: int,
    ) -> None:
        self.jobs = dict(enumerate(records))
        self.joining: dict[str, JobRecord] = {}
        self.threads: list[threading.Thread] = []
        self.texts: list[str] = []
        self.left_out: tuple[str, ...] = ()
        self.paused_run = PausedRun(rank, ranks)
        self._compute = compute
        self._exchange = exchange
        self._listeners = listeners
        self._rank = rank

    def route(self, instruction: m.Instruction) -> None:
        """Passes an instruction to its thread. Never waits."""
        match instruction:
            case m.Dispatch(number, call, _, _):
                self._compute(instruction, self._call(number, call))
            case m.RunExchange(number, call, _, _, _):
                self._exchange(instruction, self._call(number, call))
            case (
                m.CastVote()
                | m.CompareTexts()
                | m.GatherAnnouncements()
                | m.RunSync()
                | m.Backoff()
            ):
                self._exchange(instruction, None)
            case (
                m.StepReturned(number)
                | m.BatchGranted(number)
                | m.SyncReturned(number)
                | m.Raised(number)
            ):
                self.jobs[number].answers.put(instruction)
            case m.JobFinished():
                self._finish(self.jobs[instruction.job], instruction)
            case m.StartJob(number):
                job = self.jobs[number]
                job.thread = job.make_thread()
                self.threads = [*(t for t in self.threads if t.is_alive()), job.thread]
                job.thread.start()
            case m.SkipStep(number, call):
                self._call(number, call).execution.skip()
            case m.JobJoined(number, name):
                job = self.jobs[number] = self.joining.pop(name)
                job.number = number
                self.paused_run.changes += 1
                self._listeners.note(job=name, kind="status", value="joined")
            case m.JobPaused(number, paused):
                job = self.jobs[number]
                job.paused = paused
                self.paused_run.changes += 1
                job.on_pause(paused)
                self._listeners.note(
                    job=job.name, kind="status", value="paused" if paused else "resumed"
                )
            case m.JobAtStart(number, arrival, awaited):
                name = self.jobs[number].name
                text = note_at_start(arrival, [self.jobs[n].name for n in awaited])
                self._listeners.note(job=name, kind="status", value=text)
                # All ranks get this instruction, so it's enough for rank 0 to log the warning. If
                # each rank logged one when it noticed that the job is late, the same warning could
                # show up several times.
                if arrival == "late" and self._rank == 0:
                    _log.warning("%s", late_warning(name))
            case m.TextDelivered(text):
                if not self.paused_run.take(text):
                    self.texts.append(text)
            case m.Finish(left_out):
                self.left_out = left_out
                self._exchange(instruction, None)
            case _:
                raise InternalError(f"the driver does not know the instruction {instruction!r}")

    def _finish(self, job: JobRecord, end: m.JobFinished) -> None:
        job.status = end.status
        job.on_end(end.status, end.stop_requested)
        if end.texts:
            job.error = explain(job.name, end.step, end.texts)
            job.error.__cause__ = job.cause
            job.error.cause_rank = end.texts.index(end.texts[self._rank])
            job.prints_error = self._rank in printing_ranks(end.texts)
        # Write this note before setting the `done` event. As soon as the event is set, the job's
        # thread may write the job's final note, which must be its last. If the job has ended
        # normally, its thread writes this note itself, after the last metrics.
        if end.status != JobStatus.ENDED:
            self._listeners.note(
                job=job.name, kind="status", step=end.step, value=str(job.error or end.status)
            )
        # Set this last, because the job's thread and `Runner.run` wait for it before they read the
        # other fields.
        job.done.set()
        if job.thread is None:
            del self.jobs[job.number]

    def _call(self, number: int, call_number: int) -> StepCall:
        # A late instruction may belong to an earlier call of the job, and must not touch the values
        # of the current call. So each instruction carries the number of its call, which we check
        # here.
        job = self.jobs[number]
        if job.call is None or job.call.number != call_number:
            current = "no call" if job.call is None else f"call {job.call.number}"
            raise InternalError(
                f"job `{job.name}` got an instruction for call {call_number}, but is in {current}"
            )
        return job.call

    def segment_failed(
        self,
        instruction: m.Dispatch | m.RunExchange,
        call: StepCall,
        error: Exception,
        *,
        ejects: bool = False,
    ) -> m.SegmentFailed:
        """Returns the event for a segment that raised an exception.

        The job's function doesn't get to see a segment's exception right away. The ranks first have
        to agree on how the job ends; only then does the function get an error.
        """
        segment = instruction.segment
        # The job may already have ended because of another failure.
        job = self.jobs.get(instruction.job)
        if job is not None and job.cause is None:
            job.cause = error
        where = "in step" if call.in_step else "in a call after step"
        where = f"{where} {instruction.step}, segment {segment} ({call.graph.kinds[segment]})"
        return m.SegmentFailed(
            instruction.job,
            instruction.call,
            segment,
            where,
            describe(error),
            bool(call.graph.collectives),
            ejects,
        )

    def break_off(self, error: BaseException) -> None:
        """Ends all jobs on this rank, because the run is broken."""
        for job in (*self.jobs.values(), *self.joining.values()):
            if job.status is None:
                job.status = JobStatus.FAILED
                job.error = JobError(
                    f"Job `{job.name}` cannot continue, because the run broke on rank "
                    f"{self._rank} with `{type(error).__name__}`. Look at that error, which is the "
                    "cause of this one, and restart the run."
                )
                job.error.__cause__ = error
            job.answers.put(m.Raised(job.number))
            job.done.set()
