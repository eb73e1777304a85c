"""The table of all exchanges, and a training step around a row.

Every test of exchanges reads it, so a new row is tested everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.exchange import parallel_norms
from jaxcross.exchange.accumulate import accumulate
from jaxcross.exchange.adasum import adasum, chunk
from jaxcross.exchange.bits import BLOCK
from jaxcross.exchange.decoupled_momentum import decoupled_momentum
from jaxcross.exchange.delayed_mean import delayed_mean
from jaxcross.exchange.diloco import diloco
from jaxcross.exchange.elastic_average import elastic_average
from jaxcross.exchange.federated_average import federated_average
from jaxcross.exchange.gossip import gossip
from jaxcross.exchange.gtop_k import gtop_k
from jaxcross.exchange.layouts import block_width
from jaxcross.exchange.local_sgd import local_sgd
from jaxcross.exchange.mean import mean
from jaxcross.exchange.no_loco import draw, no_loco, pairings
from jaxcross.exchange.one_bit_adam import one_bit_adam
from jaxcross.exchange.power_sgd import power_sgd
from jaxcross.exchange.qsgd import qsgd
from jaxcross.exchange.sharded_optimizer import sharded_optimizer
from jaxcross.exchange.sign_sgd import sign_sgd
from jaxcross.exchange.sparse import slots
from jaxcross.exchange.sparse_loco import sparse_loco
from jaxcross.exchange.staleness import asynchronous, bounded_stale
from jaxcross.exchange.streaming_diloco import streaming_diloco
from jaxcross.exchange.top_k import top_k
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

# A bias, a convolution, a kernel, a scalar, and a matrix smaller than most worlds.
SHAPES = {"bias": (5,), "conv": (2, 2, 3, 4), "kernel": (8, 6), "scale": (), "tiny": (1, 2)}
RTOL16 = 5e-2  # bfloat16 has 8 significant bits, and a ring or a tree rounds at every hop
# Sends sparse messages, but its density rounds up to every element of the leaves above.
EVERYTHING = 0.9999
SGD = optax.sgd(0.1)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def params() -> dict[str, jax.Array]:
    """The parameters that every rank starts from."""
    rng = np.random.default_rng(7)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def gradients(rank: int, step: int) -> dict[str, np.ndarray]:
    """A rank's gradients: a common part plus the rank's noise, at a different scale per leaf."""
    common, own = np.random.default_rng((step, 10**6)), np.random.default_rng((step, rank))
    return {
        name: np.asarray(
            (common.normal(size=shape) + own.normal(size=shape)) * 10.0**-n, np.float32
        )
        for n, (name, shape) in enumerate(SHAPES.items())
    }


def step_of(tx: optax.GradientTransformation) -> Callable[..., Any]:
    """`(params, state), gradients -> (params, state), updates`, with the updates applied."""

    def step(carry: Any, grads: Any) -> Any:
        values, state = carry
        updates, state = tx.update(grads, state, values)
        return (optax.apply_updates(values, updates), state), updates

    return step


def start(tx: optax.GradientTransformation) -> Any:
    """The initial carry of `step_of`, identical on every rank."""
    return params(), tx.init(params())


def _dense(shapes: Shapes, ranks: int) -> int:
    return sum(all_reduce(4 * math.prod(s), ranks) for s in shapes)


def _nothing(shapes: Shapes, ranks: int) -> int:
    return 0


def _two_bytes(shapes: Shapes, ranks: int) -> int:
    return sum(
        all_gather(2 * math.prod(s), ranks) for s in shapes
    )  # for this few bytes, one all-gather computes the sum


def _hierarchical(axes: Callable[[int], dict[str, int]], itemsize: int = 4) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        node, local = axes(ranks).values()
        whole = itemsize * padded(count(shapes), ranks)
        between = (
            all_reduce if itemsize == 4 else all_gather
        )  # 16-bit values and few bytes, so one all-gather
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
    elements = sum(-(-math.prod(s) // local) for s in big)
    return (
        2 * (local - 1) * 4 * elements
        + all_gather(6 * slots(0.25, elements), node)
        + _dense(small, ranks)
    )


def _gtop_k(shapes: Shapes, ranks: int) -> int:
    big, small = _split(shapes)
    return (ranks.bit_length() - 1) * 8 * sum(slots(0.25, math.prod(s)) for s in big) + _dense(
        small, ranks
    )


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
    return (
        blocks(nbytes, ranks)
        + all_gather(nbytes // ranks, ranks)
        + all_reduce(4 * len(shapes), ranks)
    )


def _signs_of_momenta(shapes: Shapes, ranks: int) -> int:
    nbytes = (
        padded(count(shapes), 8 * ranks) // 8
    )  # a block of eight: one byte of signs and a scale
    return 2 * (blocks(nbytes, ranks) + blocks(4 * nbytes, ranks))


def _adasum_over(shapes: Shapes, ranks: int, local: int) -> int:
    base = 1 << (ranks.bit_length() - 1)
    levels, row = base.bit_length() - 1, 20 * len(shapes)
    size = chunk(shapes, base * local)
    columns = 4 * sum(block_width(s, base * local, size) for s in shapes)
    inside = blocks(base * local * columns, local) + all_gather(base * columns, local)
    statistics = levels * (all_gather(row, local) + all_gather(local * row, ranks))
    fold = 2 * base * columns + all_gather(row, local) if base < ranks else 0
    return inside + 2 * (base - 1) * columns + statistics + fold


def _adasum(shapes: Shapes, ranks: int) -> int:
    return _adasum_over(shapes, ranks, 1)


def _adasum_nodes(shapes: Shapes, ranks: int) -> int:
    return _adasum_over(shapes, *node_and_local(ranks).values())


def _ratios(shapes: Shapes, ranks: int) -> int:
    return _dense(shapes, ranks) + all_gather(4 * -(-len(shapes) // ranks), ranks)


def _gossip(neighbours: Callable[[int], int]) -> Formula:
    return lambda shapes, ranks: neighbours(ranks) * 4 * count(shapes)


def _complete(shapes: Shapes, ranks: int) -> int:
    return all_reduce(4 * count(shapes), ranks)


# Maps the number of ranks to the sides of the most nearly square grid. Along a side of length 2, a
# rank has a single neighbour, because both directions lead to the same rank; along a longer side,
# it has two.
_GRIDS = {
    1: (1, 1),
    4: (2, 2),
    6: (2, 3),
    8: (2, 4),
    9: (3, 3),
    10: (2, 5),
    12: (3, 4),
    14: (2, 7),
    15: (3, 5),
    16: (4, 4),
}


def _sharded(shapes: Shapes, ranks: int) -> int:
    part = 4 * sum(block_width(s, ranks) for s in shapes)
    return blocks(ranks * part, ranks) + all_gather(part, ranks)


def _slice(fragments: int, slices: int, bits: int = 32) -> Formula:
    """Bytes of one slice of one fragment."""

    def nbytes(shapes: Shapes, ranks: int) -> int:
        elements = (
            padded(-(-count(shapes) // fragments), slices * (BLOCK if bits < 32 else 1)) // slices
        )
        if bits == 32:
            return all_reduce(4 * elements, ranks)
        return all_gather(elements * bits // 8 + 4 * elements // BLOCK, ranks)

    return nbytes


def _anchor(state: Any) -> Any:
    return state.anchor, state.outer, state.arrived


def _part(side: int, most: int) -> tuple[int, int]:
    """The number of equal parts that a side is cut into, and their length."""
    parts = math.ceil(side / most)
    return parts, math.ceil(side / parts)


def _frequencies(density: float, side: int, itemsize: int = 4) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        big, small = _split(shapes)
        sent = 0
        for s in big:
            (rows, high), (columns, wide) = _part(math.prod(s[:-1]), side), _part(s[-1], side)
            k = rows * columns * slots(density, high * wide)
            sent += k * itemsize + math.ceil(k * max(1, math.ceil(math.log2(high * wide))) / 8)
        return all_gather(sent, ranks) + _dense(small, ranks)

    return nbytes


def _two_bits(density: float, most: int) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        big, small = _split(shapes)
        sent = 0
        for s in big:
            rows, length = _part(math.prod(s), most)
            k = rows * slots(density, length)
            sent += math.ceil(k * (2 + max(1, math.ceil(math.log2(length)))) / 8) + 8
        return all_gather(sent, ranks) + _dense(small, ranks)

    return nbytes


def _pair(times: int = 1) -> Formula:
    return lambda shapes, ranks: times * permute(4 * count(shapes), ranks)


def exchanges_until_all_heard(ranks: int, seed: int = 0) -> int:
    """Number of `no_loco` exchanges until every rank has received what any rank held before any of
    the first three.
    """
    meetings, most = pairings(ranks), 1  # a rank has its own value from the step of the exchange on
    for first in range(3):
        for source in range(ranks):
            heard, number = {source}, first
            while len(heard) < ranks:
                partners = meetings[int(draw(seed, jnp.int32(number), len(meetings)))]
                heard |= {partners[r] for r in heard}
                number += 1
            most = max(most, number - first)
    return most


def _adam(axis: str) -> optax.GradientTransformation:
    return optax.chain(mean(axis), optax.scale_by_adam())


def _synchronous(*axes: str) -> optax.GradientTransformation:
    return optax.chain(mean(axes), SGD)


TABLE: tuple[Row, ...] = (
    # Sums, and compressed gradients.
    Row(name="mean", make=mean, lossless=mean, bytes=_dense),
    Row(
        name="mean, two axes",
        make=lambda *axes: mean(axes),
        lossless=lambda *axes: mean(axes),
        axes=node_and_local,
        bytes=_dense,
    ),
    Row(
        name="mean, bfloat16",
        make=lambda a: mean(a, jnp.bfloat16),
        lossless=lambda a: mean(a, jnp.bfloat16),
        bytes=_two_bytes,
        rtol=1e-2,
    ),
    Row(
        name="mean, hierarchical",
        make=lambda *axes: mean(axes, pattern="hierarchical"),
        axes=node_and_local,
        lossless=lambda *axes: mean(axes, pattern="hierarchical"),
        bytes=_hierarchical(node_and_local),
    ),
    *(
        Row(
            name=f"mean, hierarchical of {n}",
            make=lambda *axes: mean(axes, pattern="hierarchical"),
            axes=nodes_of(n),
            lossless=lambda *axes: mean(axes, pattern="hierarchical"),
            bytes=_hierarchical(nodes_of(n)),
            worlds=lambda ranks, n=n: ranks % n == 0,
        )
        for n in (3, 4)
    ),
    Row(
        name="mean, hierarchical, bfloat16",
        make=lambda *axes: mean(axes, jnp.bfloat16, pattern="hierarchical"),
        lossless=lambda *axes: mean(axes, jnp.bfloat16, pattern="hierarchical"),
        axes=node_and_local,
        bytes=_hierarchical(node_and_local, 2),
        rtol=RTOL16,
    ),
    Row(
        name="mean, ring",
        make=lambda a: mean(a, pattern="ring"),
        lossless=lambda a: mean(a, pattern="ring"),
        bytes=_ring(),
    ),
    Row(
        name="mean, ring, bfloat16",
        make=lambda a: mean(a, jnp.bfloat16, pattern="ring"),
        bytes=_ring(2),
        rtol=RTOL16,
        lossless=lambda a: mean(a, jnp.bfloat16, pattern="ring"),
    ),
    Row(
        name="mean, tree",
        make=lambda a: mean(a, pattern="tree"),
        lossless=lambda a: mean(a, pattern="tree"),
        bytes=_tree(),
    ),
    Row(
        name="mean, tree, bfloat16",
        make=lambda a: mean(a, jnp.bfloat16, pattern="tree"),
        bytes=_tree(2),
        rtol=RTOL16,
        lossless=lambda a: mean(a, jnp.bfloat16, pattern="tree"),
    ),
    Row(
        name="top_k",
        make=lambda a: top_k(0.25, a),
        lossless=lambda a: top_k(EVERYTHING, a),
        bytes=_pairs(0.25),
    ),
    Row(
        name="top_k, threshold",
        make=lambda a: top_k(0.25, a, selection="threshold"),
        lossless=lambda a: top_k(EVERYTHING, a, selection="threshold"),
        bytes=_pairs(0.25),
    ),
    Row(
        name="top_k, bfloat16",
        make=lambda a: top_k(0.25, a, wire_dtype=jnp.bfloat16),
        bytes=_pairs(0.25, 2),
    ),
    Row(
        name="top_k, bucket",
        make=lambda a: top_k(0.25, a, bucket=True),
        lossless=lambda a: top_k(1.0, a, bucket=True),
        bytes=_bucket,
    ),
    Row(
        name="top_k, no error feedback",
        make=lambda a: top_k(0.25, a, error_feedback=False),
        bytes=_pairs(0.25),
    ),
    Row(
        name="top_k, warm-up",
        make=lambda a: top_k(0.1, a, warm_up=[(1, 0.5), (2, 0.25)]),
        bytes=_pairs(0.5),
        later=(2, _pairs(0.1)),
    ),
    Row(
        name="accumulate, top_k",
        make=lambda a: accumulate(top_k(0.25, a), every=2),
        bytes=_nothing,
        later=(1, _pairs(0.25)),
        spreads=lambda ranks: 2,
    ),
    Row(
        name="top_k, hierarchical",
        axes=node_and_local,
        bytes=_hitopk,
        sized=True,
        make=lambda *axes, sizes: top_k(
            0.25, axes, pattern="hierarchical", inner_ranks=sizes["local"]
        ),
        lossless=lambda *axes, sizes: top_k(
            EVERYTHING, axes, pattern="hierarchical", inner_ranks=sizes["local"]
        ),
    ),
    Row(
        name="top_k, hierarchical, bfloat16, bucket",
        axes=node_and_local,
        bytes=_hitopk_bucket,
        sized=True,
        make=lambda *axes, sizes: top_k(
            0.25,
            axes,
            pattern="hierarchical",
            inner_ranks=sizes["local"],
            bucket=True,
            wire_dtype=jnp.bfloat16,
        ),
    ),
    Row(
        name="gtop_k",
        make=lambda a: gtop_k(0.25, a),
        lossless=lambda a: gtop_k(EVERYTHING, a),
        bytes=_gtop_k,
        worlds=lambda ranks: ranks & (ranks - 1) == 0,
    ),
    Row(
        name="power_sgd",
        make=lambda a: power_sgd(2, a),
        lossless=lambda a: power_sgd(99, a, min_ratio=0),
        bytes=_power_sgd,
        rtol=2e-4,
        shared=lambda state: state.factor,
    ),
    Row(name="qsgd", make=lambda a: qsgd(127, a), bytes=_qsgd),
    Row(name="sign_sgd", make=sign_sgd, bytes=_sign_sgd),
    Row(
        name="one_bit_adam",
        bytes=_dense,
        later=(1, _signs_of_momenta),
        sized=True,
        reference=_adam,
        rtol=2e-4,
        shared=lambda state: (state.step, state.mu, state.nu),
        make=lambda a, sizes: one_bit_adam(1, a, ranks=sizes[a], block=8),
        lossless=lambda a, sizes: one_bit_adam(99, a, ranks=sizes[a], block=8),
    ),
    # Other sums, decentralised training, a sharded optimizer and stale gradients.
    Row(
        name="accumulate",
        make=lambda a: accumulate(optax.chain(mean(a), SGD), every=2),
        bytes=_nothing,
        lossless=lambda a: accumulate(optax.chain(mean(a), SGD), every=1),
        reference=_synchronous,
        later=(1, _dense),
        spreads=lambda ranks: 2,
        shared=lambda state: (state.mini_step, state.inner),
    ),
    Row(name="adasum", make=adasum, bytes=_adasum),
    Row(
        name="adasum, delta of adam",
        make=lambda a: adasum(a, optax.adam(0.1)),
        kind="delta",
        bytes=_adasum,
    ),
    *(
        Row(
            name=f"adasum, delta of {name}",
            make=lambda a, own=own: adasum(a, own),
            kind="delta",
            bytes=_adasum,
        )
        for name, own in (("momentum", optax.sgd(0.1, momentum=0.9)), ("lamb", optax.lamb(0.1)))
    ),
    Row(
        name="adasum, hierarchical",
        make=lambda a, b: adasum((a, b)),
        axes=node_and_local,
        bytes=_adasum_nodes,
    ),
    Row(
        name="lars, shared norms",
        make=lambda a: optax.chain(mean(a), parallel_norms.lars(a, 0.1)),
        bytes=_ratios,
        lossless=lambda a: optax.chain(mean(a), parallel_norms.lars(a, 0.1)),
        reference=lambda a: optax.chain(mean(a), optax.lars(0.1)),
    ),
    Row(
        name="lamb, shared norms",
        make=lambda a: optax.chain(mean(a), parallel_norms.lamb(a, 0.1)),
        bytes=_ratios,
        lossless=lambda a: optax.chain(mean(a), parallel_norms.lamb(a, 0.1)),
        rtol=2e-4,
        reference=lambda a: optax.chain(mean(a), optax.lamb(0.1)),
    ),
    Row(
        name="local_sgd",
        make=lambda a: local_sgd(SGD, a, every=2),
        lossless=lambda a: local_sgd(SGD, a, every=1),
        reference=_synchronous,
        identical=False,
        kind="parameter",
        bytes=_nothing,
        later=(1, _dense),
        rests=False,
        spreads=lambda ranks: 2,
    ),
    Row(
        name="federated_average",
        make=lambda a: federated_average(SGD, a, every=2, participation=0.5),
        lossless=lambda a: federated_average(SGD, a, every=1),
        reference=_synchronous,
        identical=False,
        # `spreads` is 22 because on 16 ranks, the ninth rank isn't chosen before round 11, and a
        # round has two steps. With fewer ranks, each rank is chosen earlier.
        kind="parameter",
        bytes=_nothing,
        later=(1, _dense),
        spreads=lambda ranks: 22,
        spoils=22,
        rests=False,
    ),
    Row(
        name="elastic_average",
        make=lambda a: elastic_average(SGD, a, every=1, alpha=1 / 16),
        identical=False,
        kind="parameter",
        worlds=lambda ranks: ranks <= 16,
        bytes=_dense,
        spreads=lambda ranks: 3,
        shared=lambda state: state.centre,
    ),
    Row(
        name="gossip, ring",
        make=lambda a: gossip(SGD, a, "ring"),
        identical=False,
        kind="parameter",
        bytes=_gossip(lambda ranks: min(ranks - 1, 2)),
        spreads=lambda ranks: 1 + ranks // 2,
    ),
    Row(
        name="gossip, torus",
        make=lambda a: gossip(SGD, a, "torus"),
        identical=False,
        kind="parameter",
        worlds=_GRIDS.__contains__,
        bytes=_gossip(lambda ranks: sum(min(side - 1, 2) for side in _GRIDS[ranks])),
        spreads=lambda ranks: 1 + sum(side // 2 for side in _GRIDS[ranks]),
    ),
    Row(
        name="gossip, exponential",
        make=lambda a: gossip(SGD, a, "exponential"),
        identical=False,
        kind="parameter",
        bytes=_gossip(lambda ranks: min(ranks - 1, 1)),
        spreads=lambda ranks: 1 + (ranks - 1).bit_length(),
        steps=5,
    ),
    Row(
        name="gossip, complete",
        make=lambda a: gossip(SGD, a, "complete"),
        reference=_synchronous,
        identical=False,
        lossless=lambda a: gossip(SGD, a, "complete", adapt_first=True),
        kind="parameter",
        bytes=_complete,
        spreads=lambda ranks: 2,
        rests=False,
    ),
    Row(
        name="sharded_optimizer",
        make=lambda a, sizes: sharded_optimizer(SGD, a, ranks=sizes[a]),
        sized=True,
        lossless=lambda a, sizes: sharded_optimizer(SGD, a, ranks=sizes[a]),
        reference=_synchronous,
        bytes=_sharded,
    ),
    Row(
        name="bounded_stale",
        make=lambda a: bounded_stale(SGD, a, staleness=2),
        reference=_synchronous,
        identical=False,
        lossless=lambda a: bounded_stale(SGD, a, staleness=0),
        bytes=_dense,
        spreads=lambda ranks: 3,
        steps=5,
    ),
    Row(
        name="asynchronous",
        make=lambda a: asynchronous(SGD, a, delays=[[1], [0], [2]]),
        reference=_synchronous,
        lossless=lambda a: asynchronous(SGD, a, delays=0),
        bytes=_dense,
        spreads=lambda ranks: 2,
        steps=5,
    ),
    # Rounds of local steps with an outer optimizer, and exchanges carried over to the next step.
    Row(
        name="delayed_mean",
        make=lambda a: delayed_mean(optax.sgd(0.1, momentum=0.9), a),
        bytes=_dense,
        spreads=lambda ranks: 2,
        shared=lambda state: state.inner,
    ),
    Row(
        name="diloco",
        make=lambda a: diloco(SGD, NESTEROV, a, every=2),
        reference=_synchronous,
        identical=False,
        lossless=lambda a: diloco(SGD, optax.sgd(1.0), a, every=1),
        kind="parameter",
        bytes=_nothing,
        later=(1, _dense),
        spreads=lambda ranks: 2,
        shared=lambda state: (state.anchor, state.outer),
    ),
    Row(
        name="streaming_diloco",
        reference=_synchronous,
        identical=False,
        kind="parameter",
        steps=7,
        bytes=_nothing,
        make=lambda a: streaming_diloco(SGD, NESTEROV, a, every=4, fragments=2, delay=2),
        lossless=lambda a: streaming_diloco(SGD, optax.sgd(1.0), a, every=1, fragments=1, delay=0),
        later=(2, _slice(2, 2)),
        spreads=lambda ranks: 6,
        shared=_anchor,
    ),
    Row(
        name="streaming_diloco, 4 bits",
        identical=False,
        kind="parameter",
        steps=5,
        bytes=_nothing,
        make=lambda a: streaming_diloco(SGD, NESTEROV, a, every=4, fragments=2, delay=1, bits=4),
        later=(2, _slice(2, 1, 4)),
        spreads=lambda ranks: 5,
        shared=_anchor,
    ),
    Row(
        name="streaming_diloco, at once, 8 bits",
        identical=False,
        kind="parameter",
        bytes=_slice(3, 1, 8),
        steps=4,
        make=lambda a: streaming_diloco(SGD, NESTEROV, a, every=3, fragments=3, delay=0, bits=8),
        spreads=lambda ranks: 3,
        shared=_anchor,
    ),
    # Training with little communication.
    Row(
        name="decoupled_momentum",
        make=lambda a: decoupled_momentum(0.25, a, decay=0.9, chunk=4),
        lossless=lambda a: decoupled_momentum(1.0, a, chunk=4),
        bytes=_frequencies(0.25, 4),
    ),
    Row(
        name="decoupled_momentum, bfloat16",
        make=lambda a: decoupled_momentum(0.25, a, chunk=64, wire_dtype=jnp.bfloat16),
        bytes=_frequencies(0.25, 64, 2),
    ),
    Row(
        name="decoupled_momentum, sign",
        make=lambda a: decoupled_momentum(0.25, a, chunk=4, sign=True),
        bytes=_frequencies(0.25, 4),
    ),
    Row(
        name="sparse_loco",
        identical=False,
        kind="parameter",
        bytes=_nothing,
        later=(1, _two_bits(0.25, 20)),
        make=lambda a: sparse_loco(
            SGD, optax.sgd(0.7, momentum=0.9), a, every=2, density=0.25, chunk=20
        ),
        steps=5,
        lossless=lambda a: sparse_loco(
            SGD, optax.sgd(1.0), a, every=1, density=1, chunk=20, bits=32
        ),
        reference=_synchronous,
        spreads=lambda ranks: 2,
        shared=lambda state: (state.anchor, state.outer),
    ),
    Row(
        name="sparse_loco, every step",
        kind="parameter",
        bytes=_two_bits(0.25, 4096),
        make=lambda a: sparse_loco(SGD, optax.sgd(1.0), a, every=1, density=0.25),
        shared=lambda state: state.anchor,
    ),
    Row(
        name="no_loco",
        make=lambda a: no_loco(SGD, a, every=2),
        identical=False,
        kind="parameter",
        bytes=_nothing,
        later=(1, _pair()),
        spreads=lambda ranks: 2 * exchanges_until_all_heard(ranks),
        steps=5,
    ),
    Row(
        name="no_loco, pull",
        make=lambda a: no_loco(SGD, a, every=2, pull=0.3),
        identical=False,
        kind="parameter",
        bytes=_nothing,
        later=(1, _pair(2)),
        spreads=lambda ranks: 2 * exchanges_until_all_heard(ranks),
        steps=5,
    ),
)
