"""Rows of the table: rounds of local steps with an outer optimizer, and exchanges that are carried."""

from __future__ import annotations

from typing import Any

import optax

from jaxcross.exchange import mean
from jaxcross.exchange.blocks import width
from jaxcross.exchange.delayed_mean import delayed_mean
from jaxcross.exchange.diloco import diloco
from jaxcross.exchange.integers import BLOCK
from jaxcross.exchange.streaming_diloco import streaming_diloco
from tests.support.exchange_row import Formula, Row, Shapes, all_gather, all_reduce, count, padded

SGD = optax.sgd(0.1)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def _synchronous(*axes: str) -> optax.GradientTransformation:
    return optax.chain(mean(axes), SGD)


def _dense(shapes: Shapes, ranks: int) -> int:
    return sum(all_reduce(4 * width(shape, 1), ranks) for shape in shapes)


def _nothing(shapes: Shapes, ranks: int) -> int:
    return 0 * len(shapes) * ranks


def _slice(fragments: int, slices: int, bits: int = 32) -> Formula:
    """One slice of one fragment."""

    def nbytes(shapes: Shapes, ranks: int) -> int:
        elements = padded(-(-count(shapes) // fragments), slices * (BLOCK if bits < 32 else 1)) // slices
        if bits == 32:
            return all_reduce(4 * elements, ranks)
        return all_gather(elements * bits // 8 + 4 * elements // BLOCK, ranks)

    return nbytes


def _anchor(state: Any) -> Any:
    return state.anchor, state.outer, state.arrived


ROWS = (
    Row(name="delayed_mean", make=lambda a: delayed_mean(optax.sgd(0.1, momentum=0.9), a), bytes=_dense,
        spreads=lambda ranks: 2, shared=lambda state: state.inner),
    Row(name="diloco", make=lambda a: diloco(SGD, NESTEROV, a, every=2), reference=_synchronous, identical=False,
        lossless=lambda a: diloco(SGD, optax.sgd(1.0), a, every=1), kind="parameter", bytes=_nothing,
        later=(1, _dense), spreads=lambda ranks: 2, shared=lambda state: (state.anchor, state.outer)),
    Row(name="streaming_diloco", reference=_synchronous, identical=False, kind="parameter", steps=7, bytes=_nothing,
        make=lambda a: streaming_diloco(SGD, NESTEROV, a, every=4, fragments=2, delay=2),
        lossless=lambda a: streaming_diloco(SGD, optax.sgd(1.0), a, every=1, fragments=1, delay=0),
        later=(2, _slice(2, 2)), spreads=lambda ranks: 6, shared=_anchor),
    Row(name="streaming_diloco, 4 bits", identical=False, kind="parameter", steps=5, bytes=_nothing,
        make=lambda a: streaming_diloco(SGD, NESTEROV, a, every=4, fragments=2, delay=1, bits=4),
        later=(2, _slice(2, 1, 4)), spreads=lambda ranks: 5, shared=_anchor),
    Row(name="streaming_diloco, at once, 8 bits", identical=False, kind="parameter", bytes=_slice(3, 1, 8), steps=4,
        make=lambda a: streaming_diloco(SGD, NESTEROV, a, every=3, fragments=3, delay=0, bits=8),
        spreads=lambda ranks: 3, shared=_anchor),
)  # fmt: skip
