"""`JobEngine`: one job of a runner, behind the `JobContext` that users see.

The engine creates the job's thread, calls the job's function in it, runs its steps in the agreed
order, counts them, and keeps what the job is left with.

A step that's called in a job's function doesn't run directly: `JobEngine.run` hands it to the
driver, which decides together with the other ranks when it runs. Everything that depends on
counting steps happens here, once all ranks have committed a call: counting examples and skipped
steps, checking replicas, and recording the positions from which a restart resumes.

A job can end in several ways: its function returns or raises, a vote stops it, another rank fails,
or its function catches the error that should have ended it and continues. Whatever happens, the
thread first reports to the driver, then waits until all ranks have ended the job, and only then
closes it: it reads back what was logged, sets the final status, and drops everything but the state.
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
        driver: The run's driver; None before the run, and once the job has ended.
        record: The driver's record of the job; None before the run.
        resumption: Connects the job to its checkpoints, if there are any.
        misuse: The error of a loop over batches in another thread, which the job's own thread
            should raise.
        step: How many steps the job has made.
        first_step: How many of them earlier runs made.
        cuts: The number of segments into which `cut="auto"` cut each step, by the step's key, so
            that a restart makes the same cut; 0 stands for the cut of a job that runs alongside
            others.
        nonfinite: What to do with exchanged values that aren't finite.
        rank_local: Names of the leaves of which each rank has its own version.
        latest: The job's latest state.
        skipped_steps: Counts the steps that were skipped.
        registry: The functions with exchanges that the job calls.
        replicas: Comparisons of the ranks' copies of the state.
        examples: Counts the examples per step.
        evaluations: What the job does every n steps.
        metrics: What the job has logged.
        batch_loops: Begins the job's loops over batches.
        loops: The job's open loops over batches, in the order in which they began.
        planned_steps: The step at which the job's latest loop ends if nothing else ends it; None if
            unknown.
        left_over: Whether a loop ended because of another rank's data while this rank had a batch
            ready.
        status: How the job ended; None before that. Set after `error`, and never changed again.
        error: The reason, if the job failed, was ejected or was left out.
        skipped: How many steps kept the state. Known once the job has ended.
        unread: The error of reading back logged metrics on this rank.
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
        self._stop_requested = False  # whether it ended because someone asked to stop it alone
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

    # How far the job is.

    @property
    def order(self) -> float:
        """The job's place among the jobs of the run, the same on all ranks.

        Infinite if the job never joined.
        """
        record = self.record
        return float("inf") if record is None or record.number < 0 else record.number

    @property
    def paused(self) -> bool:
        """Whether the job is paused on all ranks."""
        return self.record is not None and self.record.paused

    @property
    def history(self) -> list[tuple[int, PyTree]]:
        """What was logged and read back, with the step."""
        return self.metrics.history

    @property
    def is_only_job(self) -> bool:
        """Whether the job is its runner's only job, so that nothing runs alongside it.

        As of the latest `run_on_all_ranks`, hence the same on all ranks.
        """
        return self.record is not None and self.record.is_only_job

    @property
    def steps_left(self) -> int | None:
        """How many batches the job's loops still have on this rank; None if unknown."""
        left = [loop.batches_left for loop in self.loops if not loop.closed]
        return None if None in left else max((n for n in left if n is not None), default=None)

    @property
    def steps_made(self) -> int:
        """How many steps the job has made in this run."""
        return self.step - self.first_step

    @property
    def save_every(self) -> int | None:
        """The interval, in steps, at which the plain loop saves; None if it doesn't."""
        return None if self.resumption is None else self.resumption.every

    def unsavable_reason(self) -> str:
        """Returns why a restart couldn't resume from the current state; "" if it could."""
        if self.steps_made and self.registry.training is None:
            return (
                "the job trains by a `ParameterServer`, which has a state of its own on every rank"
            )
        if self.latest.step != self.step:
            return "its function neither returned nor saved its latest state"
        if self.latest.is_guess:
            return (
                "its function changes what its step returns before the next one, and has not said "
                "what it makes of the latest: assign that to `job.state` in each step"
            )
        return "" if self.resumption is None else self.resumption.unsavable_reason

    # Its place in the run, and its thread.

    def make_thread(self) -> JobThread:
        return JobThread(self, self.world.exchange_owner.job_threads)

    def attach(self, driver: Driver, record: JobRecord, session: Session | None = None) -> None:
        """Puts the job into a run that's about to begin, or into one that's in progress.

        With a session, the job has checkpoints.
        """
        resumption = None if session is None else self._resumption(session)
        self.driver, self.record, self.resumption = driver, record, resumption
        record.abandon = self._abandon
        # The driver calls this before any other job can save something that depends on this job's
        # end.
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

        An error becomes the job's failure on all ranks. After the function has ended, waits until
        the job has ended on every rank.
        """
        driver, record = self.running()
        try:
            self._call_function()
        except Stopped as stopped:
            self._unwound = True
            forget_locals(stopped)
            driver.job_returned(record)
        except BaseException as error:
            driver.job_raised(record, self.misuse or error, f"after step {self.step}")
            forget_locals(error)
        else:
            driver.job_returned(record)
        self._end_thread(driver, record)

    def _call_function(self) -> None:
        """Runs the job's function in the job's thread, and keeps what it returns."""
        driver, record = self.running()
        result = self._function(self.context, **self._arguments)
        self.running()
        if result is not None:
            self.latest.set(result, self.step)
        del result
        self.finish_step()
        # What was logged must not be lost if the process dies after the last save.
        if self.resumption is not None:
            self.read_back()
        self._save_last(partial(driver.run_on_all_ranks, record))

    def _abandon(self) -> NoReturn:
        """Abandons the job's thread, which then sleeps forever.

        Called if the job has ended but its function caught the error and called again.
        """
        driver, record = self.running()
        _log.warning(
            "Job `%s` is over (%s), but its function catches every exception and goes on: its "
            "thread stays, asleep. Let `except` name what it expects.",
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
        # Close the loops first: their threads may hold batches, and it may take long until the
        # other ranks end the job.
        self._close_loops()
        record.done.wait()
        self.close()
        driver.release(record)

    def _on_end(self, status: JobStatus, asked: bool) -> None:
        self._give_back_memory()
        status = self._final_status(status)
        self._stop_requested = asked
        # A job that ends because its whole run was stopped resumes in the next run, so it isn't
        # marked as done.
        if self.resumption is not None and (status != JobStatus.STOPPED or asked):
            self.resumption.mark_done(status)

    def _final_status(self, status: JobStatus) -> JobStatus:
        """Returns the job's status, given the vote's.

        They differ if a `ParameterServer` has stopped the job. Its function exchanges nothing, and
        after a stop has unwound it, the vote can't tell that from a function that has returned.
        """
        return JobStatus.STOPPED if self._unwound and status == JobStatus.ENDED else status

    def _close_loops(self) -> None:
        """Ends the threads that prepare batches. Doesn't wait for them."""
        for loop in self.loops:
            loop.close()

    def close(self) -> None:
        """Ends the job on this rank: reads back what it logged, and drops everything but the state.

        Waits for the device. A second call is a no-op.
        """
        if self.done.is_set():
            return
        record = self.record
        if record is not None:
            status = (record.status and self._final_status(record.status)) or JobStatus.LEFT_OUT
            stopped_early = status == JobStatus.ENDED and self.evaluations.stop_reason
            # Other threads may read these at any time. So we set the status after the error, and it
            # never changes.
            self.error = record.error
            self.status = JobStatus.STOPPED_EARLY if stopped_early else status
            self.skipped = self.skipped_steps.before + record.skipped
            if self.error is not None:
                if record.prints_error:
                    self._print_failure(self.error)
                forget_locals(self.error)
            if status != JobStatus.ENDED:
                self.latest.adopt_results()
            self.replicas.finish(status, self.step)
            self.latest.release()
        failure = self.metrics.read_remaining()
        # If a step failed, the job's own error is more useful than that of reading its metrics.
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
        # Free the memory: the arguments hold data and steps, the steps hold their constants, and
        # the loops may hold a batch.
        self.driver = None
        if record is not None:
            record.detach()
        self._function, self._arguments = _no_function, {}
        self.registry.forget()
        self.loops = []
        if self.metrics.observer is not None:
            if not self.metrics.observer.ended(asked=self._stop_requested):
                self.resumption = None
            self.metrics.observer = None
        self.done.set()

    def _print_failure(self, error: JobError | ExchangeError) -> None:
        """Prints why the job has left. The run may continue for days before it raises the error."""
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
        """Closes the job after the run broke, if no thread of its own will do that."""
        thread = None if self.record is None else self.record.thread
        if thread is None or not thread.is_alive():
            self.close()

    def save_left(self) -> None:
        """Saves what a stop or a failure left, after the run. Waits for all ranks.

        If saving fails, that's only logged, so the reason for which the job ended isn't hidden.
        """
        record = self.record
        # Use the record's status, on which all ranks agreed: our own status may differ between
        # ranks.
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
        """Returns how far the job was when the run was stopped, and what is saved of it."""
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

    # Calls of the job's thread, and requests of any thread.

    def running(self) -> tuple[Driver, JobRecord]:
        """Returns the run's driver, and its record of the job.

        Raises:
            JobError: The job isn't running, or this is its own thread and another thread iterated
                over its batches.
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

        A call from another thread would receive answers that belong to the job's own.
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
        """Whether a loop over batches must end at once because it's in the wrong thread.

        If possible, the job's own thread raises the error, so that the job fails. In the other
        thread, there may be no caller to catch it, and then it would end the other jobs too.

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
        # Another thread may change both attributes while we read them. When a run begins, it sets
        # `driver` and then `record`; when the job leaves, its own thread clears `driver`. A record
        # without a driver therefore means that the job has left. That's why we read `record` first:
        # in the opposite order, the run could begin between the two reads, and we'd drop the
        # request of a job that has only just started. And we use the values read here, because
        # `driver` may be None by the next line.
        record, driver = self.record, self.driver
        if record is None:
            raise JobError(
                f"Job `{self.name}` is not running: it can be stopped or paused during "
                "`runner.run()` only."
            )
        if driver is not None:
            driver.request(record, request)

    def excuse_start(self) -> None:
        """Lets the other jobs begin without this one at a joint start. Doesn't wait."""
        if self.driver is not None and self.record is not None:
            self.driver.excuse_start(self.record)

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank's exchange lane; see `JobContext.run_on_all_ranks`."""
        driver, record = self.running()
        if error := self._stray_error("`job.run_on_all_ranks` or `job.restore`", "called"):
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
        """Whether this job uses `program`, or one like it, for the first time. Same on every rank.

        See `StepRegistry.first_use`.
        """
        return self.registry.first_use(program, step)

    def agree(self, agreement: Agreement) -> None:
        """Runs an agreement of all ranks, which also compares `nonfinite`. Waits for all ranks.

        Raises:
            JobError, ExchangeError: On every rank: `nonfinite` or the exchanges differ.
        """

        def work(control: Control) -> None:
            self.check_nonfinite(control)
            agreement.in_run(control)

        self.run_on_all_ranks(agreement.label, work)

    def check_nonfinite(self, control: Control) -> None:
        """Checks that `nonfinite` is the same on all ranks. Waits for them.

        Raises:
            JobError: On every rank: it differs.
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
        """Returns a context that report and flight recorder show as the compilation of `name`."""
        during = self.world.flight.during("compile", job=self.name, step=self.step)
        with self.preparing(), during, self.measure("compile", name):
            yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Returns a context in which a step is traced or compiled.

        At a joint start, other jobs wait for it.
        """
        _, record = self.running()
        record.preparing += 1
        try:
            yield
        finally:
            record.preparing -= 1

    @contextmanager
    def measure(self, kind: SpanKind, label: str = "") -> Iterator[None]:
        """Returns a context whose duration appears in the report; see `JobContext.measure`."""
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
        """Reports work of the job's thread that began at `start_ns` and ends now."""
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
        """Runs one call of a `crossover` function. Waits until its last segment is dispatched.

        Raises:
            JobError, ExchangeError: On every rank: the step failed on some rank, and the job has
                ended.
            JobError: The last steps were all skipped, and this rank's state isn't finite.
            ExchangeError: On every rank: a comparison of replicas was due after this step, and they
                differ.
            CutError: The job should skip nonfinite steps, but this step doesn't return its state.
        """
        driver, record = self.running()
        resumption = self.resumption
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
        skipped_before = record.skipped
        outputs = driver.call(record, graph, execution, in_step=leads)
        if self.evaluations.running:
            return outputs  # an evaluation is neither a step nor the job's state
        # All ranks have committed the call, so from here on, everything that counts steps may count
        # it.
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
        """Books the memory that this rank needs to run these executables. Waits for all ranks.

        Raises:
            JobError: On every rank: some rank doesn't have enough memory left.
        """
        driver, record = self.running()
        given = arrays_by_buffer(leaves)
        state, _ = self.latest.newest()
        resting = [
            (a, a.nbytes) for buffer, a in arrays_by_buffer(state).items() if buffer not in given
        ]
        memory = memory_of(compiled).with_resting(
            sum(nbytes for _, nbytes in resting) + sum(loop.ahead_bytes for loop in self.loops)
        )
        # Several jobs may use the same array as their first batch, but later they'll be at
        # different batches. So batches don't count as shared.
        batches = frozenset[Hashable]().union(*(loop.first_batch for loop in self.loops))
        need = Need.of(memory, [*compiled.lasting_inputs(leaves), *resting], without=batches)
        remedy = remedies(compiled.program)
        with self.preparing():
            driver.start_gate.wait(record.number)
        self.run_on_all_ranks(
            f"memory of `{compiled.program.name}`",
            lambda control: self._admission.admit(control, self.name, need, remedy=remedy),
        )

    def _give_back_memory(self) -> None:
        """Gives back what the job has booked, except for its latest state. Doesn't wait."""
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
        # Ranks compare these options by the label, before any file is read according to them.
        if options:
            self.run_on_all_ranks(f"restore, {', '.join(options)}", lambda _: None)
        self.rank_local = rank_local
        resumption, found = self.resumption, None
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
                print_error(f"jaxcross: job `{self.name}` goes on after step {self.step}.")
            self.latest.set(found, self.step)
        else:
            if mode != "local":
                # Ranks compare this label.
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
        """Returns the state, unless an earlier run stopped the job for good.

        A job that an earlier run left paused is paused again.
        """
        stopped, paused = resumption.markers(self.run_on_all_ranks)
        if stopped:
            self.request(JobRequest.STOP)
            while True:  # until the vote ends the job, which raises in this call
                self.run_on_all_ranks("it was stopped", lambda _: None)
        # One rank's request is enough. A second one could arrive after a `resume` and undo it.
        if paused and self.world.rank == 0:
            self.request(JobRequest.PAUSE)
        return self.latest.state

    def save(self, state: PyTree) -> None:
        """Makes `state` the job's state, and saves it if there are checkpoints.

        Waits for all ranks then; see `JobContext.save`.
        """
        self.latest.set(state, self.step)
        self._evaluate()
        self._save(state)

    def _save(self, state: PyTree) -> None:
        resumption = self.resumption
        if resumption is not None:
            # A restart resumes after this step, so whatever was logged up to here would be lost
            # with the process.
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
        """Runs the evaluations that are due. May wait for all ranks.

        Returns:
            Whether the state is the best so far.
        """
        improved = self.evaluations.run(self, self._log_evaluation)
        # During an evaluation, the latest loop belongs to the evaluation, so it mustn't end because
        # of what an earlier evaluation decided.
        if self.evaluations.stop_reason and not self.evaluations.running:
            self.batch_loops.end_early()
        return improved

    def _log_evaluation(self, name: str, metrics: PyTree) -> None:
        # A run that was killed may have logged this evaluation already.
        if self.steps_made == 0:
            self.metrics.drop(self.step, name)
        self.metrics.add(self.step, {name: metrics})

    def finish_step(self) -> None:
        """Runs due evaluations after the latest step, and saves the state if it's the best.

        Called once the loop's body has finished.
        """
        if self._evaluate():
            self._save(self.latest.state)

    def read_back(self) -> None:
        """Moves everything that was logged so far into `history`. Waits for the device."""
        self.unread = self.metrics.read_remaining() or self.unread

    def _note_metrics(self, step: int, values: PyTree) -> None:
        self._listeners.metrics(job=self.name, step=step, values=values)
        if isinstance(values, Mapping) and isinstance(values.get("loss"), float):
            self._listeners.note(job=self.name, kind="loss", step=step, value=values["loss"])

    # For `jaxcross.server`.

    @property
    def stopping(self) -> bool:
        """Whether the job should stop. Ranks are informed one after the other."""
        driver, record = self.running()
        return driver.stopping(record)

    def served(self, *, start_ns: int, pushed_ns: int, end_ns: int, nbytes: int) -> None:
        """Counts a step that a parameter server exchanged, and reports its two parts as spans.

        The first part is until the push, the second from the push to the end.

        Raises:
            JobError: The job evaluates, which is only possible if all ranks have made the same
                number of steps.
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
            # The job has a lane of its own in the report, because no lane orders what its thread
            # does.
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
    """The thread of a job. The job's function runs in it, and calls its steps only there."""

    def __init__(self, engine: JobEngine, living: set[threading.Thread]) -> None:
        super().__init__(f"job-{engine.name}", engine.main, living)
        self.engine = engine


@final
class JobDone(threading.Event):
    """An event that's set once a job has ended.

    If a job waits for another job's event, a joint start doesn't wait for the waiting job.
    Otherwise, the run could deadlock.
    """

    def wait(self, timeout: float | None = None) -> bool:
        thread = threading.current_thread()
        if isinstance(thread, JobThread) and not self.is_set():
            thread.engine.excuse_start()
        return super().wait(timeout)


def forget_locals(error: BaseException | None) -> None:
    """Clears the local variables in an exception's traceback.

    Otherwise, they'd keep a step's arrays alive.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _no_function(*_: object, **__: object) -> None:
    """Does nothing. Replaces the function of a job that has ended."""
