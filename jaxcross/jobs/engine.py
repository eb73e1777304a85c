"""`JobEngine`: one job of a runner, behind the `JobContext` that users see.

The engine calls the job's function in a thread of its own. When the function calls a step, the
engine waits until it's this step's turn in the order on which all ranks have agreed, runs it, and
counts it. The engine also stores the job's state, metrics and status, so that the user can still
read them after the job has ended.

**Running a step.** If the job's function called a step directly, two jobs could start their
exchanges in a different order on each rank, and deadlock. So `JobEngine.run` submits the call to
the driver and waits, and the driver decides together with the other ranks when the step's segments
run. A step counts only once all ranks have committed it. So the bookkeeping that depends on the
number of steps comes after the commit: counting examples and skipped steps, checking replicas, and
recording the position in the data from which a restart would resume.

**Ending a job.** A job may end because its function returns or raises, because a vote stops it, or
because another rank fails. Its function may also catch the exception that should have ended it, and
continue. In each of these cases, the job's thread first reports to the driver and then waits until
the job has ended on all ranks. Until then, the job's status isn't known: even if the function has
returned here, another rank may still fail. Then the thread reads back the logged metrics, sets the
final status, and drops all references except to the state.

**Saving the last state.** A checkpoint requires communication, which a running job does in the
exchange lane, i.e. the thread that runs everything in which the ranks take part together. If the
function has returned, the last state is saved that way, as the last work of the job's thread.

After a stop or a failure, the job can no longer communicate during the run, so its last state can't
be saved then. Instead, the runner saves it after the run, when the ranks communicate directly
(`JobEngine.save_after_run`).
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar, final, get_args

from jaxcross._arguments import check_choice
from jaxcross._endings import JobStatus
from jaxcross._pytree import PyTree, arrays_by_buffer
from jaxcross.checkpoint import Session, named_leaves
from jaxcross.errors import ExchangeError, JobError
from jaxcross.health import print_error, traceback_text
from jaxcross.interleave import PARAMETER_SERVER, JobRequest, Listeners, Span, SpanKind
from jaxcross.jobs.admission import MemoryAdmission, Need, remedies
from jaxcross.jobs.batch_loops import BatchLoops, ExampleCount
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.evaluations import Evaluations
from jaxcross.jobs.job_state import JobState, own_copy
from jaxcross.jobs.metrics import BeginFiles, MetricLog
from jaxcross.jobs.prefetch import Prefetcher
from jaxcross.jobs.replicas import ReplicaChecks
from jaxcross.jobs.resumption import Resumption
from jaxcross.jobs.skipped_steps import SkippedSteps
from jaxcross.jobs.step_registry import StepRegistry, memory_of
from jaxcross.jobs.stop_message import StoppedJob
from jaxcross.program import Compiled, NonFinite, Program, refuse_to_skip
from jaxcross.runtime import (
    Agreement,
    Driver,
    JobRecord,
    LaneThread,
    RestoreMode,
    Stopped,
    after_run,
    describe,
    run_collectively,
)
from jaxcross.world import Control, RunOnAllRanks, World, all_equal

T = TypeVar("T")

_log = logging.getLogger("jaxcross")


def current_engine() -> JobEngine | None:
    """Returns the engine of the job whose thread this is, or None in any other thread."""
    thread = threading.current_thread()
    return thread.engine if isinstance(thread, JobThread) else None


@final
class JobEngine:
    """One job on this rank. Implements `jaxcross.runtime.step_host.StepHost`.

    Attributes:
        name: The job's name.
        world: All ranks.
        context: The object that the job's function receives and that `Runner.add` returns.
        driver: The run's driver; None before the run and after the job has ended.
        record: The driver's record of the job; None before the run.
        resumption: Connects the job to its checkpoints; None if the runner has none.
        misuse: An error for the job's own thread to raise, because another thread has iterated over
            the job's batches.
        step: How many steps the job has made.
        first_step: How many of these steps were made by earlier runs.
        cuts: The number of segments into which `cut="auto"` has cut each step, by the step's key.
            It's saved so that a restart cuts the step in the same way. 0 means that the step was
            cut for a job that runs alongside others.
        nonfinite: What to do with exchanged values that aren't finite.
        rank_local: Names of the leaves whose values differ between ranks on purpose.
        latest: The job's latest state.
        skipped_steps: Counts the steps that were skipped.
        registry: The functions with exchanges that the job calls.
        replicas: Compares the ranks' copies of the state.
        examples: Counts the examples per step.
        evaluations: Evaluations that run every n steps, and early stopping.
        metrics: The metrics that the job has logged.
        batch_loops: Begins the job's loops over batches.
        loops: The job's open loops over batches, in the order in which they began.
        planned_steps: The step at which the job's latest loop will end if it isn't ended earlier;
            None if unknown.
        left_over: Whether a loop ended because another rank ran out of data while this rank still
            had a batch.
        status: How the job ended; None while it hasn't. Set after `error`, and never changed again.
        error: The reason, if the job failed, was ejected or was left out.
        skipped: How many steps were skipped, i.e. left the state unchanged. Known once the job has
            ended.
        unread: The error that this rank got when it read back the logged metrics, if any.
        done: Set once the job has ended and its results are final.
    """

    in_run = True

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        listeners: Listeners,
        world: World,
        admission: MemoryAdmission,
        begin_files: BeginFiles | None = None,
    ) -> None:
        self.name = name
        self.world = world
        self._function = fn
        self._arguments = arguments
        self._listeners = listeners
        self._admission = admission
        self.driver: Driver | None = None
        self.record: JobRecord | None = None
        self.resumption: Resumption | None = None
        self.misuse: JobError | None = None
        self._stop_requested = False  # whether it was this job that was stopped, not the run
        self._unwound = False
        self.step = 0
        self.first_step = 0
        self.cuts: dict[str, int] = {}
        self.nonfinite: NonFinite = "ignore"
        self.rank_local: tuple[str, ...] = ()
        self.latest = JobState()
        self.skipped_steps = SkippedSteps(name, self.latest)
        self.registry = StepRegistry()
        self.replicas = ReplicaChecks(name, rank=world.rank, ranks=world.size, latest=self.latest)
        self.examples = ExampleCount()
        self.evaluations = Evaluations(name, rank=world.rank, ranks=world.size)
        self.metrics = MetricLog(self._note_metrics, begin_files)
        self.batch_loops = BatchLoops(self)
        self.loops: list[Prefetcher] = []
        self.planned_steps: int | None = None
        self.left_over = False
        self.status: JobStatus | None = None
        self.error: Exception | None = None
        self.skipped = 0
        self.unread: Exception | None = None
        self.done = JobDone()
        self.context = JobContext(self)

    # Progress.

    @property
    def order(self) -> float:
        """The job's position in the order of the run's jobs, identical across ranks.

        Infinite if the job never joined the run.
        """
        record = self.record
        return float("inf") if record is None or record.number < 0 else record.number

    @property
    def paused(self) -> bool:
        """Whether the job is paused on all ranks."""
        return self.record is not None and self.record.paused

    @property
    def history(self) -> list[tuple[int, PyTree]]:
        """The logged metrics that have been read back, each with its step."""
        return self.metrics.history

    @property
    def is_only_job(self) -> bool:
        """Whether the job is its runner's only job, so that no other job overlaps with it.

        The value is from the latest `run_on_all_ranks` call, so it's the same on all ranks.
        """
        return self.record is not None and self.record.is_only_job

    @property
    def steps_left(self) -> int | None:
        """How many batches remain in the job's loops on this rank; None if unknown."""
        left = [loop.batches_left for loop in self.loops if not loop.closed]
        return None if None in left else max((n for n in left if n is not None), default=None)

    @property
    def steps_made(self) -> int:
        """How many steps the job has made in this run."""
        return self.step - self.first_step

    @property
    def save_every(self) -> int | None:
        """The interval, in steps, at which a plain loop saves; None if there's no interval."""
        return None if self.resumption is None else self.resumption.every

    def unsavable_reason(self) -> str:
        """Returns why a restart couldn't resume from the current state; "" if it could."""
        if self.steps_made and self.registry.training is None:
            return "the job trains with a `ParameterServer`, whose state differs between ranks"
        if self.latest.step != self.step:
            return "its function neither returned nor saved its latest state"
        if self.latest.is_guess:
            return (
                "its function changes what its step returns before the next one, and was stopped "
                "before it did so for the latest step: assign the state to `job.state` in each step"
            )
        return "" if self.resumption is None else self.resumption.unsavable_reason

    # Joining the run, and the job's thread.

    def make_thread(self) -> JobThread:
        return JobThread(self, self.world.exchange_owner.job_threads)

    def attach(self, driver: Driver, record: JobRecord, session: Session | None = None) -> None:
        """Adds the job to a run that's about to begin, or to one that's in progress.

        If a `session` is passed, the job has checkpoints.
        """
        resumption = None if session is None else self._resumption(session)
        self.driver = driver
        self.record = record
        self.resumption = resumption
        record.abandon = self._abandon
        # Another job may wait for this job's end, and then save a state that depends on it. If the
        # process is killed after that, a restart must be able to see that this job had ended. So
        # the driver calls `on_end` before any other job can notice the end. The file that says that
        # this job has ended is then on disk before the other job's checkpoint.
        record.on_end = self._on_end
        if resumption is not None:
            record.on_pause = resumption.mark_paused

    def _resumption(self, session: Session) -> Resumption:
        def note(text: str) -> None:
            self._listeners.note(job=self.name, kind="status", value=text)

        evaluations = self.evaluations
        if session.best is not None:
            evaluations.keep_best(*session.best)
        checkpointer = session.checkpointer(self.name, note)
        return Resumption(checkpointer, self.cuts, session.every, evaluations, self.skipped_steps)

    def main(self) -> None:
        """Runs the job's function. This is the body of the job's thread.

        An error in the function makes the job fail on all ranks. So even if the function has
        returned on this rank, the job may still fail because of another rank. That's why this
        method waits until the job has ended everywhere.
        """
        driver, record = self.running()
        try:
            self._call_function()
        # A stop ends the function by an exception too, but that isn't a failure.
        except Stopped as stopped:
            self._unwound = True
            forget_locals(stopped)
            driver.job_returned(record)
        # Catch every exception, even `SystemExit`: whatever ends this thread, the other ranks need
        # to know, because otherwise they would wait for the job forever. If another thread has
        # iterated over the job's batches, which isn't allowed, report that instead, because this
        # error is probably a consequence of it.
        except BaseException as error:
            driver.job_raised(record, self.misuse or error, f"after step {self.step}")
            forget_locals(error)
        else:
            driver.job_returned(record)
        self._end_thread(driver, record)

    def _call_function(self) -> None:
        """Calls the job's function, stores the state that it returns, and saves it."""
        driver, record = self.running()
        result = self._function(self.context, **self._arguments)
        self.running()
        # The call above raises if another thread has misused the job's loops. The function may have
        # returned normally even so.
        if result is not None:
            self.latest.set(result, self.step)
        del result
        self.finish_step()
        # Copy the logged metrics from the device to the host before the job's last save. A restart
        # continues after that save and doesn't log them again, so if the process died after the
        # save, metrics that were still on the device would be lost.
        if self.resumption is not None:
            self.read_back()
        self._save_last(partial(driver.run_on_all_ranks, record))

    def _abandon(self) -> NoReturn:
        """Abandons the job's thread, which then sleeps forever.

        A job is stopped by an exception that's raised in its function. If the function catches this
        exception and calls another step, although the job has ended, the driver calls this method.
        Python can't terminate a thread from outside, so all we can do is to put the thread to
        sleep.
        """
        driver, record = self.running()
        _log.warning(
            "Job `%s` has ended (%s), but its function catches every exception and continues. Its "
            "thread cannot be ended, and is put to sleep. Catch only the exceptions you expect.",
            self.name,
            describe(record.error) if record.error else JobStatus.STOPPED,
        )
        self._unwound = True
        driver.job_returned(record)
        self._end_thread(driver, record)
        thread = threading.current_thread()
        assert isinstance(thread, JobThread)
        thread.living.discard(thread)
        driver.abandon(thread)
        while True:
            threading.Event().wait()

    def _end_thread(self, driver: Driver, record: JobRecord) -> None:
        # Close the job's loops over batches before we wait for the other ranks. The wait may take
        # long, and as long as a loop is open, its prefetching thread keeps batches in memory.
        self._close_loops()
        record.done.wait()
        self.close()
        driver.release(record)

    def _on_end(self, status: JobStatus, asked: bool) -> None:
        self._give_back_memory()
        status = self._final_status(status)
        self._stop_requested = asked
        # If the whole run was stopped, e.g. by Ctrl-C, the next run should resume this job, so we
        # don't mark it as done. If the user has stopped only this job, we do mark it, because then
        # it should stay stopped.
        if self.resumption is not None and (status != JobStatus.STOPPED or asked):
            self.resumption.mark_done(status)

    def _final_status(self, status: JobStatus) -> JobStatus:
        """Returns the job's status, given the vote's.

        The vote is wrong in one case, namely if a job that trains with a `ParameterServer` was
        stopped. Such a job makes no exchanges through the driver, so when a stop ends its function
        by an exception, it looks to the vote as if the function had returned. Only this rank's
        thread has caught the exception, so we correct the status here.
        """
        return JobStatus.STOPPED if self._unwound and status == JobStatus.ENDED else status

    def _close_loops(self) -> None:
        """Ends the prefetching threads. Doesn't wait for them."""
        for loop in self.loops:
            loop.close()

    def close(self) -> None:
        """Ends the job on this rank: reads back its metrics, and drops all references but the
        state.

        Waits for the device. A second call is a no-op.
        """
        if self.done.is_set():
            return
        record = self.record
        if record is not None:
            status = (record.status and self._final_status(record.status)) or JobStatus.LEFT_OUT
            stopped_early = status == JobStatus.ENDED and self.evaluations.stop_reason
            # Set the error before the status. Another thread may read both at any time: if it finds
            # a status, it concludes that the job has ended, and expects the error to be there too.
            self.error = record.error
            self.status = JobStatus.STOPPED_EARLY if stopped_early else status
            self.skipped = self.skipped_steps.before + record.skipped
            if self.error is not None:
                if record.prints_error:
                    self._print_failure(self.error)
                forget_locals(self.error)
            # The function may have been ended before it set its latest state.
            if status != JobStatus.ENDED:
                self.latest.adopt_results()
            self.replicas.finish(status, self.step)
            self.latest.release()
        failure = self.metrics.read_remaining()
        # If a step failed, its metrics can't be read either. Then the step's error is the more
        # useful one.
        if failure is not None and self.error is None:
            self.unread = failure
        if record is not None:
            done = self.status in (JobStatus.ENDED, JobStatus.STOPPED_EARLY)
            self._listeners.note(
                job=self.name,
                kind="done" if done else "closed",
                step=self.step,
                value=self.status,
            )
        # The user may keep this job for a long time, just to read its final state. So drop
        # everything else that uses memory: the function's arguments (which contain data and steps),
        # the steps' constants, and the batches of the loops.
        self.driver = None
        if record is not None:
            record.detach()
        self._function = _no_function
        self._arguments = {}
        self.registry.forget()
        self.loops = []
        if self.metrics.observer is not None:
            if not self.metrics.observer.ended(asked=self._stop_requested):
                self.resumption = None
            self.metrics.observer = None
        self.done.set()

    def _print_failure(self, error: JobError | ExchangeError) -> None:
        """Prints why the job failed, because the run may continue for days before it raises."""
        cause = error.__cause__
        if cause is None or self.status == JobStatus.EJECTED:
            print_error(f"jaxcross: {error}")
        else:
            heading = (
                f"jaxcross: job `{self.name}` failed on rank {self.world.rank} of "
                f"{self.world.size}:"
            )
            print_error(f"{heading}\n{traceback_text(cause)}")

    def close_unbegun(self) -> None:
        """Closes the job after the run has failed, unless the job's own thread will do that."""
        thread = None if self.record is None else self.record.thread
        if thread is None or not thread.is_alive():
            self.close()

    def save_after_run(self) -> None:
        """Saves the state of a job that was stopped or has failed. Waits for all ranks.

        Called after the run. By then, the job has already been stopped or has failed. If saving
        fails too, we only log that error: if we raised it, the user would no longer see why the job
        ended.
        """
        record = self.record
        # Saving requires communication, so either all ranks must save this job or none of them.
        # That's why the decision is based on the status in the driver's record: the ranks have
        # voted on it, so it's the same on all of them. The engine's own `self.status` may differ
        # between ranks (see `_final_status`).
        if record is None or record.status in (None, JobStatus.ENDED):
            return

        def run_on_all_ranks(label: str, work: Callable[[Control], T]) -> T:
            with after_run(self.world, label, job=self.name, step=self.step):
                return run_collectively(work, self.world.control)

        try:
            self._save_last(run_on_all_ranks)
        except JobError as error:
            _log.warning("%s", error)

    def at_stop(self) -> StoppedJob:
        """Returns the step at which the run was stopped, and the step of its checkpoint."""
        resumption = self.resumption
        begun, saved = (
            (False, None) if resumption is None else (resumption.begun, resumption.saved_step)
        )
        return StoppedJob(
            name=self.name, status=self.status, step=self.step, begun=begun, saved=saved
        )

    def _save_last(self, run_on_all_ranks: RunOnAllRanks) -> None:
        resumption = self.resumption
        if resumption is not None:
            reason = self.unsavable_reason()
            resumption.save_last(
                self.latest.state, self.step, run_on_all_ranks, unsavable_reason=reason
            )

    # Calls from the job's own thread, and requests from any thread.

    def running(self) -> tuple[Driver, JobRecord]:
        """Returns the run's driver, and its record of the job.

        Raises:
            JobError: The job isn't running. Also raised in the job's own thread if another thread
                has iterated over the job's batches.
        """
        if self.driver is None or self.record is None:
            raise JobError(
                f"Job `{self.name}` is not running. Its methods work inside its function, during "
                "`runner.run()`."
            )
        if self.misuse is not None and self._in_own_thread:
            raise self.misuse
        return self.driver, self.record

    @property
    def _in_own_thread(self) -> bool:
        """Whether the caller is the job's own thread."""
        return self.record is not None and self.record.thread is threading.current_thread()

    def _stray_error(self, what: str, done: str) -> JobError | None:
        """Returns the error for a call outside of the job's own thread; None in that thread.

        A job waits for the other ranks in one thread only, its own. If two of its threads waited at
        the same time, e.g. one for a step and one for a batch, one of them could receive the
        other's answer.
        """
        if self._in_own_thread:
            return None
        return JobError(
            f"{what} of job `{self.name}` was {done} in thread "
            f"`{threading.current_thread().name}`, not in the job's own: two threads would take "
            "each other's answers from the other ranks. Do it in the job's function. `job.batches` "
            "has a thread that prepares batches ahead of it: give what yours does to batches as an "
            "iterator, `job.batches(prepared(data))`."
        )

    def ends_stray_loop(self) -> bool:
        """Whether a loop over batches must end immediately because it runs in the wrong thread.

        It's an error to iterate over a job's batches in another thread, and it makes the job fail.
        If possible, we raise the error in the job's own thread, where we can handle it. In the
        other thread there may be no code that catches it, and an uncaught exception in an arbitrary
        thread would end the whole run, including the other jobs.

        Raises:
            JobError: The job's own thread can't raise the error, because the job has ended or
                already has an error to raise.
        """
        error = self._stray_error("`job.batches`", "iterated")
        if error is None:
            return False
        if (
            self.misuse is not None
            or self.driver is None
            or self.record is None
            or self.record.status == JobStatus.ENDED
        ):
            raise error
        self.misuse = error
        return True

    def request(self, request: JobRequest) -> None:
        """Passes a request to all ranks, unless the job has ended. Doesn't wait.

        Raises:
            JobError: The run hasn't begun.
        """
        if self.status is not None:
            return
        # There's a race here, because another thread may change both attributes while we read them.
        # When a run begins, it sets first `driver`, then `record`; when the job ends, its own
        # thread sets `driver` to None. So if there's a record but no driver, we conclude that the
        # job has ended, and drop the request. For that to be right, we have to read `record` first.
        # Otherwise the run could begin between the two reads: we'd find no driver yet but a record,
        # and would drop a request to a job that has only just started. For the same reason we use
        # local copies, because `driver` may be None by the next line.
        record = self.record
        driver = self.driver
        if record is None:
            raise JobError(
                f"Job `{self.name}` is not running: it can be stopped or paused during "
                "`runner.run()` only."
            )
        if driver is not None:
            driver.request(record, request)

    def excuse_start(self) -> None:
        """Lets the other jobs make their first steps without waiting for this job. Doesn't wait."""
        if self.driver is not None and self.record is not None:
            self.driver.excuse_start(self.record)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank's exchange lane; see `JobContext.run_on_all_ranks`."""
        driver, record = self.running()
        error = self._stray_error("`job.run_on_all_ranks` or `job.restore`", "called")
        if error is not None:
            raise error
        return driver.run_on_all_ranks(record, label, work)

    # Steps.

    def cut_before_restart(self, key: str) -> int | None:
        """Returns the number of segments into which an earlier run cut this step, if known."""
        return self.cuts.get(key)

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Records a step's number of segments for a restart."""
        self.cuts[key] = n_segments

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:  # noqa: ARG002
        """Whether this job uses `program`, or an equivalent one, for the first time. Same on every
        rank.

        See `StepRegistry.first_use`.
        """
        return self.registry.first_use(program, step)

    def agree(self, agreement: Agreement) -> None:
        """Runs a step's agreement, and also compares `nonfinite` between ranks. Waits for all
        ranks.

        Raises:
            JobError, ExchangeError: On every rank: `nonfinite` or the exchanges differ.
        """

        def work(control: Control) -> None:
            self.check_nonfinite(control)
            agreement.in_run(control)

        self.run_on_all_ranks(agreement.label, work)

    def check_nonfinite(self, control: Control) -> None:
        """Checks that `nonfinite` is the same on all ranks. Waits for all ranks.

        Raises:
            JobError: On every rank: the values differ.
        """
        number = get_args(NonFinite).index(self.nonfinite)
        if not all_equal(control, number):
            policies = control.allgather_text(self.nonfinite)
            text = ", ".join(f"`{policy}` on rank {n}" for n, policy in enumerate(policies))
            raise JobError(
                f"Job `{self.name}`: `nonfinite` is {text}. Ranks would drift apart: set the same "
                "on every rank."
            )

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Returns a context that the report and the flight recorder show as compiling `name`."""
        during = self.world.flight.during("compile", job=self.name, step=self.step)
        with self.preparing(), during, self.measure("compile", name):
            yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Returns a context for tracing or compiling a step.

        By default, the jobs of a run begin together: none of them makes its first step before all
        of them have compiled theirs. So while one job is inside of this context, the others don't
        begin.
        """
        _, record = self.running()
        record.preparing += 1
        try:
            yield
        finally:
            record.preparing -= 1

    @contextmanager
    def measure(self, kind: SpanKind, label: str = "") -> Iterator[None]:
        """Returns a context whose duration the report shows; see `JobContext.measure`."""
        check_choice(kind, SpanKind, f"`kind` of `job.measure` in job `{self.name}`")
        start_ns = time.monotonic_ns()
        busy = self.world.monitor(
            job=self.name,
            step=self.step,
            segment=-1,
            what=label or "work",
            local=True,
            waiting_for=lambda _: {},
        )
        try:
            with busy if kind == "host" else nullcontext():
                yield
        finally:
            self.note_span(start_ns, kind, label)

    def note_span(self, start_ns: int, kind: SpanKind, label: str = "") -> None:
        """Adds work of the job's thread to the report. It began at `start_ns` and ends now."""
        self._listeners.span(
            Span(
                rank=self.world.rank,
                job=self.name,
                step=self.step,
                segment=-1,
                kind=kind,
                lane=0,
                start_ns=start_ns,
                end_ns=time.monotonic_ns(),
                ready_ns=start_ns,
                label=label,
            )
        )

    def run(self, compiled: Compiled, leaves: Sequence[object], step: object) -> PyTree:
        """Runs a call of a `crossover` function. Waits until the last segment has been dispatched.

        Raises:
            JobError, ExchangeError: On every rank: the step failed on some rank, which ends the
                job.
            JobError: The latest steps were all skipped, and this rank's state isn't finite.
            ExchangeError: On every rank: a comparison of replicas was due after this step, and they
                differ.
            CutError: `nonfinite` is `skip`, but the step doesn't return the state that would have
                to be kept.
        """
        driver, record = self.running()
        resumption = self.resumption
        # This is collective, so `first_run` answers the same on every rank, even if only one of
        # them has compiled another program.
        if self.registry.first_run(compiled):
            self._book_memory(compiled, leaves)
        graph = self.registry.graph(compiled, step)
        leads = self.registry.leads(compiled) and not self.evaluations.running
        if leads:
            self.evaluations.check_step(self)
        execution = compiled.execution(leaves)
        if self.nonfinite == "skip" and not execution.skippable and leads:
            refuse_to_skip(compiled.program)
        execution.watch(self.nonfinite)
        if leads and resumption is not None:
            self.latest.note_arguments(leaves)
        # The driver counts skipped steps during the call, so that's how we find out whether this
        # one was skipped.
        skipped_before = record.skipped
        outputs = driver.call(record, graph, execution, in_step=leads)
        if self.evaluations.running:
            return outputs  # an evaluation doesn't count as a step, and doesn't change the state
        # Once `driver.call` has returned, all ranks have agreed to keep the results of this call
        # (to commit it). If the call had failed on some rank, an error would have been raised on
        # all of them instead. So from here on, the call counts as a step.
        trains = self.registry.trains(compiled)
        if trains:
            self.step += 1
            self.examples.count_step()
            if self.metrics.observer is not None:
                self.metrics.observer.stepped(self.step)
        if resumption is not None and graph.is_step:
            resumption.note_call(
                compiled.program.name,
                self.loops,
                trains=trains,
                state=self.latest.state,
                results=outputs,
            )
        self.latest.note_results(outputs, self.step)
        if trains:
            self.skipped_steps.count(skipped=record.skipped > skipped_before)
            self.replicas.stepped(
                self.step,
                local=graph.local_step,
                run_on_all_ranks=partial(driver.run_on_all_ranks, record),
            )
            self.skipped_steps.check()
        return outputs

    def _book_memory(self, compiled: Compiled, leaves: Sequence[object]) -> None:
        """Books the memory that these executables need on this rank. Waits for all ranks.

        Raises:
            JobError: On every rank: some rank doesn't have enough memory left.
        """
        driver, record = self.running()
        # The memory of the program already includes the step's arguments. Besides these, the job
        # holds the batches that are read ahead, and its state unless that's one of the arguments.
        # So we add the bytes of both.
        given = arrays_by_buffer(leaves)
        state, _ = self.latest.newest()
        resting = [
            (a, a.nbytes) for buffer, a in arrays_by_buffer(state).items() if buffer not in given
        ]
        memory = memory_of(compiled).with_resting(
            sum(nbytes for _, nbytes in resting) + sum(loop.ahead_bytes for loop in self.loops)
        )
        # Normally, an array that several jobs hold is counted only once. For batches, that would be
        # wrong. Several jobs may start with the same array as their first batch, but after a few
        # steps, each of them uses a different batch, and all of these are in memory at the same
        # time.
        batches = frozenset[Hashable]().union(*(loop.first_batch for loop in self.loops))
        need = Need.of(memory, [*compiled.lasting_inputs(leaves), *resting], without=batches)
        remedy = remedies(compiled.program)
        with self.preparing():
            # Book in the order of the jobs. Otherwise, it would depend on which job compiles faster
            # which of them still fits.
            driver.start_gate.wait(record.number)
        self.run_on_all_ranks(
            f"memory of `{compiled.program.name}`",
            lambda control: self._admission.admit(control, self.name, need, remedy=remedy),
        )

    def _give_back_memory(self) -> None:
        """Removes the job's bookings. Its latest state still counts. Doesn't wait."""
        self._admission.give_back(self.name, lambda: self.latest.newest()[0])

    # State and metrics.

    def restore(
        self,
        state: T,
        *,
        mode: RestoreMode,
        rank_local: tuple[str, ...],
        check_replicas: int | None,
    ) -> T:
        """Returns the state to start from; see `JobContext.restore`. Waits for all ranks."""
        named = frozenset(named_leaves(state, rank_local))
        options: list[str] = []
        if rank_local:
            options.append(f"rank_local={sorted(rank_local)}")
        if check_replicas is not None:
            options.append(f"check_replicas={check_replicas}")
        # Check that all ranks have passed the same options. Every `run_on_all_ranks` call compares
        # its label between ranks and fails if the labels differ, so it's enough to put the options
        # into a label. We do this before we read any files, because what we read depends on the
        # options.
        if options:
            self.run_on_all_ranks(f"restore, {', '.join(options)}", lambda _: None)
        self.rank_local = rank_local
        resumption = self.resumption
        found = None
        if resumption is not None:
            found = resumption.restore(
                state, self.run_on_all_ranks, local=mode == "local", named=named
            )
        if resumption is not None and found is not None:
            self.first_step = resumption.first_step
            self.step = resumption.first_step
            driver, record = self.running()
            driver.resumed(record, self.step)
            if self.world.rank == 0:
                print_error(f"jaxcross: job `{self.name}` resumes after step {self.step}.")
            self.latest.set(found, self.step)
        else:
            if mode != "local":
                # The ranks compare the label, so it contains the mode.
                label = "restore" if mode == "check" else f"restore, mode={mode!r}"
                state = self.run_on_all_ranks(
                    label,
                    lambda _: self.world.broadcast_or_check(state, mode=mode, rank_local=named),
                )
            self.latest.set(own_copy(state), self.step)
        self.metrics.begin(self.step, None if found is None else self.run_on_all_ranks)
        self.replicas.begin(
            self.latest.state,
            self.step,
            local=mode == "local",
            named=named,
            check_every=check_replicas,
            resumed=found is not None,
            run_on_all_ranks=self.run_on_all_ranks,
        )
        return self.latest.state if resumption is None else self._resume_status(resumption)

    def _resume_status(self, resumption: Resumption) -> PyTree:
        """Returns the state, unless the job was stopped by request in an earlier run.

        If the job was paused at the end of the earlier run, pauses it again.
        """
        stopped, paused = resumption.markers(self.run_on_all_ranks)
        if stopped:
            self.request(JobRequest.STOP)
            while True:  # the next vote ends the job, which raises an exception here
                self.run_on_all_ranks("it was stopped", lambda _: None)
        # If one rank requests a pause, the job is paused on all ranks, so only rank 0 does it. If
        # every rank did, one of the requests could arrive late, after the user has already called
        # `resume`, and would pause the job again.
        if paused and self.world.rank == 0:
            self.request(JobRequest.PAUSE)
        return self.latest.state

    def save(self, state: PyTree) -> None:
        """Sets the job's state, and saves it if there are checkpoints; see `JobContext.save`.

        If it saves, waits for all ranks.
        """
        self.latest.set(state, self.step)
        self._evaluate()
        self._save(state)

    def _save(self, state: PyTree) -> None:
        resumption = self.resumption
        if resumption is not None:
            # Read back the metrics and write them to their files before the checkpoint exists. A
            # restart from this checkpoint doesn't repeat the earlier steps, so it would never log
            # their metrics again.
            self.read_back()
            if self.metrics.observer is not None:
                self.metrics.observer.saving(self.step)
            every = resumption.save(
                state,
                self.step,
                self.run_on_all_ranks,
                unsavable_reason=self.unsavable_reason(),
            )
            self.replicas.saved(self.step, every)

    def _evaluate(self) -> bool:
        """Runs the evaluations that are due, which may wait for all ranks.

        Returns:
            Whether the current state is the best one so far.
        """
        improved = self.evaluations.run(self, self._log_evaluation)
        # Early stopping ends the job's open loops over batches, but not while an evaluation is
        # running. An evaluation may loop over batches itself, and this method is called in its loop
        # too. That loop must not end just because an earlier evaluation has decided that training
        # should stop.
        if self.evaluations.stop_reason and not self.evaluations.running:
            self.batch_loops.end_early()
        return improved

    def _log_evaluation(self, name: str, metrics: PyTree) -> None:
        # If the job hasn't made a step since a restart, the metrics file may already contain this
        # evaluation, because the earlier run was killed after it had logged it and before it saved
        # that it was done. So remove the old entry.
        if self.steps_made == 0:
            self.metrics.drop(self.step, name)
        self.metrics.add(self.step, {name: metrics})

    def finish_step(self) -> None:
        """Runs the evaluations that are due, and saves the state if it's the best so far.

        Called when the loop's body has finished for the latest step.
        """
        if self._evaluate():
            self._save(self.latest.state)

    def read_back(self) -> None:
        """Reads back all metrics that were logged so far. Waits for the device."""
        self.unread = self.metrics.read_remaining() or self.unread

    def _note_metrics(self, step: int, values: PyTree) -> None:
        self._listeners.metrics(job=self.name, step=step, values=values)
        if isinstance(values, Mapping) and isinstance(values.get("loss"), float):
            self._listeners.note(job=self.name, kind="loss", step=step, value=values["loss"])

    # For `jaxcross.server`.

    @property
    def stopping(self) -> bool:
        """Whether the job should stop. Not all ranks learn this at the same time."""
        driver, record = self.running()
        return driver.stopping(record)

    def served(self, *, start_ns: int, pushed_ns: int, end_ns: int, nbytes: int) -> None:
        """Counts a step that used a parameter server, and adds two spans for it to the report.

        The first span is the computation, until this rank starts to send its update to the
        parameter server. The second one is the communication with the server, until the end of the
        step.

        Raises:
            JobError: The job has evaluations. They require that all ranks make the same number of
                steps, and with a parameter server, ranks don't.
        """
        if self.evaluations.any:
            raise JobError(
                f"Job `{self.name}` trains by a `ParameterServer`, so that its ranks have made "
                "different numbers of steps: `job.every` cannot evaluate it. Evaluate in the loop, "
                "with `job.measure`."
            )
        self.step += 1
        self.examples.count_step()
        driver, record = self.running()
        if self.step == 1:
            driver.first_step_made(record)
        parts: tuple[tuple[SpanKind, int, int, int], ...] = (
            ("compute", start_ns, pushed_ns, 0),
            ("collective", pushed_ns, end_ns, nbytes),
        )
        for segment, (kind, begin_ns, finish_ns, size) in enumerate(parts):
            # With a parameter server, the job's own thread computes and communicates, instead of
            # the compute lane and the exchange lane (the threads in which other jobs' steps run).
            # So the report shows the job in a lane of its own.
            self._listeners.span(
                Span(
                    rank=self.world.rank,
                    job=self.name,
                    step=self.step,
                    segment=segment,
                    kind=kind,
                    lane=1 + record.number,
                    start_ns=begin_ns,
                    end_ns=finish_ns,
                    ready_ns=begin_ns,
                    nbytes=size,
                    label=PARAMETER_SERVER,
                )
            )


@final
class JobThread(LaneThread):
    """The thread in which a job's function runs. Steps may only be called in this thread."""

    def __init__(self, engine: JobEngine, living: set[threading.Thread]) -> None:
        super().__init__(f"job-{engine.name}", engine.main, living)
        self.engine = engine


@final
class JobDone(threading.Event):
    """An event that's set once a job has ended.

    By default, no job makes its first step until all jobs have compiled theirs. Now suppose that
    one job's function waits for another job's `done` event before its own first step. Then each of
    the two would wait for the other one until the time limit of the joint start. So as soon as a
    job's thread waits for such an event, we let the other jobs start without it.
    """

    def wait(self, timeout: float | None = None) -> bool:
        thread = threading.current_thread()
        if isinstance(thread, JobThread) and not self.is_set():
            thread.engine.excuse_start()
        return super().wait(timeout)


def forget_locals(error: BaseException | None) -> None:
    """Clears the local variables in an exception's traceback.

    The job keeps its error, and the traceback's frames would keep the arrays of the failed step in
    memory.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _no_function(*_: object, **__: object) -> None:
    """Replaces the function of a job that has ended, so that the function can be freed."""
