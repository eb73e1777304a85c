"""What a rank receives for large trees.

The expected numbers use none of the exchanges' helpers. The steps are only traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcross import exchange
from jaxcross.program.stages import cut
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide
from jaxcross.wire.bytes import wire_bytes

# Two Transformer blocks: 3.5 million elements, in layers of 384 as well as 590 thousand elements.
SHAPES = {
    f"{block}/{name}": shape
    for block in range(2)
    for name, shape in {
        "qkv": (384, 1152),
        "out": (384, 384),
        "up": (384, 1536),
        "down": (1536, 384),
        "up bias": (1536,),
        "down bias": (384,),
        "first norm": (384,),
        "second norm": (384,),
    }.items()
}
ELEMENTS = sum(map(math.prod, SHAPES.values()))
ONE = {"kernel": (1001, 333)}


def received(
    tx: optax.GradientTransformation, ranks: int, shapes: dict[str, tuple[int, ...]]
) -> int:
    """Returns the bytes received in the first step, with float32 gradients."""
    values = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    args = (values, jax.eval_shape(tx.init, values), values)
    traced = trace(
        lambda g, s, p: tx.update(g, s, p), args, axes={"batch": ranks}, wire=LocalRanks()
    )
    program = cut(decide(traced, jax.tree.leaves(args)), bucket_bytes=0)
    return sum(wire_bytes(x, {"batch": ranks}) for x in program.exchanges)


@pytest.mark.mostly_integration("2", "4")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_adasum_pads_by_two_in_a_hundred_at_most(ranks: int) -> None:
    ideal = 2 * (ranks - 1) / ranks * 4 * ELEMENTS
    # At each of log2(P) levels: five numbers per layer from every other rank.
    statistics = math.log2(ranks) * 5 * 4 * len(SHAPES) * (ranks - 1)
    assert ideal < received(exchange.adasum("batch"), ranks, SHAPES) <= 1.02 * ideal + statistics


# 1% of 333,333 elements is 3,333; each rank's share of those is rounded up.
EXACT: dict[str, tuple[Callable[[int], Any], Callable[[int], int]]] = {
    "mean": (
        lambda ranks: exchange.mean("batch"),
        lambda ranks: math.ceil(2 * (ranks - 1) * 4 * 333_333 / ranks),
    ),
    "mean, bfloat16": (
        lambda ranks: exchange.mean("batch", jnp.bfloat16),
        lambda ranks: 2 * (ranks - 1) * math.ceil(333_333 / ranks) * 2,
    ),
    "top_k": (lambda ranks: exchange.top_k(0.01, "batch"), lambda ranks: (ranks - 1) * 8 * 3_333),
    "top_k, bfloat16": (
        lambda ranks: exchange.top_k(0.01, "batch", wire_dtype=jnp.bfloat16),
        lambda ranks: (ranks - 1) * 6 * 3_333,
    ),
    "gtop_k": (
        lambda ranks: exchange.gtop_k(0.01, "batch"),
        lambda ranks: int(math.log2(ranks)) * 8 * 3_333,
    ),
    "sharded_optimizer": (
        lambda ranks: exchange.sharded_optimizer(optax.sgd(0.1), "batch", ranks=ranks),
        lambda ranks: 2 * (ranks - 1) * math.ceil(333_333 / ranks) * 4,
    ),
    "qsgd": (lambda ranks: exchange.qsgd(127, "batch"), lambda ranks: (ranks - 1) * (333_333 + 4)),
}


@pytest.mark.mostly_integration(
    "mean-2", "mean-4", "mean, bfloat16-2", "mean, bfloat16-4", "mean, bfloat16-8"
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", EXACT)
def test_one_large_leaf_to_the_byte(name: str, ranks: int) -> None:
    make, expected = EXACT[name]
    assert received(make(ranks), ranks, ONE) == expected(ranks)
