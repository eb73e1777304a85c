"""Times a step by running it on copies of its arguments.

Working on copies keeps the measurement from affecting the training. If copying or computing fails
on one rank, e.g. because it runs out of memory, all ranks abandon the trial together. Otherwise the
others would be left waiting for that rank's exchanges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from jaxcross.errors import clause, first_line
from jaxcross.program import Compiled, Execution, Traced
from jaxcross.runtime import describe, run_execution
from jaxcross.world import Control, World, any_rank


def time_step(
    compiled: Compiled, traced: Traced, leaves: Sequence[Any], world: World, control: Control
) -> int | str:
    """Returns how long a step takes on copies of its arguments, in nanoseconds.

    If it fails on some rank, all ranks return the same error text instead. Waits for all ranks.
    """
    copies = _copied(traced, leaves, control)
    if isinstance(copies, str):
        return copies
    trial = _Trial(compiled, copies)
    start = time.perf_counter_ns()
    run_execution(world, compiled, trial, 0, {})
    elapsed = time.perf_counter_ns() - start
    return gather_failures(control, trial.error_text) or elapsed


def time_segments(
    compiled: Compiled, traced: Traced, leaves: Sequence[Any], world: World, control: Control
) -> list[int] | str:
    """Like `time_step`, but returns how long each segment takes.

    The segments run one after another without any overlap, so that each is timed in isolation.
    Before each exchange, the ranks wait for one another and only then start the clock, so the
    exchange's time doesn't include waiting for a straggler. Waits for all ranks.
    """
    copies = _copied(traced, leaves, control)
    if isinstance(copies, str):
        return copies
    trial = _Trial(compiled, copies)
    times_ns: list[int] = []
    name = compiled.program.name
    for runnable in compiled.runnables:
        index = runnable.segment.index
        exchanges = runnable.segment.exchanges
        if exchanges and not runnable.is_single_rank:
            with world.monitor(job=name, step=0, segment=index, what=exchanges[0].op):
                control.allreduce_min(np.zeros(1, np.int64))
                times_ns.append(_timed(trial, index))
        else:
            times_ns.append(_timed(trial, index))
    trial.outputs()
    return gather_failures(control, trial.error_text) or times_ns


def _timed(trial: _Trial, index: int) -> int:
    start = time.perf_counter_ns()
    trial.run(index)
    trial.wait_segment(index)
    return time.perf_counter_ns() - start


def _copied(traced: Traced, leaves: Sequence[Any], control: Control) -> list[Any] | str:
    """Returns the arguments, copying those that the step may overwrite.

    If copying fails on some rank, all ranks return an error text instead.
    """
    error_text = ""
    copies: list[Any] = []
    try:
        copies = [jnp.copy(x) if p in traced.donated else x for p, x in enumerate(leaves)]
        jax.block_until_ready(copies)
    except JaxRuntimeError as error:
        error_text = summary(error)
    # Report a failure before the step exchanges anything, or the other ranks would wait for us.
    return gather_failures(control, error_text) or copies


def gather_failures(control: Control, error_text: str) -> str:
    """Combines all ranks' errors into one text, or returns "" if no rank has failed.

    The text is identical on all ranks. Waits for all ranks.
    """
    if not any_rank(control, error_text):
        return ""
    texts = control.allgather_text(error_text)
    return "; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text)


def summary(error: Exception) -> str:
    """Returns the first line of an error, without any tables added by XLA."""
    return clause(first_line(describe(error)))


@final
class _Trial:
    """A step in flight that keeps exchanging after an XLA failure, to keep other ranks from
    hanging.

    After the first failure, the step stops computing. It still performs its remaining exchanges
    (with zeros), because the other ranks are waiting for them. It only raises if an exchange itself
    fails, or if the number of exchanges depends on data, in which case this rank can't know how
    many the others are waiting for.

    Attributes:
        error_text: Describes the first failure; empty if there hasn't been any.
    """

    __slots__ = ("_compiled", "_execution", "error_text", "forget", "wait_outputs")

    def __init__(self, compiled: Compiled, inputs: Sequence[Any]) -> None:
        self._compiled = compiled
        self._execution = Execution(compiled, inputs)
        self.wait_outputs = self._execution.wait_outputs
        self.forget = self._execution.forget
        self.error_text = ""

    def run(self, index: int) -> None:
        runnable = self._compiled.runnables[index]
        if runnable.segment.kind == "compute" or runnable.is_single_rank:
            self._attempt(partial(self._execution.run, index))
            return
        if self.error_text:
            self._execution.zero_inputs(index)
        self._execution.run(index)

    def wait_inputs(self, index: int) -> None:
        self._attempt(partial(self._execution.wait_inputs, index))

    def wait_segment(self, index: int) -> None:
        self._attempt(partial(self._execution.wait_outputs, index))

    def branch_mismatch(self, index: int) -> None:
        """A no-op, because the real step will run into the same mismatch and raise."""

    def outputs(self) -> None:
        """Waits for the results and discards them."""
        self._attempt(lambda: jax.block_until_ready(self._execution.outputs()))

    def _attempt(self, work: Callable[[], Any]) -> None:
        if self.error_text:
            return
        try:
            work()
        except JaxRuntimeError as error:
            self.error_text = summary(error)
