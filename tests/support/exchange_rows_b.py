"""Rows of the table: Adasum, shared norms, decentralised training, parameter server, staleness."""

from __future__ import annotations

from collections.abc import Callable

import optax

from jaxcross.exchange import mean, parallel_norms
from jaxcross.exchange.accumulate import accumulate
from jaxcross.exchange.adasum import adasum, chunk
from jaxcross.exchange.blocks import width
from jaxcross.exchange.elastic_average import elastic_average
from jaxcross.exchange.federated_average import federated_average
from jaxcross.exchange.gossip import gossip
from jaxcross.exchange.local_sgd import local_sgd
from jaxcross.exchange.sharded_optimizer import sharded_optimizer
from jaxcross.exchange.staleness import asynchronous, bounded_stale
from tests.support.exchange_row import Formula, Row, Shapes, all_gather, all_reduce, blocks, node_and_local

SGD = optax.sgd(0.1)


def _synchronous(*axes: str) -> optax.GradientTransformation:
    return optax.chain(mean(axes), SGD)


def _elements(shapes: Shapes) -> list[int]:
    return [width(shape, 1) for shape in shapes]


def _dense(shapes: Shapes, ranks: int) -> int:
    return sum(all_reduce(4 * n, ranks) for n in _elements(shapes))


def _nothing(shapes: Shapes, ranks: int) -> int:
    return 0 * len(shapes) * ranks


def _adasum_over(shapes: Shapes, ranks: int, local: int) -> int:
    base = 1 << (ranks.bit_length() - 1)
    levels, row = base.bit_length() - 1, 20 * len(shapes)
    size = chunk(shapes, base * local)
    columns = 4 * sum(width(s, base * local, size) for s in shapes)
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
    return lambda shapes, ranks: neighbours(ranks) * 4 * sum(_elements(shapes))


def _complete(shapes: Shapes, ranks: int) -> int:
    return all_reduce(4 * sum(_elements(shapes)), ranks)


# The most square grids: ranks -> sides. Along a side of two there is one neighbour, along a longer one there are two.
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
    part = 4 * sum(width(s, ranks) for s in shapes)
    return blocks(ranks * part, ranks) + all_gather(part, ranks)


ROWS = (
    Row(name="accumulate", make=lambda a: accumulate(optax.chain(mean(a), SGD), every=2), bytes=_nothing,
        lossless=lambda a: accumulate(optax.chain(mean(a), SGD), every=1), reference=_synchronous, later=(1, _dense),
        spreads=lambda ranks: 2, shared=lambda state: (state.mini_step, state.inner)),
    Row(name="adasum", make=adasum, bytes=_adasum),
    Row(name="adasum, delta of adam", make=lambda a: adasum(a, optax.adam(0.1)), kind="delta", bytes=_adasum),
    *(Row(name=f"adasum, delta of {name}", make=lambda a, own=own: adasum(a, own), kind="delta", bytes=_adasum)
      for name, own in (("momentum", optax.sgd(0.1, momentum=0.9)), ("lamb", optax.lamb(0.1)))),
    Row(name="adasum, hierarchical", make=lambda a, b: adasum(a, inner_axis=b), axes=node_and_local,
        bytes=_adasum_nodes),
    Row(name="lars, shared norms", make=lambda a: optax.chain(mean(a), parallel_norms.lars(a, 0.1)), bytes=_ratios,
        lossless=lambda a: optax.chain(mean(a), parallel_norms.lars(a, 0.1)),
        reference=lambda a: optax.chain(mean(a), optax.lars(0.1))),
    Row(name="lamb, shared norms", make=lambda a: optax.chain(mean(a), parallel_norms.lamb(a, 0.1)), bytes=_ratios,
        lossless=lambda a: optax.chain(mean(a), parallel_norms.lamb(a, 0.1)), rtol=2e-4,
        reference=lambda a: optax.chain(mean(a), optax.lamb(0.1))),
    Row(name="local_sgd", make=lambda a: local_sgd(SGD, a, every=2), lossless=lambda a: local_sgd(SGD, a, every=1),
        reference=_synchronous, identical=False, kind="parameter", bytes=_nothing, later=(1, _dense), rests=False,
        spreads=lambda ranks: 2),
    Row(name="federated_average", make=lambda a: federated_average(SGD, a, every=2, participation=0.5),
        lossless=lambda a: federated_average(SGD, a, every=1), reference=_synchronous, identical=False,
        # On 16 ranks the ninth is first chosen in the eleventh round of two steps; on fewer all are earlier.
        kind="parameter", bytes=_nothing, later=(1, _dense), spreads=lambda ranks: 22, spoils=22, rests=False),
    Row(name="elastic_average", make=lambda a: elastic_average(SGD, a, every=1, alpha=1 / 16), identical=False,
        kind="parameter", worlds=lambda ranks: ranks <= 16, bytes=_dense, spreads=lambda ranks: 3,
        shared=lambda state: state.centre),
    Row(name="gossip, ring", make=lambda a: gossip(SGD, a, "ring"), identical=False, kind="parameter",
        bytes=_gossip(lambda ranks: min(ranks - 1, 2)), spreads=lambda ranks: 1 + ranks // 2),
    Row(name="gossip, torus", make=lambda a: gossip(SGD, a, "torus"), identical=False, kind="parameter",
        worlds=_GRIDS.__contains__, bytes=_gossip(lambda ranks: sum(min(side - 1, 2) for side in _GRIDS[ranks])),
        spreads=lambda ranks: 1 + sum(side // 2 for side in _GRIDS[ranks])),
    Row(name="gossip, exponential", make=lambda a: gossip(SGD, a, "exponential"), identical=False, kind="parameter",
        bytes=_gossip(lambda ranks: min(ranks - 1, 1)), spreads=lambda ranks: 1 + (ranks - 1).bit_length(), steps=5),
    Row(name="gossip, complete", make=lambda a: gossip(SGD, a, "complete"), reference=_synchronous, identical=False,
        lossless=lambda a: gossip(SGD, a, "complete", adapt_first=True), kind="parameter", bytes=_complete,
        spreads=lambda ranks: 2, rests=False),
    Row(name="sharded_optimizer", make=lambda a, sizes: sharded_optimizer(SGD, a, ranks=sizes[a]), sized=True,
        lossless=lambda a, sizes: sharded_optimizer(SGD, a, ranks=sizes[a]), reference=_synchronous, bytes=_sharded),
    Row(name="bounded_stale", make=lambda a: bounded_stale(SGD, a, bound=2), reference=_synchronous, identical=False,
        lossless=lambda a: bounded_stale(SGD, a, bound=0), bytes=_dense, spreads=lambda ranks: 3, steps=5),
    Row(name="asynchronous", make=lambda a: asynchronous(SGD, a, delays=[[1], [0], [2]]), reference=_synchronous,
        lossless=lambda a: asynchronous(SGD, a, delays=0), bytes=_dense, spreads=lambda ranks: 2, steps=5),
)  # fmt: skip
