"""Applying two strategies to one leaf is rejected during tracing."""

import gc

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxcross._tracing import current_tracing, tracing
from jaxcross.exchange import (
    adasum,
    bounded_stale,
    lars,
    local_sgd,
    mean,
    qsgd,
    sharded_optimizer,
    top_k,
)
from jaxcross.testing import vmapped
from tests.support.exchange_row import Row
from tests.support.exchange_table import TABLE

LEAVES = {"kernel": jnp.ones((4, 3)), "other": jnp.ones((4, 2))}
MASK = {"kernel": True, "other": True}
OTHER = {"kernel": False, "other": True}
AXES = {"node": 2, "local": 2}


def on_ranks(axes):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*axes.values(), *x.shape)), LEAVES)


def traced(exchange, axes):
    """Traces one update on all ranks."""

    def step(updates):
        params = jax.tree.map(jnp.zeros_like, updates)
        return exchange.update(updates, exchange.init(params), params)[0]

    jax.eval_shape(vmapped(step, axes), on_ranks(axes))


def test_overlapping_masks_error_names_leaf_and_both():
    mixed = optax.chain(optax.masked(top_k(0.5, "batch"), MASK), optax.masked(mean("batch"), OTHER))
    message = (
        r"^`mean` is given the leaf `\['other'\]`, "
        r"which `top_k` has exchanged over `batch` already\. "
    )
    with pytest.raises(ValueError, match=message):
        traced(mixed, {"batch": 4})


def test_masks_that_part_the_leaves_are_not_refused():
    kernel = {"kernel": True, "other": False}
    parted = optax.chain(
        optax.masked(top_k(0.5, "batch"), kernel), optax.masked(mean("batch"), OTHER)
    )
    traced(parted, {"batch": 4})


def rows(*arithmetic: str):
    """Returns all rows except those whose norms or optimizer compute something on that side."""
    return pytest.mark.parametrize(
        "row", [r for r in TABLE if r.name not in arithmetic], ids=lambda row: row.name
    )


# `accumulate` adds up gradients before their exchange and returns the result of a conditional, so
# it computes something on both sides.
CONDITIONAL = ("accumulate", "accumulate, top_k")


@pytest.mark.mostly_integration(
    "mean", "mean, bfloat16", "power_sgd", "gossip, torus", "delayed_mean"
)
@rows("lars, shared norms", "lamb, shared norms", *CONDITIONAL)
def test_no_strategy_may_precede_another_on_its_axes(row: Row):
    axes = row.axes(4)
    with pytest.raises(
        ValueError,
        match=r"^`mean` is given the leaf .* already\. A leaf may be exchanged only once",
    ):
        traced(optax.chain(row.made(4), mean(tuple(axes))), axes)


@rows(*(row.name for row in TABLE if row.kind == "delta"), *CONDITIONAL)
def test_no_strategy_follows_another_over_its_axes(row: Row):
    axes = row.axes(4)
    with pytest.raises(
        ValueError,
        match=r"which `mean` has exchanged over .* already\. A leaf may be exchanged only once",
    ):
        traced(optax.chain(mean(tuple(axes)), row.made(4)), axes)


def test_valid_chains_of_exchanges_are_accepted():
    """One axis after another, norms after a mean, and arithmetic in between are all accepted."""
    traced(optax.chain(mean("local"), top_k(0.5, "node")), AXES)
    traced(optax.chain(mean("node"), lars("node", 0.1)), AXES)
    traced(optax.chain(mean("node"), optax.scale(2.0), mean("node")), AXES)


def test_same_gradients_may_be_exchanged_in_two_ways():
    one, two = mean("batch"), qsgd(15, "batch")

    def step(updates):
        first, _ = one.update(updates, one.init(updates))
        second, _ = two.update(updates, two.init(updates))
        return first, second

    jax.eval_shape(vmapped(step, {"batch": 4}), on_ranks({"batch": 4}))


@pytest.mark.integration
def test_nothing_is_kept():
    with tracing() as trace:
        out, _ = jax.vmap(mean("batch").update, axis_name="batch")(
            on_ranks({"batch": 4}), optax.EmptyState()
        )
        gc.collect()
        assert not trace._exchanged  # holds tracers, which are gone after the `vmap`
    assert current_tracing() is None and out is not None


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("mean", lambda tx: local_sgd(tx, "batch", every=1)),
        ("top_k", lambda tx: adasum("batch", optimizer=tx)),
        ("mean", lambda tx: bounded_stale(tx, "batch", staleness=1)),
        ("mean", lambda tx: sharded_optimizer(tx, "batch")),
    ],
)
def test_exchange_nested_in_an_optimizer_is_rejected(inner, outer):
    exchange = {"mean": mean("batch"), "top_k": top_k(0.5, "batch")}[inner]
    nested = outer(optax.chain(exchange, optax.sgd(0.1)))
    message = (
        rf"^`{inner}` is inside the optimizer of `\w+`, and both exchange over `batch`\. "
        "A leaf may be exchanged only once"
    )
    with pytest.raises(ValueError, match=message):
        traced(nested, {"batch": 4})
    # The failure leaves nothing behind, and the two may be combined over different axes.
    traced(outer(optax.sgd(0.1)), {"batch": 4})
    for axes in ("node", ("node", "local")):
        traced(local_sgd(optax.chain(mean("local"), optax.sgd(0.1)), axes, every=1), AXES)
