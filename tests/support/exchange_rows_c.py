"""Rows of the table: rounds of local steps with an outer optimizer, and exchanges that are carried."""

from __future__ import annotations

import optax

from jaxcross.exchange import mean
from jaxcross.exchange.blocks import width
from jaxcross.exchange.diloco import diloco
from tests.support.exchange_row import Row, Shapes, all_reduce

SGD = optax.sgd(0.1)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def _synchronous(*axes: str) -> optax.GradientTransformation:
    return optax.chain(mean(axes), SGD)


def _dense(shapes: Shapes, ranks: int) -> int:
    return sum(all_reduce(4 * width(shape, 1), ranks) for shape in shapes)


def _nothing(shapes: Shapes, ranks: int) -> int:
    return 0 * len(shapes) * ranks


ROWS = (
    Row(name="diloco", make=lambda a: diloco(SGD, NESTEROV, a, every=2), reference=_synchronous, identical=False,
        lossless=lambda a: diloco(SGD, optax.sgd(1.0), a, every=1), kind="parameter", bytes=_nothing,
        later=(1, _dense), spreads=lambda ranks: 2, shared=lambda state: (state.anchor, state.outer)),
)  # fmt: skip
