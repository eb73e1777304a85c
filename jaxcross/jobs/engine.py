"""`JobEngine`: the machinery behind a `JobContext`, which is what users see of a job.

The engine runs the job's function in a dedicated thread. When the function calls a step, the engine
has the run's driver run it, and then counts it. The engine also holds the job's state, metrics and
status, which remain available after the job has ended.

**Running a step.** If functions called their steps directly, two jobs could start their exchanges
in a different order on different ranks, and deadlock. Instead, `JobEngine.run` submits the call to
the driver. The driver runs exchanges in an order that's the same on all ranks, whereas compute
segments run in an order that each rank chooses for its own device.

A step that exchanges something only counts once all ranks have committed it. (A local step, which
doesn't exchange anything, counts right away.) So any bookkeeping that depends on the number of
steps happens after the call: counting examples and skipped steps, checking replicas, and recording
the position in the data from which a restart would resume.

**Ending a job.** There are many ways for a job to end: its function returns or raises, a vote stops
it, another rank fails, or the function swallows the exception that was meant to end it and carries
on regardless. Whatever happens, the job's thread first reports to the driver, then waits until the
job has ended on all ranks. Its status isn't known any earlier: even if the function has returned
here, another rank may still fail. After that, the thread sets the final status, reads back the
logged metrics, and drops all references except those to the state.

**Saving the last state.** Writing a checkpoint requires communication, which a running job does in
the exchange lane (the thread that runs all collective operations). If the function returns
normally, saving the last state that way is the last thing the job's thread does before it reports
to the driver.

A job that was stopped or has failed can no longer communicate during the run. The runner saves its
last state after the run instead, when the ranks communicate directly (`JobEngine.save_after_run`).
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
from jaxcross.report import Tracker
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
    """Returns the engine of the job that owns the current thread, or None if no job does."""
    thread = threading.current_thread()
    return thread.engine if isinstance(thread, JobThread) else None


@final
class JobEngine:
    """One job on this rank. Implements `jaxcross.runtime.step_host.StepHost`.

    Attributes:
        name: The job's name.
        world: All ranks.
        context: The object that's passed to the job's function and returned by `Runner.add`.
        driver: The run's driver; None before the run and after the job has ended.
        record: The driver's record of the job; None before the run.
        resumption: Connects the job to its checkpoints; None if the runner has none.
        misuse: An error for the job's own thread to raise, because another thread has iterated over
            the job's batches.
        step: How many steps the job has made.
        first_step: How many of these steps were made by earlier runs.
        cuts: The number of collective segments that `cut="auto"` has chosen for each step, by the
            step's key. We save this to make sure that a restart cuts the step in the same way. 0
            stands for the cut used alongside other jobs, which is chosen by size rather than timed.
        nonfinite: What to do with exchanged values that aren't finite.
        rank_local: Names of the leaves that differ between ranks by design.
        latest: The job's latest state.
        skipped_steps: Counts skipped steps.
        registry: The functions with exchanges that the job calls.
        replicas: Compares the ranks' copies of the state.
        examples: Counts the examples per step.
        evaluations: Evaluations that run every n steps, and early stopping.
        metrics: The metrics logged by the job.
        batch_loops: Begins the job's loops over batches.
        loops: The job's loops over batches, in the order in which they began. Loops that have been
            closed are only removed when another loop begins.
        planned_steps: The step at which the job's latest loop will end unless it's cut short; None
            if unknown.
        left_over: Whether a loop ended because another rank ran out of data while this rank still
            had a batch.
        status: How the job ended, or None if it hasn't yet. Set after `error`, and final from then
            on.
        error: Why the job failed, was ejected or was left out, if any of these happened.
        skipped: How many steps were skipped, i.e. left the state unchanged. Known once the job has
            ended.
        unread: The error that was raised on this rank while reading back the logged metrics, if
            any.
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
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.name = name
        self.world = world
        self._function = fn
        self._arguments = arguments
        self._listeners = listeners
        self._trackers = trackers
        self._admission = admission
        self.driver: Driver | None = None
        self.record: JobRecord | None = None
        self.resumption: Resumption | None = None
        self.misuse: JobError | None = None
        self._stop_requested = False  # whether just this job was stopped, rather than the run
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
        """The job's position in the run's list of jobs, identical on all ranks.

        It's infinite if the job never joined the run.
        """
        record = self.record
        return float("inf") if record is None or record.number < 0 else record.number

    @property
    def paused(self) -> bool:
        """Whether the job is paused on all ranks."""
        return self.record is not None and self.record.paused

    @property
    def history(self) -> list[tuple[int, PyTree]]:
        """The logged metrics that have been read back, with their steps."""
        return self.metrics.history

    @property
    def is_only_job(self) -> bool:
        """Whether this is the runner's only job, in which case there's nothing to overlap with.

        The value was determined by the latest `run_on_all_ranks` call, so it's the same on all
        ranks.
        """
        return self.record is not None and self.record.is_only_job

    @property
    def steps_left(self) -> int | None:
        """The most batches left in any of the job's open loops on this rank.

        None if no loop is open, or if we don't know how many batches are left in one of them.
        """
        left = [loop.batches_left for loop in self.loops if not loop.closed]
        return None if None in left else max((n for n in left if n is not None), default=None)

    @property
    def steps_made(self) -> int:
        """How many steps the job has made in this run."""
        return self.step - self.first_step

    @property
    def save_every(self) -> int | None:
        """The interval, in steps, at which the loop of a `jaxcross.Job` saves; None if not set."""
        return None if self.resumption is None else self.resumption.every

    def unsavable_reason(self) -> str:
        """Returns why a restart couldn't resume from the current state, or "" if it could."""
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
        """Attaches the job to a run that's about to begin or already in progress.

        Passing a `session` means that the job has checkpoints.
        """
        resumption = None if session is None else self._resumption(session)
        self.driver = driver
        self.record = record
        self.resumption = resumption
        record.abandon = self._abandon
        # Another job may be waiting for this job to end, and then save a state that depends on it.
        # If the process gets killed after that, a restart needs to know that this job had ended.
        # The driver therefore calls `on_end` before any other job can notice the end, which makes
        # sure that the file marking this job as done is on disk before the other job's checkpoint.
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

        An error in the function makes the job fail on all ranks. Even if the function has returned
        here, the job may therefore still fail because of another rank, so this method waits until
        the job has ended everywhere.
        """
        driver, record = self.running()
        try:
            self._call_function()
        # A stop also ends the function with an exception, but it isn't a failure.
        except Stopped as stopped:
            self._unwound = True
            forget_locals(stopped)
            driver.job_returned(record)
        # Catch everything, even `SystemExit`. Whatever ends this thread, the other ranks have to
        # hear about it, or they'd wait for the job forever. If another thread has iterated over the
        # job's batches (which isn't allowed), report that instead, since the error at hand is most
        # likely just a consequence.
        except BaseException as error:
            driver.job_raised(record, self.misuse or error, f"after step {self.step}")
            forget_locals(error)
        else:
            driver.job_returned(record)
        self._end_thread(driver, record)

    def _call_function(self) -> None:
        """Calls the job's function, stores the state that it returns, and saves it."""
        driver, record = self.running()
        self.describe(self._arguments)
        result = self._function(self.context, **self._arguments)
        # Raise if another thread has iterated over the job's batches. The function may have
        # returned normally all the same.
        self.running()
        if result is not None:
            self.latest.set(result, self.step)
        del result
        self.finish_step()
        # Copy the logged metrics to the host before the job's last save. A restart continues from
        # that save without logging them again, so any metrics that were still on the device would
        # be lost if the process died after the save.
        if self.resumption is not None:
            self.read_back()
        self._save_last(partial(driver.run_on_all_ranks, record))

    def describe(self, params: Mapping[str, Any], group: str = "") -> None:
        """Sets the hyperparameters for trackers, and the name of the sweep, if there's one."""
        for tracker in self._trackers:
            tracker.describe(self.name, params, group)

    def _abandon(self) -> NoReturn:
        """Abandons the job's thread by putting it to sleep forever.

        To stop a job, we raise an exception in its function. The driver calls this method if the
        function catches that exception and, although the job has ended, calls another step. Python
        can't terminate a thread from outside, so sleeping is the best we can do.
        """
        driver, record = self.running()
        _log.warning(
            "Job `%s` has ended (%s), but its function catches every exception and continues. Its "
            "thread cannot be ended, so it is put to sleep forever. Catch only the exceptions that "
            "you expect.",
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
        # Close the job's loops over batches before waiting for the other ranks. That may take a
        # while, and the prefetching thread of an open loop keeps its batches in memory.
        self._close_loops()
        record.done.wait()
        self.close()
        driver.release(record)

    def _on_end(self, status: JobStatus, asked: bool) -> None:
        self._give_back_memory()
        status = self._final_status(status)
        self._stop_requested = asked
        # If the whole run was stopped, e.g. by Ctrl-C, don't mark the job as done, because the next
        # run should resume it. If the user stopped just this job, do mark it, because it should
        # stay stopped.
        if self.resumption is not None and (status != JobStatus.STOPPED or asked):
            self.resumption.mark_done(status)

    def _final_status(self, status: JobStatus) -> JobStatus:
        """Corrects the status that the vote came up with, if necessary.

        The vote is only wrong if a job that trains with a `ParameterServer` was stopped. Such a job
        doesn't exchange anything through the driver, so when a stop ends its function with an
        exception, the vote can't tell this from a normal return. Only this rank's thread has seen
        the exception, so we set things right here.
        """
        return JobStatus.STOPPED if self._unwound and status == JobStatus.ENDED else status

    def _close_loops(self) -> None:
        """Ends the prefetching threads. Doesn't wait for them."""
        for loop in self.loops:
            loop.close()

    def close(self) -> None:
        """Ends the job on this rank: reads back metrics and drops all references but the state.

        Waits for the device. A second call is a no-op.
        """
        if self.done.is_set():
            return
        record = self.record
        if record is not None:
            status = (record.status and self._final_status(record.status)) or JobStatus.LEFT_OUT
            stopped_early = status == JobStatus.ENDED and self.evaluations.stop_reason
            # Set the error before the status. Another thread may read them at any time, and if it
            # finds a status, it concludes that the job has ended and expects the error to be in
            # place.
            self.error = record.error
            self.status = JobStatus.STOPPED_EARLY if stopped_early else status
            self.skipped = self.skipped_steps.before + record.skipped
            if self.error is not None:
                if record.prints_error:
                    self._print_failure(self.error)
                forget_locals(self.error)
            # If the job didn't end normally, its function may not have had the chance to store the
            # state after its latest step, so take that state from the step's results.
            if status != JobStatus.ENDED:
                self.latest.adopt_results()
            self.replicas.finish(status, self.step)
            self.latest.release()
        failure = self.metrics.read_remaining()
        # If a step failed, its metrics can't be read either, but the step's error is more useful.
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
            observer = self.metrics.observer
            pruned = done and observer is not None and observer.pruned
            for tracker in self._trackers:
                tracker.end(self.name, "pruned" if pruned else str(self.status))
        # The user may hold on to this job for a long time, just to read its final state. Drop
        # everything else that takes up memory: the function's arguments (which include data and
        # steps), the constants of the steps, and the loops' batches.
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
        """Prints why the job failed. The run may continue for days before it raises the error."""
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
        """Closes the job after the run has failed, unless the job's own thread will do so."""
        thread = None if self.record is None else self.record.thread
        if thread is None or not thread.is_alive():
            self.close()

    def save_after_run(self) -> None:
        """Saves the state of a job that was stopped or has failed. Waits for all ranks.

        Called after the run. If saving fails, we just log the error, since raising it would hide
        why the job ended in the first place.
        """
        record = self.record
        # Saving is collective, so either all ranks save this job or none of them do. Base the
        # decision on the status in the driver's record, which the ranks have voted on. The engine's
        # own `self.status` may differ between ranks (see `_final_status`).
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
        """Returns how far the job got before the run was stopped, and what has been saved."""
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
        """Returns the run's driver and its record of the job.

        Raises:
            JobError: The job isn't running. Also raised in the job's own thread if another thread
                has iterated over the job's batches.
        """
        if self.driver is None or self.record is None:
            raise JobError(
                f"Job `{self.name}` is not running. Call its methods inside its function, during "
                "`runner.run()`."
            )
        if self.misuse is not None and self._in_own_thread:
            raise self.misuse
        return self.driver, self.record

    @property
    def _in_own_thread(self) -> bool:
        return self.record is not None and self.record.thread is threading.current_thread()

    def _stray_error(self, what: str, done: str) -> JobError | None:
        """Returns the error for a call from a thread other than the job's own; None if it's fine.

        A job only ever waits for the other ranks in its own thread. If two of its threads waited at
        the same time, e.g. for a step and for a batch, they could end up with each other's answers.
        """
        if self._in_own_thread:
            return None
        return JobError(
            f"{what} of job `{self.name}` was {done} in thread "
            f"`{threading.current_thread().name}` rather than in the job's own thread, where the "
            "two threads could receive each other's answers from the other ranks. Do it directly "
            "in the job's function. To prepare batches in a thread, put the work into an iterator "
            "and pass that, `job.batches(prepared(data))`: a thread of `job.batches` runs it ahead "
            "of the loop."
        )

    def ends_stray_loop(self) -> bool:
        """Whether a loop over batches must end right away because it's in the wrong thread.

        Iterating over a job's batches in another thread is an error that makes the job fail. If at
        all possible, we raise it in the job's own thread, where we know how to handle it. In the
        other thread, there may be nobody to catch it, and an uncaught exception in some random
        thread would take down the whole run, including the other jobs.

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
        """Passes a request on to all ranks, unless the job has ended. Doesn't wait.

        Raises:
            JobError: The run hasn't begun.
        """
        if self.status is not None:
            return
        # Other threads may change both attributes while we read them: the start of a run sets first
        # `driver`, then `record`, and when the job ends, its own thread resets `driver` to None. We
        # want a record without a driver to mean that the job has ended, in which case the request
        # can be dropped. That's only true if `record` is read first; otherwise, the run could start
        # between the two reads, and we'd drop a request to a job that has only just begun. Read
        # them into local variables, as `driver` could be gone by the next line.
        record = self.record
        driver = self.driver
        if record is None:
            raise JobError(
                f"Job `{self.name}` is not running. Stop or pause it during `runner.run()`, not "
                "before."
            )
        if driver is not None:
            driver.request(record, request)

    def excuse_start(self) -> None:
        """Lets the other jobs start stepping without waiting for this job. Doesn't wait."""
        if self.driver is not None and self.record is not None:
            self.driver.excuse_start(self.record)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T], text: str = "") -> T:
        """Runs `work(control)` in every rank's exchange lane; see `JobContext.run_on_all_ranks`.

        `text` is shown in errors instead of `label`.
        """
        driver, record = self.running()
        error = self._stray_error("`job.run_on_all_ranks` or `job.restore`", "called")
        if error is not None:
            raise error
        return driver.run_on_all_ranks(record, label, work, text)

    # Steps.

    def cut_before_restart(self, key: str) -> int | None:
        """Returns the number of segments into which an earlier run cut this step, if known."""
        return self.cuts.get(key)

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Remembers a step's number of segments for a restart."""
        self.cuts[key] = n_segments

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:  # noqa: ARG002
        """Whether the job has used neither this program nor an equivalent one before.

        Same on every rank. See `StepRegistry.first_use`.
        """
        return self.registry.first_use(program, step)

    def agree(self, agreement: Agreement) -> None:
        """Checks that all ranks are about to perform the same exchanges, with equal `nonfinite`.

        Waits for all ranks.

        Args:
            agreement: Compares the exchanges between ranks.

        Raises:
            JobError, ExchangeError: On every rank: `nonfinite` or the exchanges differ.
        """

        def work(control: Control) -> None:
            self.check_nonfinite(control)
            agreement.in_run(control)

        self.run_on_all_ranks(agreement.label, work, agreement.text)

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
                f"Job `{self.name}`: `nonfinite` is {text}, so the states of the ranks would drift "
                "apart. Set the same value on every rank."
            )

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Returns a context that the report and flight recorder show as compiling `name`."""
        during = self.world.flight.during("compile", job=self.name, step=self.step)
        with self.preparing(), during, self.measure("compile", name):
            yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Returns a context for tracing or compiling a step.

        By default, the jobs of a run start together, which means that none of them makes its first
        step until all of them have compiled theirs. As long as a job is inside this context, it
        holds up that start.
        """
        _, record = self.running()
        record.preparing += 1
        try:
            yield
        finally:
            record.preparing -= 1

    @contextmanager
    def measure(self, kind: SpanKind, label: str = "") -> Iterator[None]:
        """Returns a context whose duration shows up in the report; see `JobContext.measure`."""
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
        """Adds work by the job's thread, from `start_ns` until now, to the report."""
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
        """Runs a call of a `crossover` function. Waits until its last segment has been dispatched.

        Raises:
            JobError, ExchangeError: On every rank: the step failed on some rank, which ends the
                job.
            JobError: The latest steps were all skipped, and this rank's state isn't finite.
            ExchangeError: On every rank: a replica comparison was due after this step, and replicas
                differ.
            CutError: `nonfinite` is `skip`, but the step doesn't return the state that we'd have to
                keep.
        """
        driver, record = self.running()
        resumption = self.resumption
        # Booking memory is a collective operation. That's fine here, because `first_run` returns
        # the same value on every rank, even if only one of them has compiled another program.
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
        # The driver counts skipped steps during the call, which tells us whether this step was
        # skipped.
        skipped_before = record.skipped
        outputs = driver.call(record, graph, execution, in_step=leads)
        if self.evaluations.running:
            return outputs  # evaluations don't count as steps or change the state
        # If the call exchanges anything, `driver.call` only returns once all ranks have agreed to
        # keep (commit) its results. Had it failed on some rank before that, an error would have
        # been raised on all of them. So from here on, the call counts as a step. Local steps, which
        # don't exchange anything, count without a commit.
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
        """Reserves the memory that these executables need on this rank. Waits for all ranks.

        Raises:
            JobError: On every rank: some rank is short of memory.
        """
        driver, record = self.running()
        # The program's memory already includes the step's arguments. Add what else the job holds:
        # the batches that are read ahead and, unless it's among the arguments, the state.
        given = arrays_by_buffer(leaves)
        state, _ = self.latest.newest()
        resting = [
            (a, a.nbytes) for buffer, a in arrays_by_buffer(state).items() if buffer not in given
        ]
        memory = memory_of(compiled).with_resting(
            sum(nbytes for _, nbytes in resting) + sum(loop.ahead_bytes for loop in self.loops)
        )
        # Shared arrays are normally counted only once, but that would be wrong for batches. Several
        # jobs may start from the same array as their first batch; a few steps later, they're all
        # using different batches, which are in memory at the same time.
        batches = frozenset[Hashable]().union(*(loop.first_batch for loop in self.loops))
        need = Need.of(memory, [*compiled.lasting_inputs(leaves), *resting], without=batches)
        remedy = remedies(compiled.program)
        with self.preparing():
            # Book in job order. Otherwise, which jobs still fit would depend on which of them
            # happens to compile faster.
            driver.start_gate.wait(record.number)
        self.run_on_all_ranks(
            f"memory of `{compiled.program.name}`",
            lambda control: self._admission.admit(control, self.name, need, remedy=remedy),
        )

    def _give_back_memory(self) -> None:
        """Releases the job's reservations. Its latest state still counts. Doesn't wait."""
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
        # Make sure that all ranks have passed the same options. `run_on_all_ranks` fails if its
        # label differs between ranks, so all it takes is to mention the options in a label. Do this
        # before reading any files, because the options affect what we read.
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
                # Ranks compare the label, so it includes the mode.
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
        """Returns the state, unless the user stopped the job in an earlier run.

        If the job was paused when the earlier run ended, it's paused again.
        """
        stopped, paused = resumption.markers(self.run_on_all_ranks)
        if stopped:
            self.request(JobRequest.STOP)
            while True:  # the next vote ends the job by raising an exception here
                self.run_on_all_ranks("it was stopped", lambda _: None)
        # A request from one rank is enough to pause the job everywhere, so leave it to rank 0. If
        # all ranks did this, one of the requests could arrive late, after the user has called
        # `resume`, and would pause the job again.
        if paused and self.world.rank == 0:
            self.request(JobRequest.PAUSE)
        return self.latest.state

    def save(self, state: PyTree) -> None:
        """Sets the job's state, runs the evaluations that are due, and saves the state.

        Doesn't save if there are no checkpoints. Waits for all ranks if it saves, and may wait for
        them if it evaluates. See `JobContext.save`.
        """
        self.latest.set(state, self.step)
        self._evaluate()
        self._save(state)

    def _save(self, state: PyTree) -> None:
        resumption = self.resumption
        if resumption is not None:
            # Read back the metrics and write them to their files before the checkpoint exists. A
            # restart from this checkpoint won't repeat the earlier steps, so it would never log
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
        # Early stopping ends the job's open loops over batches, except during an evaluation. The
        # evaluation may have its own loop over batches, from which this method gets called too, and
        # that loop shouldn't be cut short just because an earlier evaluation decided that training
        # should stop.
        if self.evaluations.stop_reason and not self.evaluations.running:
            self.batch_loops.end_early()
        return improved

    def _log_evaluation(self, name: str, metrics: PyTree) -> None:
        # If the job hasn't made a step since a restart, the metrics file may already contain this
        # evaluation, because the earlier run may have been killed between logging it and recording
        # that it was done. Remove the old entry in that case.
        if self.steps_made == 0:
            self.metrics.drop(self.step, name)
        self.metrics.add(self.step, {name: metrics})

    def finish_step(self) -> None:
        """Runs the evaluations that are due, and saves the state if it's the best so far.

        Called when the loop's body is done with the latest step.
        """
        if self._evaluate():
            self._save(self.latest.state)

    def read_back(self) -> None:
        """Reads back all metrics logged so far. Waits for the device."""
        self.unread = self.metrics.read_remaining() or self.unread

    def _note_metrics(self, step: int, values: PyTree) -> None:
        self._listeners.metrics(job=self.name, step=step, values=values)
        if isinstance(values, Mapping) and isinstance(values.get("loss"), float):
            self._listeners.note(job=self.name, kind="loss", step=step, value=values["loss"])

    # For `jaxcross.server`.

    @property
    def stopping(self) -> bool:
        """Whether the job should stop. Ranks may find out at different times."""
        driver, record = self.running()
        return driver.stopping(record)

    def served(self, *, start_ns: int, pushed_ns: int, end_ns: int, nbytes: int) -> None:
        """Counts a step that used a parameter server, and adds two spans for it to the report.

        The first span covers the computation, up to the point where this rank starts to send its
        update to the parameter server; the second covers the communication with the server, up to
        the end of the step.

        Raises:
            JobError: The job has evaluations, which require all ranks to make the same number of
                steps. With a parameter server, they don't.
        """
        if self.evaluations.any:
            raise JobError(
                f"Job `{self.name}` trains by a `ParameterServer`, so its ranks make different "
                "numbers of steps and `job.every` cannot evaluate it. Evaluate in the loop "
                "instead, inside `with job.measure(...)`."
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
            # With a parameter server, both computation and communication happen in the job's own
            # thread, rather than in the compute lane and the exchange lane (the threads that run
            # the steps of other jobs). Those two are lane 0 of their kind, so the report shows this
            # job's spans in lanes of their own, numbered from 1.
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
    """The thread that runs a job's function. Steps can only be called from this thread."""

    def __init__(self, engine: JobEngine, living: set[threading.Thread]) -> None:
        super().__init__(f"job-{engine.name}", engine.main, living)
        self.engine = engine


@final
class JobDone(threading.Event):
    """An event that's set once a job has ended.

    By default, no job makes its first step until all jobs have compiled theirs. This would go wrong
    if a job's function waits for another job's `done` event before its own first step: the two jobs
    would wait for each other until the time limit for the joint start expires. To avoid that, we
    let the other jobs start without a job as soon as its thread waits for such an event.
    """

    def wait(self, timeout: float | None = None) -> bool:
        thread = threading.current_thread()
        if isinstance(thread, JobThread) and not self.is_set():
            thread.engine.excuse_start()
        return super().wait(timeout)


def forget_locals(error: BaseException | None) -> None:
    """Clears the local variables in an exception's traceback.

    The job holds on to its error, and the frames in the error's traceback would otherwise keep the
    arrays of the failed step alive.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _no_function(*_: object, **__: object) -> None:
    """Takes the place of an ended job's function, so that the latter can be freed."""
