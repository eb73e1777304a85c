"""Rows of the table: training with little communication."""

from __future__ import annotations

import math

import jax.numpy as jnp
import optax

from jaxcross.exchange import mean
from jaxcross.exchange.demo import demo
from jaxcross.exchange.no_loco import draw, no_loco, pairings
from jaxcross.exchange.sparse import slots
from jaxcross.exchange.sparse_loco import sparse_loco
from tests.support.exchange_row import Formula, Row, Shapes, all_gather, all_reduce, count, permute

SGD = optax.sgd(0.1)


def _nothing(shapes: Shapes, ranks: int) -> int:
    return 0 * len(shapes) * ranks


def _part(side: int, most: int) -> tuple[int, int]:
    """How many equal parts a side is cut into, and how long they are."""
    parts = math.ceil(side / most)
    return parts, math.ceil(side / parts)


def _small(shapes: Shapes, ranks: int) -> int:
    return sum(all_reduce(4 * math.prod(s), ranks) for s in shapes if len(s) <= 1)


def _frequencies(density: float, chunk: int, itemsize: int = 4) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        sent = 0
        for s in (s for s in shapes if len(s) > 1):
            (rows, high), (columns, wide) = _part(math.prod(s[:-1]), chunk), _part(s[-1], chunk)
            k = rows * columns * slots(density, high * wide)
            sent += k * itemsize + math.ceil(k * max(1, math.ceil(math.log2(high * wide))) / 8)
        return all_gather(sent, ranks) + _small(shapes, ranks)

    return nbytes


def _two_bits(density: float, chunk: int) -> Formula:
    def nbytes(shapes: Shapes, ranks: int) -> int:
        sent = 0
        for s in (s for s in shapes if len(s) > 1):
            rows, width = _part(math.prod(s), chunk)
            k = rows * slots(density, width)
            sent += math.ceil(k * (2 + max(1, math.ceil(math.log2(width)))) / 8) + 8
        return all_gather(sent, ranks) + _small(shapes, ranks)

    return nbytes


def _pair(times: int = 1) -> Formula:
    return lambda shapes, ranks: times * permute(4 * count(shapes), ranks)


def exchanges_until_all_heard(ranks: int, seed: int = 0) -> int:
    """Exchanges of `no_loco` after which what any rank held before any of the first three has reached every rank."""
    meetings, most = pairings(ranks), 1  # one rank sees its own in the step of an exchange
    for first in range(3):
        for source in range(ranks):
            heard, number = {source}, first
            while len(heard) < ranks:
                partners = meetings[int(draw(seed, jnp.int32(number), len(meetings)))]
                heard |= {partners[r] for r in heard}
                number += 1
            most = max(most, number - first)
    return most


ROWS = (
    Row(name="demo", make=lambda a: demo(0.25, a, decay=0.9, chunk=4), lossless=lambda a: demo(1.0, a, chunk=4),
        bytes=_frequencies(0.25, 4)),
    Row(name="demo, bfloat16", make=lambda a: demo(0.25, a, chunk=64, values_dtype=jnp.bfloat16),
        bytes=_frequencies(0.25, 64, 2)),
    Row(name="demo, sign", make=lambda a: demo(0.25, a, chunk=4, sign=True), bytes=_frequencies(0.25, 4)),
    Row(name="sparse_loco", identical=False, kind="parameter", bytes=_nothing, later=(1, _two_bits(0.25, 20)),
        make=lambda a: sparse_loco(SGD, optax.sgd(0.7, momentum=0.9), a, every=2, density=0.25, chunk=20), steps=5,
        lossless=lambda a: sparse_loco(SGD, optax.sgd(1.0), a, every=1, density=1, chunk=20, two_bits=False),
        reference=lambda a: optax.chain(mean(a), SGD), spreads=lambda ranks: 2,
        shared=lambda state: (state.anchor, state.outer)),
    Row(name="sparse_loco, every step", kind="parameter", bytes=_two_bits(0.25, 4096),
        make=lambda a: sparse_loco(SGD, optax.sgd(1.0), a, every=1, density=0.25), shared=lambda state: state.anchor),
    Row(name="no_loco", make=lambda a: no_loco(SGD, a, every=2), identical=False, kind="parameter", bytes=_nothing,
        later=(1, _pair()), spreads=lambda ranks: 2 * exchanges_until_all_heard(ranks), steps=5),
    Row(name="no_loco, pull", make=lambda a: no_loco(SGD, a, every=2, pull=0.3), identical=False, kind="parameter",
        bytes=_nothing, later=(1, _pair(2)), spreads=lambda ranks: 2 * exchanges_until_all_heard(ranks), steps=5),
)  # fmt: skip
