"""One step without a runner: its exchanges made from a second thread where computation can go on beside them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from jaxcross.program.execution import Compiled, Execution
from jaxcross.world import World


def run_alone(world: World, compiled: Compiled, leaves: Sequence[Any], step: int) -> Any:
    """One step of one job. Waits for its exchanges, not for the computation behind them.

    The caller's thread dispatches all that computes, in program order; exchanges follow one another in a thread of
    their own, because XLA runs what one thread dispatches in order: an exchange would wait for the computation that was
    dispatched before it (wait-free backpropagation: Zhang et al., Poseidon, 2017, section 3).
    """
    execution = compiled.execution(leaves)
    exchanges: dict[int, Future[None]] = {}
    for runnable, awaited in zip(compiled.runnables, compiled.awaited, strict=True):
        index = runnable.segment.index
        if runnable.segment.kind == "compute" or runnable.silent:
            for n in awaited:
                if n in exchanges:
                    exchanges.pop(n).result()
            execution.run(index)
        elif compiled.overlaps:
            # What it reads was dispatched before it, or stands before it in the same queue.
            exchanges[index] = world.exchanger.submit(_exchange, world, compiled, execution, index, step)
        else:
            _exchange(world, compiled, execution, index, step)
    for exchange in exchanges.values():
        exchange.result()
    return execution.outputs()


def _exchange(world: World, compiled: Compiled, execution: Execution, index: int, step: int) -> None:
    program = compiled.program
    execution.wait_inputs(index)
    what = program.segments[index].exchanges[0].op
    with world.watching(job=program.name, step=step, segment=index, what=what):
        execution.run(index)
        execution.wait_outputs(index)
