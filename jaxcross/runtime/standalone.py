"""One step without a runner: its exchanges are made by a second thread where computation can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

from jaxcross._pytree import PyTree
from jaxcross.errors import ExchangeError
from jaxcross.health.activity import RankStatus, missing
from jaxcross.program import rank_lists
from jaxcross.program.execution import Compiled, Execution
from jaxcross.program.ir import Program
from jaxcross.runtime.step_host import Agreement, T
from jaxcross.world import World
from jaxcross.world.control_plane import Control


@final
class Standalone:
    """The host of one step that is called without a runner; implements `jaxcross.runtime.step_host.StepHost`.

    Calls come in the same order on every rank, so the ranks meet in them without an order agreed by a runner. The step
    agrees with the other ranks before it asks for executables (`jaxcross.step.crossover`).

    Attributes:
        world: All ranks.
        name: The step's.
        calls: How many calls of the step were begun.
    """

    in_run = False
    is_only_job = True
    steps_left = None

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.calls = 0

    def cut_before_restart(self, key: str) -> int | None:
        """Returns None: without a runner nothing is restored."""

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Does nothing: without a runner nothing is saved."""

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:  # noqa: ARG002
        """Whether the ranks still have to agree: only on what a search tries."""
        return candidate

    def agree(self, agreement: Agreement) -> None:
        agreement.standalone()

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:  # noqa: ARG002
        """Runs `work(control)` here: the other ranks come to it in the same order."""
        return work(self.world.control)

    def compiling(self, name: str) -> AbstractContextManager[None]:
        """Returns a context that the flight recorder shows as compilation."""
        return self.world.flight.during("compile", job=name, step=0)

    def run(self, compiled: Compiled, leaves: Sequence[object]) -> PyTree:
        """Runs one step. Waits for its exchanges, not for the computation after them."""
        ended: dict[int, bool] = {}
        try:
            return run_execution(self.world, compiled, compiled.execution(leaves), self.calls, ended)
        except BaseException:
            due = sum(r.segment.kind == "collective" and not r.is_single_rank for r in compiled.runnables)
            if ended and sum(ended.values()) < due:
                self.world.exchange_owner.broken_step = compiled.program.name
            elif not ended and due:
                self.world.exchange_owner.must_agree = True
            raise


def run_execution(
    world: World, compiled: Compiled, execution: Execution, step: int, ended: dict[int, bool]
) -> Any:  # fmt: skip
    """Like `Standalone.run`, for an execution that has not begun. Notes of each exchange that begins whether it ended.

    The caller's thread dispatches all that computes, in program order; exchanges follow one another in a thread of
    their own, because XLA runs what one thread dispatches in order: an exchange would wait for the computation that was
    dispatched before it (wait-free backpropagation: Zhang et al., Poseidon, 2017, section 3).
    """
    exchanges: dict[int, Future[None]] = {}
    failed: list[BaseException] = []
    exchange = partial(_exchange, world, compiled, execution, step, failed, ended)
    try:
        for runnable, awaited in zip(compiled.runnables, compiled.awaited, strict=True):
            index = runnable.segment.index
            if runnable.segment.kind == "compute" or runnable.is_single_rank:
                for n in awaited:
                    if n in exchanges:
                        exchanges[n].result()
                execution.run(index)
                execution.forget(index)
            elif compiled.overlaps:
                # What it reads was dispatched before it, or stands before it in the same queue.
                exchanges[index] = world.exchanger.submit(exchange, index)
            else:
                exchange(index)
        for begun in exchanges.values():
            begun.result()
    except BaseException as error:
        # This thread's next exchange must not meet another one on its communicator. Those that have not begun are made
        # as well, since which ones these are differs between ranks; not if a person or a batch system wants an end.
        if not isinstance(error, Exception):
            failed.append(error)
        if compiled.overlaps:
            world.exchanger.submit(_nothing).result()  # behind all others; a second interrupt ends the wait
        raise
    return execution.outputs()


def _nothing() -> None:
    """What an idle thread does at once."""


def _missing_partners(
    world: World, program: Program, what: str, answers: Mapping[int, RankStatus | None]
) -> dict[int, str] | None:
    partners = rank_lists.partners(world.wire().calls(program), world.rank)
    return missing(program.name, what, sorted(partners), answers, patient=False)


def _exchange(
    world: World, compiled: Compiled, execution: Execution, step: int, failed: list[BaseException],
    ended: dict[int, bool], index: int,
) -> None:  # fmt: skip
    if failed:
        raise failed[0]  # the other ranks are in the one that failed: what comes next must not be summed with it
    program = compiled.program
    try:
        execution.wait_inputs(index)
        exchanges = program.segments[index].exchanges
        watching = partial(world.watching, job=program.name, step=step, segment=index)
        what = exchanges[0].op
        if any(map(rank_lists.is_call, exchanges)):
            # Ranks that do not exchange with one another may make other numbers of such calls.
            what = "calls of mpi4jax"
            watching = partial(watching, awaited=partial(_missing_partners, world, program, what))
        with watching(what=what):
            ended[index] = False
            execution.run(index)
            execution.wait_outputs(index)
        ended[index] = True
        if (what := execution.branch_mismatch(index)) is not None:
            raise ExchangeError(f"in step {step} of `{program.name}`: {what}")
    except BaseException as error:
        failed.append(error)
        raise
