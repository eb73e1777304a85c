"""One step on copies of its arguments, which all ranks leave together where a copy or a computation fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from jaxcross.errors import clause, first_line
from jaxcross.program.execution import Compiled, Execution
from jaxcross.program.trace import Traced
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.standalone import run_execution
from jaxcross.world import World
from jaxcross.world.control_plane import Control


def time_step(compiled: Compiled, traced: Traced, leaves: Sequence[Any], world: World, control: Control) -> int | str:
    """Nanoseconds of one step on copies; on all ranks what failed, if it did on some. Waits for all ranks."""
    why, own = "", []
    try:
        own = [jnp.copy(x) if p in traced.donated else x for p, x in enumerate(leaves)]
        jax.block_until_ready(own)
    except JaxRuntimeError as error:
        why, own = summary(error), []
    if failed := failures(control, why):  # before anything is exchanged; else all begin together
        return failed
    trial = _Trial(compiled, own)
    start = time.perf_counter_ns()
    run_execution(world, compiled, trial, 0, {})
    elapsed = time.perf_counter_ns() - start
    return failures(control, trial.why) or elapsed


def failures(control: Control, why: str) -> str:
    """What failed on which ranks; empty if nothing did. Waits for all ranks, which hear the same."""
    if control.allreduce_min(np.array([-bool(why)], np.int64)).item() == 0:
        return ""
    told = control.allgather_text(why)
    return "; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(told) if text)


def summary(error: Exception) -> str:
    """What an error says, without the tables that XLA adds."""
    return clause(first_line(describe(error)))


class _Trial(Execution):
    """A step that goes on after XLA has failed: computes no more, and exchanges zeros, since other ranks wait for it.

    It raises all the same where an exchange itself fails, or data decide how often the others will exchange.

    Attributes:
        why: What failed first; empty if nothing did.
    """

    __slots__ = ("why",)

    def __init__(self, compiled: Compiled, inputs: Sequence[Any]) -> None:
        super().__init__(compiled, inputs)
        self.why = ""

    def run(self, index: int) -> None:
        runnable = self._compiled.runnables[index]
        if runnable.segment.kind == "compute" or runnable.is_single_rank:
            self._attempt(partial(super().run, index))
            return
        if self.why:
            self.zero_inputs(index)
        super().run(index)

    def wait_inputs(self, index: int) -> None:
        self._attempt(partial(super().wait_inputs, index))

    def branch_mismatch(self, index: int) -> None:
        """The step that counts will tell."""
        self._counts.pop(index, None)

    def outputs(self) -> None:
        """Waits for the results, and drops them."""
        results = super().outputs
        self._attempt(lambda: jax.block_until_ready(results()))

    def _attempt(self, work: Callable[[], Any]) -> None:
        if self.why:
            return
        try:
            work()
        except JaxRuntimeError as error:
            self.why = summary(error)
