"""Over two axes, an exchange equals one over as many ranks along one axis, or is rejected."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import optax
import pytest

from jaxcross import exchange
from tests.support.exchange_row import Row
from tests.support.exchange_runs import assert_close, flat_ranks, ranks_of_gradients, stacked
from tests.support.exchange_table import TABLE, start, step_of
from tests.support.quick_compiler import OPTIONS

NODES = {"node": 2, "local": 2}
NAMES = tuple(NODES)
# Adasum gives each of two axes its own role; `test_adasum.py` tests that.
ROWS = [
    row for row in TABLE if list(row.axes(4)) == ["batch"] and not row.name.startswith("adasum")
]
# Their ranks send to ranks some hops away or own one part each, so they need a single rank order.
ORDERED = (
    "asynchronous",
    "federated_average",
    "gossip",
    "gtop_k",
    "lamb",
    "lars",
    "mean, ring",
    "mean, tree",
    "no_loco",
    "one_bit_adam",
    "sharded_optimizer",
    "sign_sgd",
)


def after_two_steps(row: Row, axes: dict[str, int], name: Any) -> Any:
    tx = row.make(name, sizes={name: 4}) if row.sized else row.make(name)
    carry = stacked(start(tx), 4)
    step = jax.jit(flat_ranks(step_of(tx), axes)).lower(carry, ranks_of_gradients(4, 0))
    made = step.compile(compiler_options=OPTIONS)
    for n in range(2):
        carry, _ = made(carry, ranks_of_gradients(4, n))
    return carry[0]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in ROWS if row.name.startswith(ORDERED)]
)
def test_one_axis_is_asked_for(row: Row) -> None:
    with pytest.raises(ValueError, match="must be a single axis"):
        after_two_steps(row, NODES, NAMES)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in ROWS if not row.name.startswith(ORDERED)]
)
def test_two_axes_as_one(row: Row) -> None:
    assert_close(
        after_two_steps(row, NODES, NAMES), after_two_steps(row, {"batch": 4}, "batch"), row.rtol
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: exchange.mean(("a", "a")),
        lambda: exchange.mean(["a", "b", "a"]),
        lambda: exchange.mean(("a", "a"), pattern="hierarchical"),
        lambda: exchange.top_k(0.1, ("a", "a"), pattern="hierarchical", inner_ranks=2),
        lambda: exchange.local_sgd(optax.sgd(0.1), ("a", "b", "a"), every=2),
        lambda: exchange.adasum(("a", "a")),
        lambda: exchange.adasum(("a", "b", "a")),
    ],
)
def test_duplicate_axis_is_rejected_on_construction(make: Any) -> None:
    """An axis named twice is rejected when the exchange is constructed."""
    with pytest.raises(
        ValueError, match=r"^`axes` of an exchange must name each axis once, got `\('a', .*'a'\)`"
    ):
        make()


def test_every_exchange_calls_its_axes_so() -> None:
    named = {
        name: set(inspect.signature(getattr(exchange, name)).parameters)
        for name in exchange.__all__
    }
    assert {name for name, found in named.items() if "axes" not in found} == {
        "accumulate",
        "finish",
    }
    others = {p for found in named.values() for p in found if "axis" in p}
    assert others == set(), "one spelling for one thing"


def test_sizes_are_left_to_the_step() -> None:
    """`crossover` takes axes with sizes under the same name; an exchange takes only names."""
    sized: Any = NODES
    with pytest.raises(
        ValueError,
        match=r"^`axes` of an exchange must be names only, got `\{'node': 2, 'local': 2\}`\. "
        r"Write `\('node', 'local'\)` here\. .* `axes` of `crossover`\.$",
    ):
        exchange.mean(sized)
