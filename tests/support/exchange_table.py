"""The one table of exchanges, and one step of training around a row of it. A new row is at once tested everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.exchange.accumulate import accumulate
from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.mean import mean
from jaxcross.exchange.one_bit_adam import one_bit_adam
from jaxcross.exchange.power_sgd import power_sgd
from jaxcross.exchange.qsgd import qsgd
from jaxcross.exchange.sign_sgd import sign_sgd
from jaxcross.exchange.sparse import slots
from jaxcross.exchange.top_k import top_k
from tests.support import exchange_rows_b, exchange_rows_c, exchange_rows_d
from tests.support.exchange_row import (
    Formula,
    Row,
    Shapes,
    all_gather,
    all_reduce,
    blocks,
    count,
    node_and_local,
    nodes_of,
    padded,
    permute,
)

# A kernel, a convolution, a matrix smaller than most worlds, a bias and a scalar.
SHAPES = {"bias": (5,), "conv": (2, 2, 3, 4), "kernel": (8, 6), "scale": (), "tiny": (1, 2)}
RTOL16 = 5e-2  # bfloat16 has eight bits, and a ring or a tree rounds at every hop
EVERYTHING = 0.9999  # a density that rounds to every element of the leaves above, by the way of sparse messages


def params() -> dict[str, jax.Array]:
    """What every rank starts from."""
    rng = np.random.default_rng(7)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """A rank's own: what all have in common, and noise of different size in different leaves."""
    common, own = np.random.default_rng((step, 10**6)), np.random.default_rng((step, rank))
    return {
        name: np.asarray((common.normal(size=shape) + own.normal(size=shape)) * 10.0**-n, np.float32)
        for n, (name, shape) in enumerate(SHAPES.items())
    }


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """`(params, state), gradients -> (params, state), updates`, the updates applied."""

    def step(carry: Any, grads: Any) -> Any:
        values, state = carry
        updates, state = tx.update(grads, state, values)
        return (optax.apply_updates(values, updates), state), updates

    return step


def start(tx: optax.GradientTransformation) -> Any:
    """The first carry of `step_of`, the same on every rank."""
    return params(), tx.init(params())


def _dense(shapes: Shapes, ranks: int) -> int:
    return sum(all_reduce(4 * math.prod(s), ranks) for s in shapes)


def _two_bytes(shapes: Shapes, ranks: int) -> int:
    return sum(all_gather(2 * math.prod(s), ranks) for s in shapes)  # few bytes: one all-gather makes the sum


def _hierarchical(axes: Callable[[int], dict[str, int]], itemsize: int = 4) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        node, local = axes(ranks).values()
        whole = itemsize * padded(count(shapes), ranks)
        between = all_reduce if itemsize == 4 else all_gather  # few bytes of 16-bit values: one all-gather
        return 2 * blocks(whole, local) + between(whole // local, node)

    return nbytes


def _ring(itemsize: int = 4) -> Formula:
    return lambda shapes, ranks: 2 * (ranks - 1) * itemsize * padded(count(shapes), ranks) // ranks


def _tree(itemsize: int = 4) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        base = 1 << (ranks.bit_length() - 1)
        hops = base.bit_length() - 1 + (2 if base < ranks else 0)
        return hops * permute(itemsize * padded(count(shapes), ranks), ranks)

    return nbytes


def _split(shapes: Shapes) -> tuple[Shapes, Shapes]:
    return [s for s in shapes if len(s) > 1], [s for s in shapes if len(s) <= 1]


def _pairs(density: float, itemsize: int = 4) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        big, small = _split(shapes)
        k = sum(slots(density, math.prod(s)) for s in big)
        return all_gather((itemsize + 4) * k, ranks) + _dense(small, ranks)

    return nbytes


def _bucket(shapes: Shapes, ranks: int) -> int:
    big, small = _split(shapes)
    return all_gather(8 * slots(0.25, count(big)), ranks) + _dense(small, ranks)


def _hitopk(shapes: Shapes, ranks: int) -> int:
    node, local = node_and_local(ranks).values()
    big, small = _split(shapes)
    widths = [-(-math.prod(s) // local) for s in big]
    pairs = all_gather(8 * sum(slots(0.25, w) for w in widths), node)
    return 2 * (local - 1) * 4 * sum(widths) + pairs + _dense(small, ranks)


def _hitopk_bucket(shapes: Shapes, ranks: int) -> int:
    node, local = node_and_local(ranks).values()
    big, small = _split(shapes)
    width = sum(-(-math.prod(s) // local) for s in big)
    return 2 * (local - 1) * 4 * width + all_gather(6 * slots(0.25, width), node) + _dense(small, ranks)


def _gtop_k(shapes: Shapes, ranks: int) -> int:
    big, small = _split(shapes)
    return (ranks.bit_length() - 1) * 8 * sum(slots(0.25, math.prod(s)) for s in big) + _dense(small, ranks)


def _power_sgd(shapes: Shapes, ranks: int) -> int:
    total = 0
    for s in shapes:
        n, m = (math.prod(s[:-1]), s[-1]) if len(s) > 1 else (0, 0)
        r = min(2, n, m)
        sent = (r * n, r * m) if r * (n + m) < n * m else (math.prod(s),)
        total += sum(all_reduce(4 * part, ranks) for part in sent)
    return total


def _qsgd(shapes: Shapes, ranks: int) -> int:
    return all_gather(count(shapes) + 4 * len(shapes), ranks)


def _sign_sgd(shapes: Shapes, ranks: int) -> int:
    nbytes = padded(count(shapes), 8 * ranks) // 8
    return blocks(nbytes, ranks) + all_gather(nbytes // ranks, ranks) + all_reduce(4 * len(shapes), ranks)


def _signs_of_momenta(shapes: Shapes, ranks: int) -> int:
    nbytes = padded(count(shapes), 8 * ranks) // 8  # a block of eight: one byte of signs and a scale
    return 2 * (blocks(nbytes, ranks) + blocks(4 * nbytes, ranks))


def _adam(axis: str) -> optax.GradientTransformation:
    return optax.chain(mean(axis), optax.scale_by_adam())


_OWN = (
    Row(name="mean", make=mean, lossless=mean, bytes=_dense),
    Row(name="mean, two axes", make=lambda *axes: mean(axes), lossless=lambda *axes: mean(axes), axes=node_and_local,
        bytes=_dense),
    Row(name="mean, bfloat16", make=lambda a: mean(a, jnp.bfloat16), lossless=lambda a: mean(a, jnp.bfloat16),
        bytes=_two_bytes, rtol=1e-2),
    Row(name="mean, hierarchical", make=lambda *axes: mean(axes, pattern="hierarchical"), axes=node_and_local,
        lossless=lambda *axes: mean(axes, pattern="hierarchical"), bytes=_hierarchical(node_and_local)),
    *(Row(name=f"mean, hierarchical of {n}", make=lambda *axes: mean(axes, pattern="hierarchical"), axes=nodes_of(n),
          lossless=lambda *axes: mean(axes, pattern="hierarchical"), bytes=_hierarchical(nodes_of(n)),
          worlds=lambda ranks, n=n: ranks % n == 0) for n in (3, 4)),
    Row(name="mean, hierarchical, bfloat16", make=lambda *axes: mean(axes, jnp.bfloat16, pattern="hierarchical"),
        lossless=lambda *axes: mean(axes, jnp.bfloat16, pattern="hierarchical"),
        axes=node_and_local, bytes=_hierarchical(node_and_local, 2), rtol=RTOL16),
    Row(name="mean, ring", make=lambda a: mean(a, pattern="ring"), lossless=lambda a: mean(a, pattern="ring"),
        bytes=_ring()),
    Row(name="mean, ring, bfloat16", make=lambda a: mean(a, jnp.bfloat16, pattern="ring"), bytes=_ring(2), rtol=RTOL16,
        lossless=lambda a: mean(a, jnp.bfloat16, pattern="ring")),
    Row(name="mean, tree", make=lambda a: mean(a, pattern="tree"), lossless=lambda a: mean(a, pattern="tree"),
        bytes=_tree()),
    Row(name="mean, tree, bfloat16", make=lambda a: mean(a, jnp.bfloat16, pattern="tree"), bytes=_tree(2), rtol=RTOL16,
        lossless=lambda a: mean(a, jnp.bfloat16, pattern="tree")),
    Row(name="top_k", make=lambda a: top_k(0.25, a), lossless=lambda a: top_k(EVERYTHING, a), bytes=_pairs(0.25)),
    Row(name="top_k, threshold", make=lambda a: top_k(0.25, a, selection="threshold"),
        lossless=lambda a: top_k(EVERYTHING, a, selection="threshold"), bytes=_pairs(0.25)),
    Row(name="top_k, bfloat16", make=lambda a: top_k(0.25, a, values_dtype=jnp.bfloat16), bytes=_pairs(0.25, 2)),
    Row(name="top_k, bucket", make=lambda a: top_k(0.25, a, bucket=True),
        lossless=lambda a: top_k(1.0, a, bucket=True), bytes=_bucket),
    Row(name="top_k, no error feedback", make=lambda a: top_k(0.25, a, error_feedback=False), bytes=_pairs(0.25)),
    Row(name="top_k, warm-up", make=lambda a: top_k(0.1, a, warm_up=[(1, 0.5), (2, 0.25)]), bytes=_pairs(0.5),
        later=(2, _pairs(0.1))),
    Row(name="accumulate, top_k", make=lambda a: accumulate(top_k(0.25, a), every=2), bytes=lambda shapes, ranks: 0,
        later=(1, _pairs(0.25)), spreads=lambda ranks: 2),
    Row(name="top_k, hierarchical", axes=node_and_local, bytes=_hitopk, sized=True,
        make=lambda *axes, sizes: top_k(0.25, axes, pattern="hierarchical", local_size=sizes["local"]),
        lossless=lambda *axes, sizes: top_k(EVERYTHING, axes, pattern="hierarchical", local_size=sizes["local"])),
    Row(name="top_k, hierarchical, bfloat16, bucket", axes=node_and_local, bytes=_hitopk_bucket, sized=True,
        make=lambda *axes, sizes: top_k(0.25, axes, pattern="hierarchical", local_size=sizes["local"], bucket=True,
                                        values_dtype=jnp.bfloat16)),
    Row(name="gtop_k", make=lambda a: gtop_k(0.25, a), lossless=lambda a: gtop_k(EVERYTHING, a), bytes=_gtop_k,
        worlds=lambda ranks: ranks & (ranks - 1) == 0),
    Row(name="power_sgd", make=lambda a: power_sgd(2, a), lossless=lambda a: power_sgd(99, a, min_ratio=0),
        bytes=_power_sgd, rtol=2e-4, shared=lambda state: state.factor),
    Row(name="qsgd", make=lambda a: qsgd(127, a), bytes=_qsgd),
    Row(name="sign_sgd", make=sign_sgd, bytes=_sign_sgd),
    Row(name="one_bit_adam", bytes=_dense, later=(1, _signs_of_momenta), sized=True, reference=_adam, rtol=2e-4,
        shared=lambda state: (state.step, state.mu, state.nu),
        make=lambda a, sizes: one_bit_adam(1, a, ranks=sizes[a], block=8),
        lossless=lambda a, sizes: one_bit_adam(99, a, ranks=sizes[a], block=8)),
)  # fmt: skip


TABLE: tuple[Row, ...] = (*_OWN, *exchange_rows_b.ROWS, *exchange_rows_c.ROWS, *exchange_rows_d.ROWS)
