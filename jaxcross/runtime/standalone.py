"""A step without a runner. A second thread makes its exchanges where computation can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, final

from jaxcross._pytree import PyTree
from jaxcross.errors import ExchangeError
from jaxcross.health.activity import RankStatus, missing_ranks
from jaxcross.health.watchdog import Monitor
from jaxcross.program import rank_lists
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program
from jaxcross.runtime.step_host import Agreement, T
from jaxcross.world import World
from jaxcross.world.control_plane import Control


class StepInFlight(Protocol):
    """The part of `jaxcross.program.execution.Execution` that `run_execution` needs."""

    def run(self, index: int) -> None: ...
    def forget(self, index: int) -> None: ...
    def wait_inputs(self, index: int) -> None: ...
    def wait_outputs(self, index: int) -> None: ...
    def branch_mismatch(self, index: int) -> str | None: ...
    def outputs(self) -> PyTree: ...


@final
class Standalone:
    """The host of one step that is called without a runner; implements
    `jaxcross.runtime.step_host.StepHost`.

    Calls come in the same order on every rank, so the ranks meet in them without an order agreed by
    a runner. The step agrees with the other ranks before it asks for executables
    (`jaxcross.step.crossover`). Several steps may make equal exchanges, so the ranks number the
    steps in the order in which they agree on them, and compare the numbers again in later calls.

    Attributes:
        world: All ranks.
        name: The step's name.
        calls: Number of calls of the step that were begun.
        number: The step's number, from 1 on and the same on every rank; 0 until the ranks have
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
        """The step's name and number, as a text that is the same on every rank."""
        return f"`{self.name}`{f' (function {self.number} of the script)' if self.number else ''}"

    def agreed(self) -> None:
        """Numbers the step, unless it has a number. Called on every rank after an agreement of all
        ranks.
        """
        if not self.number:
            owner = self.world.exchange_owner
            owner.functions += 1
            self.number = owner.functions

    def cut_before_restart(self, key: str) -> int | None:
        """Returns None: without a runner nothing is restored."""

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Does nothing: without a runner nothing is saved."""

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:  # noqa: ARG002
        """Whether the ranks still have to agree: only on what a search tries."""
        return candidate

    def agree(self, agreement: Agreement) -> None:
        """Makes an agreement of all ranks that come. Waits for them."""
        agreement.standalone()

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:  # noqa: ARG002
        """Runs `work(control)` in this thread: the other ranks call it in the same order."""
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
        """Runs one step. Waits for its exchanges, not for the computation after them.

        Args:
            compiled: The executables.
            leaves: The flat arguments.
            step: See `jaxcross.runtime.step_host.StepHost.run`.
            compare: Called before the first exchange, where the ranks would wait for one another
                anyway. Raises `ExchangeError` on every rank if the ranks call different steps.
        """
        ended: dict[int, bool] = {}
        try:
            return run_execution(
                self.world, compiled, compiled.execution(leaves), self.calls, ended, compare
            )
        except BaseException:
            # Halfway through, other ranks may be in exchanges that this rank will never join.
            # Before the first one, perhaps only this rank has failed: the next step then begins
            # with an agreement.
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
    """Runs one call whose execution has not begun, like `Standalone.run`.

    The caller's thread dispatches all computation, in program order. Exchanges follow one another
    in a thread of their own, because XLA runs what one thread dispatches in order: an exchange
    would wait for the computation that was dispatched before it (wait-free backpropagation: Zhang
    et al., Poseidon, 2017, section 3).

    Args:
        world: All ranks.
        compiled: The executables.
        execution: The call's values.
        step: Number of the call, for errors.
        ended: Receives for each exchange that begins whether it ended.
        compare: See `Standalone.run`.
    """
    exchanges: dict[int, Future[None]] = {}
    call = _Call(
        world=world, compiled=compiled, execution=execution, step=step, ended=ended, compare=compare
    )
    try:
        # Carried exchanges read what the step before has left. Begun first, they run during all of
        # the computation.
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
                # Its inputs were dispatched before it, or come from exchanges before it in the same
                # queue.
                exchanges[index] = world.exchanger.submit(call.exchange, index)
            else:
                call.exchange(index)
        for exchange in exchanges.values():
            exchange.result()
    except BaseException as error:
        # This thread's next exchange must not meet another one on its communicator. Exchanges that
        # have not begun are made as well, since which ones these are differs between ranks, but not
        # after an interrupt, which is to end the program.
        if not isinstance(error, Exception):
            call.failed.append(error)
        if compiled.overlaps:
            # Empty work, queued after all exchanges. A second interrupt ends the wait.
            world.exchanger.submit(_nothing).result()
        raise
    return execution.outputs()


def _nothing() -> None:
    """Does nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call outside a run.

    Attributes:
        world: All ranks.
        compiled: The executables.
        execution: The call's values.
        step: Number of the call, for errors.
        ended: Whether each exchange that began has ended.
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

        Raises:
            BaseException: This exchange failed, or one before it.
        """
        if self.failed:
            # The other ranks are in the one that failed: the next one must not be summed with it.
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
        # Should this be interrupted: the other ranks go on into the exchange.
        self.ended[index] = False
        try:
            compare()
        except ExchangeError:  # on every rank: nothing is exchanged
            self.ended.clear()
            raise

    def _watching(self, index: int) -> Monitor:
        program = self.compiled.program
        exchanges = program.segments[index].exchanges
        monitor = partial(self.world.monitor, job=program.name, step=self.step, segment=index)
        if not any(map(rank_lists.is_call, exchanges)):
            return monitor(what=exchanges[0].op)
        # Calls of mpi4jax are made with some ranks only. Others may make different numbers of them,
        # and are not late.
        what = "calls of mpi4jax"
        return monitor(what=what, waiting_for=partial(self._missing_partners, what))

    def _missing_partners(
        self, what: str, answers: Mapping[int, RankStatus | None]
    ) -> dict[int, str] | None:
        program = self.compiled.program
        world = self.world
        partners = rank_lists.partners(world.wire().calls(program), world.rank)
        return missing_ranks(program.name, what, sorted(partners), answers, excuse_local=False)
