"""A step without a runner. If computation can overlap exchanges, they run in a second thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, final

from jaxcross._pytree import PyTree
from jaxcross.errors import ExchangeError
from jaxcross.health import Monitor, RankStatus, missing_ranks
from jaxcross.program import Compiled, Program, mpi4jax_lists
from jaxcross.runtime.step_host import Agreement, T
from jaxcross.world import Control, World


class StepInFlight(Protocol):
    """A call whose segments `run_execution` runs.

    Implemented by `jaxcross.program.execution.Execution`, and by the trials of
    `jaxcross.step.timed_trial`, which continue after a failure.
    """

    def run(self, index: int) -> None: ...
    def forget(self, index: int) -> None: ...
    def wait_inputs(self, index: int) -> None: ...
    def wait_outputs(self, index: int) -> None: ...
    def branch_mismatch(self, index: int) -> str | None: ...
    def outputs(self) -> PyTree: ...


@final
class Standalone:
    """Hosts one step that is called without a runner.

    Implements `jaxcross.runtime.step_host.StepHost`.

    Every rank makes these calls in the same order, so they match up without a runner having to
    agree on one. The step agrees with the other ranks before it requests executables
    (`jaxcross.step.step`). Several steps may make equal exchanges. So the ranks number the
    steps in the order in which they agree on them, and compare the numbers again in later calls.

    Attributes:
        world: All ranks.
        name: The step's name.
        calls: How many calls of the step have begun.
        number: The step's number, counted from 1 and identical across ranks. 0 until the ranks have
            agreed on the step.
    """

    in_run = False
    is_only_job = True
    steps_left = None

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.calls = 0
        self.number = 0

    @property
    def function(self) -> str:
        """The step's name and number, as a text that's identical across ranks."""
        return f"`{self.name}`{f' (function {self.number} of the script)' if self.number else ''}"

    def agreed(self) -> None:
        """Numbers the step, unless it has a number already.

        All ranks call this after they have reached an agreement.
        """
        if not self.number:
            owner = self.world.exchange_owner
            owner.functions += 1
            self.number = owner.functions

    def cut_before_restart(self, key: str) -> int | None:
        """Returns None, because nothing is restored without a runner."""

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Does nothing, because nothing is saved without a runner."""

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:  # noqa: ARG002
        """Whether the ranks still have to agree, which is true only for a search's candidates."""
        return candidate

    def agree(self, agreement: Agreement) -> None:
        """Carries out an agreement. Waits for the other ranks."""
        agreement.standalone()

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:  # noqa: ARG002
        """Runs `work(control)` in this thread. The other ranks call it in the same order."""
        return work(self.world.control)

    def compiling(self, name: str) -> AbstractContextManager[None]:
        """Returns a context that the flight recorder shows as compilation."""
        return self.world.flight.during("compile", job=name, step=0)

    def run(
        self,
        compiled: Compiled,
        leaves: Sequence[object],
        step: object,  # noqa: ARG002
        *,
        compare: Callable[[], None] | None = None,
    ) -> PyTree:
        """Runs one step. Waits for its exchanges, but not for the computation after them.

        Args:
            compiled: The executables.
            leaves: The flat arguments.
            step: See `jaxcross.runtime.step_host.StepHost.run`.
            compare: Called before the first exchange, because there the ranks would wait for each
                other anyway. Raises `ExchangeError` on every rank if the ranks call different
                steps.
        """
        ended: dict[int, bool] = {}
        try:
            return run_execution(
                self.world, compiled, compiled.execution(leaves), self.calls, ended, compare
            )
        except BaseException:
            # If the failure came halfway through the exchanges, other ranks may be in exchanges
            # that this rank will never join. If it came before the first exchange, perhaps only
            # this rank has failed, so the next step begins with an agreement.
            due = sum(
                r.segment.kind == "collective" and not r.is_single_rank for r in compiled.runnables
            )
            if ended and sum(ended.values()) < due:
                self.world.exchange_owner.broken_step = compiled.program.name
            elif not ended and due:
                self.world.exchange_owner.must_agree = True
            raise


def run_execution(
    world: World,
    compiled: Compiled,
    execution: StepInFlight,
    step: int,
    ended: dict[int, bool],
    compare: Callable[[], None] | None = None,
) -> PyTree:
    """Runs one call whose execution hasn't begun, like `Standalone.run`.

    The caller's thread dispatches all computation in program order. Exchanges run one after another
    in their own thread. The reason is that XLA runs what one thread dispatches in order, so an
    exchange dispatched by the caller's thread would wait for all computation dispatched before it.
    Overlapping them like this is known as wait-free backpropagation (Zhang et al., Poseidon, 2017,
    section 3).

    Args:
        world: All ranks.
        compiled: The executables.
        execution: The call's values.
        step: Number of the call, for errors.
        ended: For each exchange that begins, receives whether it has ended.
        compare: See `Standalone.run`.
    """
    exchanges: dict[int, Future[None]] = {}
    call = _Call(
        world=world, compiled=compiled, execution=execution, step=step, ended=ended, compare=compare
    )
    try:
        # Carried exchanges read what the previous step has left. We begin them first, so that they
        # overlap all of the computation.
        for index in sorted(compiled.carried):
            exchanges[index] = world.exchanger.submit(call.exchange, index)
        for runnable, awaited in zip(compiled.runnables, compiled.awaited, strict=True):
            index = runnable.segment.index
            if runnable.segment.kind == "compute" or runnable.is_single_rank:
                for n in awaited:
                    if n in exchanges:
                        exchanges[n].result()
                execution.run(index)
                execution.forget(index)
            elif index in exchanges:
                continue
            elif compiled.overlaps:
                # The exchange's inputs have been dispatched already, or come from exchanges that
                # are ahead of it in the same queue.
                exchanges[index] = world.exchanger.submit(call.exchange, index)
            else:
                call.exchange(index)
        for exchange in exchanges.values():
            exchange.result()
    except BaseException as error:
        # Wait for the exchange thread, because this thread's next exchange must not overlap another
        # one on its communicator. Exchanges that haven't begun take place as well, because which
        # ones have begun differs between ranks. After an interrupt they don't, because an interrupt
        # should end the program.
        if not isinstance(error, Exception):
            call.failed.append(error)
        if compiled.overlaps:
            # An empty task, queued behind all exchanges. A second interrupt ends the wait for it.
            world.exchanger.submit(_nothing).result()
        raise
    return execution.outputs()


def _nothing() -> None:
    """The empty task that `run_execution` queues."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call outside a run.

    Attributes:
        world: All ranks.
        compiled: The executables.
        execution: The call's values.
        step: Number of the call, for errors.
        ended: For each exchange that has begun, whether it has ended.
        compare: See `Standalone.run`.
        failed: The first error of an exchange, if any.
    """

    world: World
    compiled: Compiled
    execution: StepInFlight
    step: int
    ended: dict[int, bool]
    compare: Callable[[], None] | None
    failed: list[BaseException] = field(default_factory=list)

    def exchange(self, index: int) -> None:
        """Makes one exchange. Waits for its inputs and for the other ranks.

        Raises the first error of this exchange or an earlier one of the call.
        """
        if self.failed:
            # The other ranks are still in the exchange that failed, and the next one must not be
            # summed with it.
            raise self.failed[0]
        program = self.compiled.program
        execution = self.execution
        try:
            execution.wait_inputs(index)
            if self.compare is not None and not self.ended:
                self._compare(self.compare, index)
            with self._watching(index):
                self.ended[index] = False
                execution.run(index)
                execution.wait_outputs(index)
            self.ended[index] = True
            mismatch = execution.branch_mismatch(index)
            if mismatch is not None:
                raise ExchangeError(f"in step {self.step} of `{program.name}`: {mismatch}")
        except BaseException as error:
            self.failed.append(error)
            raise

    def _compare(self, compare: Callable[[], None], index: int) -> None:
        # If the comparison is interrupted, the other ranks continue into the exchange.
        self.ended[index] = False
        try:
            compare()
        except ExchangeError:  # raised on every rank, so nothing is exchanged
            self.ended.clear()
            raise

    def _watching(self, index: int) -> Monitor:
        program = self.compiled.program
        exchanges = program.segments[index].exchanges
        monitor = partial(self.world.monitor, job=program.name, step=self.step, segment=index)
        if not any(map(mpi4jax_lists.is_call, exchanges)):
            return monitor(what=exchanges[0].op)
        # mpi4jax calls involve only some of the ranks. Other ranks may make a different number of
        # such calls without being late.
        what = "calls of mpi4jax"
        return monitor(what=what, waiting_for=partial(self._missing_partners, what))

    def _missing_partners(
        self, what: str, answers: Mapping[int, RankStatus | None]
    ) -> dict[int, str] | None:
        program = self.compiled.program
        world = self.world
        partners = mpi4jax_lists.partners(world.wire().calls(program), world.rank)
        return missing_ranks(program.name, what, sorted(partners), answers, excuse_local=False)
