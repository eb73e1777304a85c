"""`JobHost` runs a job's steps in the agreed order, counts them, and keeps the resulting state.

A step that's called in a job's function doesn't run directly: `JobHost.run` hands it to the driver,
which decides together with the other ranks when it runs. Everything that depends on counting steps
happens here, once all ranks have committed a call: counting examples and skipped steps, checking
replicas, and recording the positions from which a restart resumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, final, get_args

from jaxcross._arguments import check_choice
from jaxcross._pytree import PyTree, arrays_by_buffer
from jaxcross.errors import CutError, JobError
from jaxcross.interleave.instrument import PARAMETER_SERVER, Listeners, Span, SpanKind
from jaxcross.jobs.admission import MemoryAdmission, Need, remedies
from jaxcross.jobs.batch_loops import ExampleCount
from jaxcross.jobs.evaluations import Evaluations
from jaxcross.jobs.latest_state import LatestState
from jaxcross.jobs.lifecycle import JobLifecycle
from jaxcross.jobs.prefetch import Prefetcher
from jaxcross.jobs.replica_checks import ReplicaChecks
from jaxcross.jobs.skipped_steps import SkippedSteps
from jaxcross.jobs.step_registry import StepRegistry, memory_of
from jaxcross.jobs.thread import JobDone
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program
from jaxcross.runtime.job_record import NonFinite
from jaxcross.runtime.step_host import Agreement, T
from jaxcross.world import World
from jaxcross.world.control_plane import Control, all_equal

if TYPE_CHECKING:
    from jaxcross.sweeps.trial import TrialObserver


@final
class JobHost:
    """Runs the steps of one job. Implements `jaxcross.runtime.step_host.StepHost`.

    Owned by the job's `JobRun`.

    Attributes:
        name: The job's name.
        step: How many steps the job has made.
        first_step: How many of them earlier runs made.
        cuts: The number of segments into which `cut="auto"` cut each step, by the step's key, so
            that a restart makes the same cut; 0 stands for the cut of a job that runs alongside
            others.
        nonfinite: What to do with exchanged values that aren't finite.
        latest: The job's latest state.
        registry: The functions with exchanges that the job calls.
        replicas: Comparisons of the ranks' copies of the state.
        examples: Counts the examples per step.
        evaluations: What the job does every n steps.
        loops: The job's open loops over batches, in the order in which they began.
        planned_steps: The step at which the job's latest loop ends if nothing else ends it; None if
            unknown.
        left_over: Whether a loop ended because of another rank's data while this rank had a batch
            ready.
        done: Set once the job has ended and its results are final.
        observer: Follows the job, if it's a trial of a sweep.
    """

    in_run = True

    def __init__(
        self,
        life: JobLifecycle,
        *,
        listeners: Listeners,
        world: World,
        admission: MemoryAdmission,
    ) -> None:
        self._life = life
        self._admission = admission
        self._listeners = listeners
        self._world = world
        self.name = life.name
        self.step = 0
        self.first_step = 0
        self.cuts: dict[str, int] = {}
        self.nonfinite: NonFinite = "ignore"
        self.latest = LatestState()
        self.skipped = SkippedSteps(life.name, self.latest)
        self.registry = StepRegistry()
        self.replicas = ReplicaChecks(
            life.name, rank=world.rank, ranks=world.size, latest=self.latest
        )
        self.examples = ExampleCount()
        self.evaluations = Evaluations(life.name, rank=world.rank, ranks=world.size)
        self.loops: list[Prefetcher] = []
        self.planned_steps: int | None = None
        self.left_over = False
        self.done = JobDone()
        self.observer: TrialObserver | None = None

    @property
    def world(self) -> World:
        return self._world

    @property
    def is_only_job(self) -> bool:
        """Whether the job is its runner's only job, so that nothing runs alongside it.

        As of the latest `run_on_all_ranks`, hence the same on all ranks.
        """
        return self._life.record is not None and self._life.record.is_only_job

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
        return None if self._life.resumption is None else self._life.resumption.every

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
        return "" if self._life.resumption is None else self._life.resumption.unsavable_reason

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

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank's exchange lane; see `JobContext.run_on_all_ranks`."""
        driver, record = self._life.running()
        if error := self._life.stray_error("`job.run_on_all_ranks` or `job.restore`", "called"):
            raise error
        return driver.run_on_all_ranks(record, label, work)

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Returns a context that report and flight recorder show as the compilation of `name`."""
        during = self._world.flight.during("compile", job=self.name, step=self.step)
        with self.preparing(), during, self.measure("compile", name):
            yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Returns a context in which a step is traced or compiled.

        At a joint start, other jobs wait for it.
        """
        _, record = self._life.running()
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
        busy = self._world.monitor(
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
                rank=self._world.rank,
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
        driver, record = self._life.running()
        resumption = self._life.resumption
        if self.registry.first_run(compiled):
            self._book_memory(compiled, leaves)
        graph = self.registry.graph(compiled, step)
        leads = self.registry.leads(compiled) and not self.evaluations.running
        if leads:
            self.evaluations.check_step(self)
        execution = compiled.execution(leaves)
        if self.nonfinite != "ignore":
            if self.nonfinite == "skip" and not execution.skippable and leads:
                self._refuse_to_skip(compiled)
            execution.watch()
        if leads and resumption is not None:
            self.latest.note_arguments(leaves)
        skipped_before = record.skipped
        outputs = driver.call(record, graph, execution, self.nonfinite, in_step=leads)
        if self.evaluations.running:
            return outputs  # an evaluation is neither a step nor the job's state
        # All ranks have committed the call, so from here on, everything that counts steps may count
        # it.
        trains = self.registry.trains(compiled)
        if trains:
            self.step += 1
            self.examples.count_step()
            if self.observer is not None:
                self.observer.stepped(self.step)
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
            self.skipped.count(skipped=record.skipped > skipped_before)
            together = partial(driver.run_on_all_ranks, record)
            self.replicas.stepped(self.step, local=graph.local_step, together=together)
            self.skipped.check()
        return outputs

    def _book_memory(self, compiled: Compiled, leaves: Sequence[object]) -> None:
        """Books the memory that this rank needs to run these executables. Waits for all ranks.

        Raises:
            JobError: On every rank: some rank doesn't have enough memory left.
        """
        driver, record = self._life.running()
        given = arrays_by_buffer(leaves)
        state, _ = self.latest.latest()
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

    def give_back_memory(self) -> None:
        """Gives back what the job has booked, except for its latest state. Doesn't wait."""
        self._admission.give_back(self.name, lambda: self.latest.latest()[0])

    def _refuse_to_skip(self, compiled: Compiled) -> None:
        """Raises a CutError for a step that can't be skipped.

        A program without exchanges needn't be skippable.
        """
        if compiled.program.exchanges:
            raise CutError(
                f"`{compiled.program.name}` cannot skip a step: none of its results has the "
                "structure, shapes and types of its first argument, and it donates none. With "
                '`nonfinite="skip"` the first function with exchanges that a job calls is its '
                "step: name by `donate_argnums` the arguments that are its state, and return what "
                "becomes of them. Evaluate after the first step."
            )

    # For `jaxcross.server`.

    @property
    def stopping(self) -> bool:
        """Whether the job should stop. Ranks are informed one after the other."""
        driver, record = self._life.running()
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
        driver, record = self._life.running()
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
                    rank=self._world.rank,
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
