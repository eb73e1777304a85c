"""Runs one step on copies of its arguments, to time it.

The copies keep the measurement from affecting the training. If copying or computing fails on one
rank, e.g. because it's out of memory, all ranks give up the trial together. Otherwise the other
ranks would wait for the failed rank's exchanges.
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
    """Returns how many nanoseconds one step on copies of its arguments takes.

    If the step fails on some rank, all ranks return the same error text instead. Waits for all
    ranks.
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
    """Returns how many nanoseconds each segment of a step takes, or an error text (`time_step`).

    The segments run one after another, without any overlap, so that each time is that of a single
    segment. Before an exchange, the ranks wait until all of them have reached it, and only then
    start measuring. So the exchange's time doesn't include waiting for a slow rank. Waits for all
    ranks.
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
    """Returns the arguments, with copies of those that the step may overwrite.

    If copying fails on some rank, all ranks return an error text instead.
    """
    error_text = ""
    copies: list[Any] = []
    try:
        copies = [jnp.copy(x) if p in traced.donated else x for p, x in enumerate(leaves)]
        jax.block_until_ready(copies)
    except JaxRuntimeError as error:
        error_text = summary(error)
    # Tell all ranks about a failure before the step exchanges anything, or they'd wait for it.
    return gather_failures(control, error_text) or copies


def gather_failures(control: Control, error_text: str) -> str:
    """Returns all ranks' errors as one text, or "" if no rank has failed.

    The text is the same on every rank. Waits for all ranks.
    """
    if not any_rank(control, error_text):
        return ""
    texts = control.allgather_text(error_text)
    return "; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(texts) if text)


def summary(error: Exception) -> str:
    """Returns the first line of an error, without the tables that XLA adds."""
    return clause(first_line(describe(error)))


@final
class _Trial:
    """A step in flight that keeps exchanging after an XLA failure, so that no other rank hangs.

    After the first failure, the step computes nothing more. It still makes its remaining exchanges,
    with zeros, because the other ranks wait for them. It raises in only two cases: if an exchange
    itself fails, or if the number of exchanges depends on data, so that this rank can't know how
    many the other ranks are waiting for.

    Attributes:
        error_text: Describes the first failure; empty if there was none.
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
        """Waits until a segment that was started has finished."""
        self._attempt(partial(self._execution.wait_outputs, index))

    def branch_mismatch(self, index: int) -> None:
        """Ignores the mismatch here, because the real step will run into it as well and raise."""

    def outputs(self) -> None:
        """Waits for the results, and discards them."""
        self._attempt(lambda: jax.block_until_ready(self._execution.outputs()))

    def _attempt(self, work: Callable[[], Any]) -> None:
        if self.error_text:
            return
        try:
            work()
        except JaxRuntimeError as error:
            self.error_text = summary(error)
