"""Runs a step without a runner. If exchanges can overlap computation, a second thread runs them."""

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
    """What `run_execution` needs from a call.

    Implemented by `jaxcross.program.execution.Execution`. The trials of `jaxcross.step.timed_trial`
    also implement it, but they continue after a failure.
    """

    def run(self, index: int) -> None: ...
    def forget(self, index: int) -> None: ...
    def wait_inputs(self, index: int) -> None: ...
    def wait_outputs(self, index: int) -> None: ...
    def branch_mismatch(self, index: int) -> str | None: ...
    def outputs(self) -> PyTree: ...


@final
class Standalone:
    """The host of a step that's called without a runner.

    Implements `jaxcross.runtime.step_host.StepHost`.

    Without a runner, every rank must call its steps in the same order, so the calls match up
    without any agreement on an order. The ranks agree on each step before it requests its
    executables (see `jaxcross.step.step`). But two steps may have equal exchanges, in which case a
    rank that calls the wrong step would go unnoticed. So the ranks number their steps in the order
    in which they agree on them, and compare these numbers again in later calls.

    Attributes:
        world: All ranks.
        name: The step's name.
        calls: How often the step was called.
        number: The step's number, counted from 1 and identical across ranks, or 0 until the ranks
            have agreed on the step.
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
        """The step's name and number as a text, which is identical across ranks."""
        return f"`{self.name}`{f' (function {self.number} of the script)' if self.number else ''}"

    def agreed(self) -> None:
        """Gives the step a number, unless it already has one.

        All ranks call this after they have agreed on the step.
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
        """Whether the ranks have to agree now. That's only the case for a candidate of a search."""
        return candidate

    def agree(self, agreement: Agreement) -> None:
        """Lets the ranks agree. Waits for the other ranks."""
        agreement.standalone()

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:  # noqa: ARG002
        """Runs `work(control)` in this thread. The ranks must make such calls in the same order."""
        return work(self.world.control)

    def compiling(self, name: str) -> AbstractContextManager[None]:
        """Returns a context that the flight recorder records as compilation."""
        return self.world.flight.during("compile", job=name, step=0)

    def run(
        self,
        compiled: Compiled,
        leaves: Sequence[object],
        step: object,  # noqa: ARG002
        *,
        compare: Callable[[], None] | None = None,
    ) -> PyTree:
        """Runs one step. Waits for its exchanges, but not for any computation after them.

        Args:
            compiled: The executables.
            leaves: The step's arguments, flattened.
            step: See `jaxcross.runtime.step_host.StepHost.run`.
            compare: Called before the first exchange, where the ranks have to wait for each other
                anyway. Raises `ExchangeError` on every rank if the ranks call different steps.
        """
        ended: dict[int, bool] = {}
        try:
            return run_execution(
                self.world, compiled, compiled.execution(leaves), self.calls, ended, compare
            )
        except BaseException:
            # If the step failed in the middle of its exchanges, the other ranks may be waiting in
            # an exchange that this rank will never enter, so no step may exchange anything from now
            # on. If it failed before its first exchange, the other ranks may be fine. In that case,
            # it's enough for the ranks to check, before the next step exchanges anything, that
            # they're all calling the same step.
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
    """Runs one call, like `Standalone.run`. Its execution must not have begun.

    The caller's thread dispatches all computation in program order, and a second thread runs the
    exchanges one after another. The second thread is needed because XLA runs everything that's
    dispatched from the same thread in order: in the caller's thread, an exchange would wait for all
    computation dispatched before it, even if it doesn't depend on it. Overlapping exchanges and
    computation like this is known as wait-free backpropagation (Zhang et al., Poseidon, 2017,
    section 3).

    Args:
        world: All ranks.
        compiled: The executables.
        execution: The call's values.
        step: Number of the call, for errors.
        ended: Receives, for each exchange that has begun, whether it has ended.
        compare: See `Standalone.run`.
    """
    exchanges: dict[int, Future[None]] = {}
    call = _Call(
        world=world, compiled=compiled, execution=execution, step=step, ended=ended, compare=compare
    )
    try:
        # Carried exchanges only need values that the previous step has left in the state. They
        # don't depend on anything that this step computes, so kick them off first to overlap all of
        # its computation.
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
                # By now, the segments that compute the exchange's inputs have been dispatched, and
                # any exchange it depends on is ahead of it in the same queue. So all of its inputs
                # are on their way, and it's safe to queue the exchange.
                exchanges[index] = world.exchanger.submit(call.exchange, index)
            else:
                call.exchange(index)
        for exchange in exchanges.values():
            exchange.result()
    except BaseException as error:
        # Don't return before the exchange thread is idle: the script's next exchange comes from
        # this thread, and two threads must not use a communicator at the same time. Exchanges that
        # are still in the queue go ahead as well. They can't be cancelled, because other ranks may
        # already be in them. After an interrupt, however, they fail immediately, because the user
        # wants the program to end.
        if not isinstance(error, Exception):
            call.failed.append(error)
        if compiled.overlaps:
            # This task is a no-op, but the queue only gets to it after all exchanges. A second
            # interrupt ends the wait.
            world.exchanger.submit(_nothing).result()
        raise
    return execution.outputs()


def _nothing() -> None:
    """Does nothing. See `run_execution`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call outside a run.

    Attributes:
        world: All ranks.
        compiled: The executables.
        execution: The call's values.
        step: Number of the call, for errors.
        ended: For each exchange that has begun, whether it has ended.
        compare: See `Standalone.run`.
        failed: The first error of an exchange, if there was one.
    """

    world: World
    compiled: Compiled
    execution: StepInFlight
    step: int
    ended: dict[int, bool]
    compare: Callable[[], None] | None
    failed: list[BaseException] = field(default_factory=list)

    def exchange(self, index: int) -> None:
        """Runs one exchange. Waits for its inputs and for the other ranks.

        If an earlier exchange of the call has failed, raises that exchange's error instead.
        """
        if self.failed:
            # An earlier exchange of this call has failed on this rank, and the other ranks are
            # still waiting in it. If this rank entered the next exchange, MPI would match the two
            # and sum up unrelated values.
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
        # Before the first exchange of a call, the ranks compare which step they're calling. Count
        # the exchange as begun from here on: if the comparison is interrupted on this rank, the
        # other ranks carry on without it and enter the exchange, so this rank must not exchange
        # anything else.
        self.ended[index] = False
        try:
            compare()
        except ExchangeError:  # all ranks raise it, so none of them enters the exchange
            self.ended.clear()
            raise

    def _watching(self, index: int) -> Monitor:
        program = self.compiled.program
        exchanges = program.segments[index].exchanges
        monitor = partial(self.world.monitor, job=program.name, step=self.step, segment=index)
        if not any(map(mpi4jax_lists.is_call, exchanges)):
            return monitor(what=exchanges[0].op)
        # An mpi4jax call may involve only some of the ranks. The watchdog normally compares how
        # many exchanges each rank has entered, but here, a rank may have entered fewer of them
        # without being late. So specify which ranks take part in this call.
        what = "calls of mpi4jax"
        return monitor(what=what, waiting_for=partial(self._missing_partners, what))

    def _missing_partners(
        self, what: str, answers: Mapping[int, RankStatus | None]
    ) -> dict[int, str] | None:
        program = self.compiled.program
        world = self.world
        partners = mpi4jax_lists.partners(world.wire().calls(program), world.rank)
        return missing_ranks(program.name, what, sorted(partners), answers, excuse_local=False)
