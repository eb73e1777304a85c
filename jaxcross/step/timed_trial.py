"""Runs one step on copies of its arguments, to time it.

If a copy or a computation fails on one rank, all ranks abandon the trial together.
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
    """Returns the nanoseconds of one step on copies of its arguments.

    If it fails on some rank, all ranks return a text about the failure instead. Waits for all
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
    """Returns the nanoseconds of each segment of one step on copies, or a text as `time_step` does.

    Segments run one at a time, and an exchange is timed from the moment when all ranks have reached
    it, so no segment is hidden behind another one. Waits for all ranks.
    """
    copies = _copied(traced, leaves, control)
    if isinstance(copies, str):
        return copies
    trial, times_ns, name = _Trial(compiled, copies), [], compiled.program.name
    for runnable in compiled.runnables:
        index, exchanges = runnable.segment.index, runnable.segment.exchanges
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
    """Returns the arguments, copied if the step may overwrite them.

    If a copy fails, returns a text about it on all ranks.
    """
    error_text, copies = "", []
    try:
        copies = [jnp.copy(x) if p in traced.donated else x for p, x in enumerate(leaves)]
        jax.block_until_ready(copies)
    except JaxRuntimeError as error:
        error_text = summary(error)
    # All ranks must learn of a failure before anything is exchanged.
    return gather_failures(control, error_text) or copies


def gather_failures(control: Control, error_text: str) -> str:
    """Returns all ranks' errors as one text, or "" if there are none. Waits for all ranks.

    The text is the same on every rank.
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
    """A step in flight that continues after XLA has failed, since the other ranks wait for it.

    After a failure it computes nothing more, and exchanges zeros. It raises only if an exchange
    itself fails, or if the number of exchanges depends on data.

    Attributes:
        error_text: The first failure; empty if there was none.
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
        """Ignores the mismatch, because the real step, which follows, will raise it."""

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
