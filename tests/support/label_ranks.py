"""Ranks that each trace a step differently, and the error they raise about the exchanges' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross.errors import ExchangeError
from jaxcross.program import stages
from jaxcross.program.ir import Program
from jaxcross.program.trace import trace
from jaxcross.step.exchange_agreement import agree_on_order, order_hash
from jaxcross.testing import LocalRanks, decide
from tests.support.fakes import run_ranks

X = jnp.arange(12.0).reshape(4, 3)
TREE = {"a": X, "b": X + 1, "c": X * 2}
ORDERS = (("a", "b", "c"), ("c", "a", "b"))


def program_of(
    step: Callable[..., Any],
    *args: Any,
    axes: Any = None,
    cut: Any = "whole",
    bucket_bytes: int = 1 << 20,
) -> Program:
    traced = trace(step, args, axes=axes or {"x": 2}, wire=LocalRanks())
    return stages.cut(decide(traced, jax.tree.leaves((args, {}))), cut, bucket_bytes=bucket_bytes)


def verdict(programs: Sequence[Program]) -> str:
    """The error of ranks with these programs, identical on all of them; empty if there's none."""
    assert len({program.exchange_signature() for program in programs}) == 1, (
        "the signatures differ already"
    )

    def agree(world: Any) -> str:
        try:
            program = programs[world.control.rank]
            agree_on_order(world.control, program, order_hash(program))
        except ExchangeError as error:
            return str(error)
        return ""

    (said,) = set(run_ranks(len(programs), agree))
    return said


def both(step: Callable[..., Any], *args: Any, orders: Any = ORDERS, **options: Any) -> str:
    """The verdict of ranks that trace `step(order, *args)`, each with its own order."""
    return verdict(
        [program_of(lambda *given, o=order: step(o, *given), *args, **options) for order in orders]
    )
