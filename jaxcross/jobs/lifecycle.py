"""A job on this rank, behind what its function and its caller see of it: its place in a run, its thread, its steps."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, get_args

import numpy as np

from jaxcross._pytree import PyTree
from jaxcross.checkpoint.rank_gather import RunOnAllRanks
from jaxcross.errors import CutError, JobError
from jaxcross.interleave.instrument import PARAMETER_SERVER, Listeners, Span, SpanKind
from jaxcross.interleave.messages import FinalStatus
from jaxcross.jobs.latest_state import LatestState
from jaxcross.jobs.metrics import MetricLog
from jaxcross.jobs.prefetch import Prefetcher
from jaxcross.jobs.replica_checks import ReplicaChecks
from jaxcross.jobs.replicas import CheckReplicas
from jaxcross.jobs.resumption import Resumption
from jaxcross.jobs.step_registry import Calls
from jaxcross.jobs.thread import JobThread, current_job
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program
from jaxcross.runtime.collective_call import meet
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.job_record import JobRecord, NonFinite, Stopped
from jaxcross.runtime.stall_watch import after_run
from jaxcross.world.control_plane import Control


class JobLifecycle:
    """What `JobContext` is for jaxcross itself. Its public attributes are described there."""

    def __init__(
        self, name: str, fn: Callable[..., Any], arguments: Mapping[str, Any], *, listeners: Listeners, world: Any,
        checks: CheckReplicas | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.step = 0
        self._metrics = MetricLog(lambda step, loss: listeners.note(job=name, kind="loss", step=step, value=loss))
        self.history = self._metrics.history
        self.examples_per_step: float | None = None
        self.unit = "examples"
        self._in_batch: float | None = None  # examples of the latest batch
        self._mean_examples: float | None = None  # what `examples_per_step` is, unless the job has set it
        self._examples, self._counted_steps = 0.0, 0
        self.error: Exception | None = None
        self.unread: Exception | None = None  # of reading back what it logged, here; all ranks hear of it after the run
        self.how: str | None = None
        self.left = threading.Event()
        self.skipped = 0
        self.cuts: dict[str, int] = {}
        self._nonfinite: NonFinite = "ignore"
        self._fn, self._arguments, self._listeners, self._world = fn, arguments, listeners, world
        self._kept, self._calls = LatestState(), Calls()
        self.replicas = ReplicaChecks(
            name, rank=world.rank, ranks=world.size, kept=self._kept, checks=checks or CheckReplicas()
        )
        self._feeds: list[Prefetcher] = []  # of its loops over batches, in their order, but for those that are over
        self._streams = 0  # how many such loops there were
        self._driver: Driver | None = None  # of the run in which it is; None before that, and once it is over
        self._seat: JobRecord | None = None  # what that run holds for it; None before that
        self._resumption: Resumption | None = None  # if there are checkpoints
        self._strayed: JobError | None = None  # its batches were asked for in another thread: its own is to raise this
        self._unwound = False

    @property
    def _number(self) -> int:
        """In the run; -1 before it joined."""
        return -1 if self._seat is None else self._seat.number

    def _running(self) -> Driver:
        """The run's driver.

        Raises:
            JobError: There is none, or this is the job's thread and a loop of it strayed.
        """
        if self._driver is None:
            raise JobError(
                f"Job `{self.name}` is not running. Its methods work inside its function, during `runner.run()`."
            )
        if self._strayed is not None and current_job() is self:
            raise self._strayed
        return self._driver

    def _stray(self, what: str, done: str) -> JobError | None:
        """What to say if the caller is not the job's own thread: it would take the answers that this one waits for."""
        if current_job() is self:
            return None
        return JobError(
            f"{what} of job `{self.name}` was {done} in thread `{threading.current_thread().name}`, not in the "
            "job's own: two threads would take each other's answers from the other ranks. Do it in the job's function. "
            "`job.batches` has a thread that prepares batches ahead of it: give what yours does to batches as an "
            "iterator, `job.batches(prepared(data))`."
        )

    # For `jaxcross.step.crossover`.

    @property
    def is_only_job(self) -> bool:
        """Whether it has been its runner's only job, so that nothing runs next to it; as of the latest
        `run_on_all_ranks`, hence the same on all ranks.
        """
        return self._seat is not None and self._seat.is_only_job

    @property
    def steps_left(self) -> int | None:
        """How many batches its loops still have on this rank; None if that is not known."""
        left = [feed.batches_left for feed in self._feeds if not feed.closed]
        return None if None in left else max((n for n in left if n is not None), default=None)

    def check_alike(self, control: Control) -> None:
        """Makes sure that all ranks want the same of this job. Waits for all ranks.

        Raises:
            JobError: On every rank: `nonfinite` differs.
        """
        number = get_args(NonFinite).index(self._nonfinite)
        low, high = control.allreduce_min(np.array([number, -number], np.int64))
        if low != -high:
            said = ", ".join(f"`{text}` on rank {n}" for n, text in enumerate(control.allgather_text(self._nonfinite)))
            raise JobError(
                f"Job `{self.name}`: `nonfinite` is {said}. Ranks would drift apart: set the same on every rank."
            )

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:  # noqa: ARG002
        """Whether this job has not asked about `program` of `step`, or one like it, before. The same on every rank."""
        return self._calls.first_use(program, step)

    def run(self, compiled: Compiled, leaves: Sequence[object]) -> PyTree:
        """One step of a `crossover` function in this job: waits until its last segment was dispatched.

        Raises:
            JobError, ExchangeError: The step failed on some rank; on every rank, and the job is over.
            ExchangeError: On every rank: replicas were to be compared after this step, and differ.
            CutError: The job is to skip steps, and this one does not return its state.
        """
        driver, graph = self._running(), self._calls.graph(compiled)
        execution = compiled.execution(leaves)
        if self._nonfinite != "ignore":
            if self._nonfinite == "skip" and not execution.skippable and self._calls.leads(compiled):
                self._refuse_to_skip(compiled)
            execution.watch()
        leads = self._calls.leads(compiled)
        if leads and self._resumption is not None:
            self._kept.used(leaves)
        outputs = driver.call(self._number, graph, execution, self._nonfinite, in_step=leads)
        trains = self._calls.trains(compiled)
        if trains:
            self.step += 1
            self._count_examples()
        if self._resumption is not None and graph.is_step:
            self._resumption.called(
                compiled.program.name, self._feeds, trains=trains, state=self._kept.state, results=outputs
            )
        self._kept.committed(outputs, self.step)
        if trains:
            together = partial(driver.together, self._number)
            self.replicas.stepped(self.step, local=graph.local_step, together=together)
        return outputs

    def _count_examples(self) -> None:
        """Of a step with the latest batch; what the job sets itself stays."""
        if self._in_batch is None or self.examples_per_step != self._mean_examples:
            return
        self._examples += self._in_batch
        self._counted_steps += 1
        self.examples_per_step = self._mean_examples = self._examples / self._counted_steps

    def _refuse_to_skip(self, compiled: Compiled) -> None:
        """Raises CutError if the job's steps could not be skipped; what exchanges nothing need not be."""
        if compiled.program.has_exchanges:
            raise CutError(
                f"`{compiled.program.name}` cannot skip a step: none of its results has the structure, shapes and types"
                ' of its first argument, and it donates none. With `nonfinite="skip"` the first function with exchanges'
                " that a job calls is its step: name by `donate_argnums` the arguments that are its state, and return"
                " what becomes of them. Evaluate after the first step."
            )

    # For `jaxcross.server`.

    @property
    def stopping(self) -> bool:
        """Whether the job is to stop. Ranks learn it one after the other."""
        return self._running().stopping(self._number)

    def served(self, *, start_ns: int, pushed_ns: int, end_ns: int, nbytes: int) -> None:
        """Counts a step that a parameter server exchanged, and reports its parts: until the push, and from there."""
        self.step += 1
        self._count_examples()
        parts: tuple[tuple[SpanKind, int, int, int, int], ...] = (
            ("compute", 1 + self._number, start_ns, pushed_ns, 0),  # no lane orders what the job's thread does
            ("collective", 1 + self._number, pushed_ns, end_ns, nbytes),
        )
        for segment, (kind, lane, begin_ns, finish_ns, size) in enumerate(parts):
            self._listeners.span(
                Span(
                    rank=self._world.rank, job=self.name, step=self.step, segment=segment, kind=kind, lane=lane,
                    start_ns=begin_ns, end_ns=finish_ns, ready_ns=begin_ns, nbytes=size, label=PARAMETER_SERVER,
                )
            )  # fmt: skip

    # For the runner.

    @property
    def order(self) -> float:
        """Its place among the jobs of the run, the same on all ranks; behind all others if it never joined."""
        return self._number if self._number >= 0 else float("inf")

    @property
    def steps_made(self) -> int:
        """How many of its steps it made in this run."""
        return self.step if self._resumption is None else self.step - self._resumption.first_step

    @property
    def save_every(self) -> int | None:
        """After how many steps the plain loop is to save, if at all."""
        return None if self._resumption is None else self._resumption.every

    def attach(self, driver: Driver, seat: JobRecord, resumption: Resumption | None = None) -> None:
        """The run begins, or the job is added to it: this is its seat."""
        self._driver, self._seat, self._resumption = driver, seat, resumption
        seat.abandon = self.abandon
        if resumption is not None:
            # Before any job saves what it did with this knowledge.
            seat.tell_left, seat.tell_paused = self._tell_left, resumption.mark_paused

    def main(self) -> None:
        """The body of the job's thread. Whatever the function raises becomes the job's failure on all ranks.

        Waits, after the function, until the job is over on every rank.
        """
        driver, seat = self._running(), self._seat
        assert seat is not None
        try:
            result = self._fn(self, **self._arguments)
            self._running()
            if result is not None:
                self._kept.give(result, self.step)
            del result
            self._save_last(partial(driver.together, seat.number))
        except Stopped as stopped:
            self._unwound = True
            _forget_locals(stopped)
            driver.job_returned(seat.number)
        except BaseException as error:
            driver.job_raised(seat.number, self._strayed or error, f"after step {self.step}")
            _forget_locals(error)
        else:
            driver.job_returned(seat.number)
        self._vanish(driver, seat)

    def abandon(self) -> NoReturn:
        """The job is over, but its function catches what says so, and calls again. Its thread is left behind."""
        driver, seat = self._running(), self._seat
        assert seat is not None
        _log.warning(
            "Job `%s` is over (%s), but its function catches every exception and goes on: its thread stays, asleep. "
            "Let `except` name what it expects.",
            self.name, describe(seat.error) if seat.error else "stopped",
        )  # fmt: skip
        self._unwound = True
        driver.job_returned(seat.number)
        self._vanish(driver, seat)
        thread = threading.current_thread()
        assert isinstance(thread, JobThread)
        thread.living.discard(thread)
        driver.leave_behind(thread)
        while True:
            threading.Event().wait()

    def _vanish(self, driver: Driver, seat: JobRecord) -> None:
        for feed in self._feeds:
            feed.close()
        seat.left.wait()
        self.close()
        driver.vacate(seat.number)

    def _tell_left(self, how: FinalStatus, asked: bool) -> None:
        how = self._really(how)
        if self._resumption is not None and (how != "stopped" or asked):
            self._resumption.mark_done(how)

    def _really(self, how: FinalStatus) -> FinalStatus:
        # One that a `ParameterServer` has stopped has come to its end as far as the vote knows.
        return "stopped" if self._unwound and how == "ended" else how

    def close(self) -> None:
        """The job is over: reads back what is left, and lets go of all but its state. Waits for the device."""
        seat = self._seat
        if self.left.is_set():
            return
        if seat is not None:
            how = seat.how and self._really(seat.how)
            self.how, self.error, self.skipped = how or "left out", seat.error, seat.skipped
            if self.error is not None:
                _forget_locals(self.error)
            if how != "ended":
                self._kept.settle()
            self.replicas.finish(self.how, self.step)
            self._kept.release()
            seat.abandon = seat.tell_left = seat.tell_paused = _no_function
        failure = self._metrics.settle()
        if failure is not None and self.error is None:  # of a failed step's metrics the job's own error says more
            self.unread = failure
        if seat is not None and seat.how == "ended":
            kind = "done" if self.how == "ended" else "status"
            self._listeners.note(job=self.name, kind=kind, step=self.step, value=self.how)
        # The arguments hold data and steps, the steps their constants, and the feeds perhaps a batch.
        self._driver, self._fn, self._arguments = None, _no_function, {}
        self._calls.forget()
        self._feeds = []
        self.left.set()

    def close_unbegun(self) -> None:
        """The run broke: if the job has no thread that closes it, this does."""
        thread = None if self._seat is None else self._seat.thread
        if thread is None or not thread.is_alive():
            self.close()

    def _unsavable_reason(self) -> str:
        """Why the state cannot be resumed from, if so."""
        if self.steps_made and self._calls.training is None:
            return "the job trains by a `ParameterServer`, which has a state of its own on every rank"
        if self._kept.step != self.step:
            return "its function neither returned nor saved its latest state"
        if self._kept.is_guess:
            return (
                "its function changes what its step returns before the next one, and has not said what it makes of the "
                "latest: assign that to `job.state` in each step"
            )
        return "" if self._resumption is None else self._resumption.unsavable_reason

    def _save_last(self, together: RunOnAllRanks) -> None:
        if self._resumption is not None:
            self._resumption.save_last(self._kept.state, self.step, together, unsavable_reason=self._unsavable_reason())

    def save_left(self) -> None:
        """Saves what a stop or a failure left, after the run. Waits for all ranks. Never hides why the job ended."""
        if self._seat is None or self._seat.how in (None, "ended"):  # what all ranks agreed on; `how` may differ
            return

        def together(label: str, work: Callable[[Any], Any]) -> Any:
            with after_run(self._world, label, job=self.name, step=self.step):
                return meet(work, self._world.control)

        try:
            self._save_last(together)
        except JobError as error:
            _log.warning("%s", error)


_log = logging.getLogger("jaxcross")


def _no_function(*_: Any, **__: Any) -> None:
    """In place of a job's function, once it is over."""


def _forget_locals(error: BaseException | None) -> None:
    """Lets go of what the functions held that an exception went through: a step's arrays would live as long as it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
