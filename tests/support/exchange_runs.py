"""Runs steps of an exchange on all ranks in one process, compiled quickly."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from jaxcross.testing import vmapped
from tests.support.exchange_row import Row
from tests.support.exchange_table import gradients, start, step_of
from tests.support.quick_compiler import OPTIONS


@functools.cache
def compiled(row: Row, ranks: int, which: str) -> tuple[Any, Any]:
    """One step of a row for all ranks, which are the first dimension, and the initial carry."""
    tx = (
        row.referred(ranks)
        if which == "reference"
        else row.made(ranks, lossless=which == "lossless")
    )
    step = flat_ranks(step_of(tx), row.axes(ranks))
    carry = stacked(start(tx), ranks)
    return jax.jit(step).lower(carry, ranks_of_gradients(ranks, 0)).compile(
        compiler_options=OPTIONS
    ), carry


def flat_ranks(function: Any, axes: dict[str, int]) -> Any:
    """`function` on all ranks. Arrays have a single leading dimension for all ranks."""
    over, sizes = vmapped(function, axes), tuple(axes.values())

    def call(*args: Any) -> Any:
        grid = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), args)
        return jax.tree.map(
            lambda x: x.reshape(math.prod(sizes), *x.shape[len(sizes) :]), over(*grid)
        )

    return call


def stacked(tree: Any, ranks: int) -> Any:
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], ranks, axis=0), tree)


def ranks_of_gradients(ranks: int, step: int) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *[gradients(r, step) for r in range(ranks)])


def run(
    row: Row,
    ranks: int,
    which: str = "make",
    change: Any = lambda step, grads: grads,
    steps: int | None = None,
) -> tuple[Any, list[Any]]:
    """Runs `steps` steps, or all. Returns the final carry and each step's updates."""
    step, carry = compiled(row, ranks, which)
    received = []
    for n in range(row.steps if steps is None else steps):
        carry, updates = step(carry, change(n, ranks_of_gradients(ranks, n)))
        received.append(updates)
    return carry, received


def assert_close(got: Any, expected: Any, rtol: float) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(b), initial=0))
        np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * scale, err_msg=jax.tree_util.keystr(path)
        )
