"""Axes in a list and leaves that aren't real floats are accepted as meant, or rejected by name."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross import exchange
from jaxcross.plan import JobCost, choose_compression
from jaxcross.testing import vmapped

SGD = optax.sgd(0.1)
AXES = {"node": 2, "local": 2}
OVER_SEVERAL: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "mean": exchange.mean,
    "mean, bfloat16": lambda axes: exchange.mean(axes, jnp.bfloat16),
    "mean, hierarchical": lambda axes: exchange.mean(axes, pattern="hierarchical"),
    "top_k": lambda axes: exchange.top_k(0.1, axes),
    "top_k, hierarchical": lambda axes: exchange.top_k(
        0.1, axes, pattern="hierarchical", inner_ranks=2
    ),
    "decoupled_momentum": lambda axes: exchange.decoupled_momentum(0.1, axes),
    "sparse_loco": lambda axes: exchange.sparse_loco(SGD, SGD, axes, every=1),
    "qsgd": lambda axes: exchange.qsgd(7, axes),
    "power_sgd": lambda axes: exchange.power_sgd(1, axes),
    "local_sgd": lambda axes: exchange.local_sgd(SGD, axes, every=1),
    "elastic_average": lambda axes: exchange.elastic_average(SGD, axes, every=1, alpha=0.1),
    "bounded_stale": lambda axes: exchange.bounded_stale(SGD, axes, staleness=1),
    "adasum": exchange.adasum,
}


@pytest.mark.mostly_integration(
    "mean", "mean, bfloat16", "local_sgd", "elastic_average", "bounded_stale"
)
@pytest.mark.parametrize("name", OVER_SEVERAL)
def test_axes_may_come_in_a_list(name: str) -> None:
    make, params = OVER_SEVERAL[name], jax.ShapeDtypeStruct((8, 6), jnp.float32)

    def traced(axes: Any) -> str:
        tx = make(axes)
        made = jax.make_jaxpr(lambda p: tx.update(p, tx.init(p), p), axis_env=list(AXES.items()))(
            params
        )
        return str(made)

    assert traced(list(AXES)) == traced(tuple(AXES))


def test_a_list_is_held_to_the_same_rules() -> None:
    with pytest.raises(
        ValueError, match=r"^`axes` of an exchange must name each axis once, got `\('a', 'a'\)`"
    ):
        exchange.mean(["a", "a"])
    with pytest.raises(
        ValueError,
        match=r"^`axes` of `sign_sgd` must be a single axis, got `\['a', 'b'\]`\. Name one",
    ):
        exchange.sign_sgd(["a", "b"])


@pytest.mark.parametrize("axes", ["batch", ("node", "local")])
def test_flat_top_k_rejects_inner_ranks(axes: Any) -> None:
    """A flat `top_k` rejects `inner_ranks`, since it doesn't use nodes."""
    with pytest.raises(
        ValueError, match=r'^`inner_ranks` of `top_k` is 8, but `pattern="flat"` has no nodes'
    ):
        exchange.top_k(0.01, axes, inner_ranks=8)


@pytest.mark.parametrize("delays", [True, [True, False], [[0, 1], [True, 2]]])
def test_a_delay_is_not_a_yes(delays: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^`delays` of `asynchronous` must be whole numbers of .*, got `.*True.*`"
    ):
        exchange.asynchronous(SGD, "batch", delays=delays)


federated = partial(exchange.federated_average, SGD, "batch", every=2)


def sparse_loco(**changed: Any) -> Any:
    return exchange.sparse_loco(SGD, SGD, "batch", **{"every": 2, **changed})


def no_loco(**changed: Any) -> Any:
    return exchange.no_loco(SGD, "batch", **{"every": 2, **changed})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: exchange.one_bit_adam(1, "batch", ranks=2, b1=1.0),
            r"^`b1` of `one_bit_adam` is a moment's decay .*, got `1.0`",
        ),
        (
            lambda: exchange.one_bit_adam(1, "batch", ranks=2, b2=-0.1),
            r"^`b2` of `one_bit_adam` is a moment's decay .*, got `-0.1`",
        ),
        (
            lambda: exchange.one_bit_adam(1, "batch", ranks=2, b2=math.nan),
            r"^`b2` of `one_bit_adam` is a moment's decay .*, got `nan`",
        ),
        (
            lambda: exchange.one_bit_adam(1, "batch", ranks=2, eps=0),
            r"^`eps` of `one_bit_adam` keeps a division .* above 0, got `0`",
        ),
        (
            lambda: exchange.power_sgd(1, "batch", min_ratio=math.nan),
            r"^`min_ratio` of `power_sgd` .*, got `nan`",
        ),
        (
            lambda: exchange.power_sgd(1, "batch", min_ratio=-1),
            r"^`min_ratio` of `power_sgd` .*, got `-1`",
        ),
        (
            lambda: exchange.top_k(True, "batch"),
            r"^`density` is the share of elements .*, got True",
        ),
        (
            lambda: exchange.gtop_k(True, "batch"),
            r"^`density` is the share of elements .*, got True",
        ),
        (
            lambda: exchange.top_k("0.1", "batch"),
            r"^`density` is the share of elements that are sent .*, got '0\.1'",
        ),
        (
            lambda: exchange.top_k(np.True_, "batch"),
            r"^`density` is the share of elements that are sent .*, got np\.True_",
        ),
        (
            lambda: exchange.gtop_k(None, "batch"),
            r"^`density` is the share of elements that are sent .*, got None",
        ),
        (
            lambda: exchange.top_k(optax.linear_schedule(1, 0.1, 5), "batch"),
            r"(?s)^`density` is .*, got <.* use `warm_up` of",
        ),
        (
            lambda: exchange.top_k(0.1, "batch", warm_up=0.5),
            r"^`warm_up` of `top_k` must be a list of pairs of a step and .*, got 0\.5",
        ),
        (
            lambda: exchange.top_k(0.1, "batch", warm_up=[(1,)]),
            r"^`warm_up` of `top_k` must be a list of pairs .*, got \[\(1,\)\]",
        ),
        (
            lambda: exchange.top_k(0.1, "batch", warm_up=[(1.5, 0.2)]),
            r"^`step` of a pair in `warm_up` of `top_k` must be a .*, got `1\.5`",
        ),
        (
            lambda: exchange.mean(()),
            r"^`axes` of an exchange must contain at least one name, got `\(\)`: without any axis",
        ),
        (
            lambda: exchange.local_sgd(optax.sgd(1.0), [], every=1),
            r"^`axes` of an exchange must contain .*, got `\[\]`: without any axis",
        ),
        (
            lambda: exchange.mean(0),
            r"^`axes` of an exchange must be names, got `\(0,\)`: to JAX, a number is a",
        ),
        (
            lambda: exchange.one_bit_adam(1, "batch", ranks=2, b1="0.9"),
            r"^`b1` of `one_bit_adam` is a .*, got `'0\.9'`",
        ),
        (
            lambda: exchange.power_sgd(1, "batch", min_ratio=None),
            r"^`min_ratio` of `power_sgd` is .*, got `None`",
        ),
        (
            lambda: exchange.elastic_average(SGD, "batch", every=1, alpha="1"),
            r"^`alpha` of .* must be a fraction of a .*, got `'1'`",
        ),
        (
            lambda: exchange.elastic_average(SGD, "batch", every=1, alpha=0.1, beta=True),
            r"^`beta` of .* must be .*, got `True`",
        ),
        (
            lambda: federated(participation=None),
            r"^`participation` of `federated_average` must be a fraction .*, got `None`",
        ),
        (
            lambda: federated(weights=2.0),
            r"^`weights` of `federated_average` must be one number per rank.*, got `2\.0`",
        ),
        (
            lambda: federated(weights=[1, "2"]),
            r"^`weights` of `federated_average` must be one .*, got `\[1, '2'\]`",
        ),
        (
            lambda: exchange.decoupled_momentum(0, "batch"),
            r"^`density` is the share of elements that are sent .*, got 0\.",
        ),
        (
            lambda: exchange.decoupled_momentum(0.1, "batch", decay=1.1),
            r"^`decay` of `decoupled_momentum` is the part of the momentum .*, got `1\.1`",
        ),
        (
            lambda: exchange.decoupled_momentum(0.1, "batch", chunk=0),
            r"^`chunk` of `decoupled_momentum` must be a whole number, 1 or more, got `0`",
        ),
        (
            lambda: exchange.decoupled_momentum(0.1, "batch", wire_dtype=jnp.int8),
            r"^`wire_dtype` must be a floating-point type, .*, got int8",
        ),
        (
            lambda: sparse_loco(every=0),
            r"^`every` of `sparse_loco` must be a whole number, 1 or more, got `0`",
        ),
        (
            lambda: sparse_loco(density=2),
            r"^`density` is the share of elements that are sent .*, got 2\.",
        ),
        (
            lambda: sparse_loco(decay=-1),
            r"^`decay` of `sparse_loco` is the part of the residual that is kept.*, got `-1`",
        ),
        (
            lambda: sparse_loco(bits=8),
            r"^`bits` of `sparse_loco` is the number .* and must be 2 or 32, got `8`\.$",
        ),
        (
            lambda: sparse_loco(bits="no"),
            r"^`bits` of `sparse_loco` is the number .* and must be 2 or 32, got `'no'`\.$",
        ),
        (
            lambda: sparse_loco(bits=True),
            r"^`bits` of `sparse_loco` is the number .* and must be 2 or 32, got `True`\.$",
        ),
        (
            lambda: sparse_loco(chunk=1.5),
            r"^`chunk` of `sparse_loco` must be a whole number, 1 or more, got `1\.5`",
        ),
        (
            lambda: no_loco(every=0),
            r"^`every` of `no_loco` must be a whole number, 1 or more, got `0`",
        ),
        (lambda: no_loco(rate=0), r"^`rate` of `no_loco` must be a number above 0, got `0`\.$"),
        (
            lambda: no_loco(momentum=1),
            r"^`momentum` of `no_loco` must be a number from 0 and below 1, got `1`\.$",
        ),
        (
            lambda: no_loco(pull=-0.1),
            r"^`pull` of `no_loco` must be a number from 0, got `-0\.1`\.$",
        ),
        (
            lambda: no_loco(seed=0.5),
            r"^`seed` of `no_loco` must be a whole number, 0 or more, got `0\.5`",
        ),
        (
            lambda: exchange.accumulate(SGD, every=2**31),
            (
                r"^`every` of `accumulate` must be at most 2147483647, as counters have 32 bits, "
                r"got 2147483648\.$"
            ),
        ),
        (
            lambda: exchange.top_k(0.1, "batch", warm_up=[(1, True)]),
            r"^each density in `warm_up` is the share of elements .*, got True",
        ),
    ],
)
def test_out_of_range_numbers_are_rejected_early(make: Callable[[], Any], message: str) -> None:
    """Out-of-range numbers are rejected when the exchange is constructed."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.integration
def test_numbers_may_be_numpys_and_jaxs() -> None:
    """Numbers may even be JAX's inside a step, where computing with them would be traced."""
    grads = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    for number in (np.float32(0.5), np.asarray(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)):
        for tx in (
            federated(participation=number, weights=[number, 2]),
            federated(weights=jnp.asarray([100, 200])),
            exchange.elastic_average(SGD, "batch", every=1, alpha=number),
            exchange.power_sgd(1, "batch", min_ratio=number),
            exchange.one_bit_adam(1, "batch", ranks=2, b1=number),
            exchange.top_k(number, "batch", warm_up=[(3, number)]),
            exchange.gtop_k(number, "batch"),
            exchange.decoupled_momentum(number, "batch", decay=number),
            sparse_loco(density=number, decay=number),
            no_loco(rate=number, momentum=number, pull=number),
        ):
            state = jax.eval_shape(tx.init, grads)
            found = jax.make_jaxpr(tx.update, axis_env=[("batch", 2)], return_shape=True)(
                grads, state, grads
            )[1]
            assert found == (grads, state)


AROUND: dict[str, Callable[[Any], Any]] = {
    "local_sgd": lambda inner: exchange.local_sgd(inner, "batch", every=2),
    "federated_average": lambda inner: exchange.federated_average(inner, "batch", every=2),
    "elastic_average": lambda inner: exchange.elastic_average(inner, "batch", every=2, alpha=0.1),
    "gossip": lambda inner: exchange.gossip(inner, "batch"),
    "sparse_loco": lambda inner: exchange.sparse_loco(inner, SGD, "batch", every=2),
    "no_loco": lambda inner: exchange.no_loco(inner, "batch", every=2),
    "sharded_optimizer": lambda inner: exchange.sharded_optimizer(inner, "batch"),
    "bounded_stale": lambda inner: exchange.bounded_stale(inner, "batch", staleness=1),
    "asynchronous": lambda inner: exchange.asynchronous(inner, "batch", delays=1),
    "adasum": lambda inner: exchange.adasum("batch", inner),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("inner", [0.1, optax.sgd])
def test_what_is_no_optimizer_is_refused(name: str, inner: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^the optimizer of `{name}` must be an optax optimizer, .*, got `"
    ):
        AROUND[name](inner)


NODES = partial(exchange.top_k, 0.1, list(AXES), pattern="hierarchical")
BITS = partial(exchange.one_bit_adam, 1, "node", block=8)
LOW = partial(exchange.power_sgd, axes="node", min_ratio=0)
WIDE, NARROW = jnp.ones((6, 10)), jnp.ones((6, 9))
# The exchange, the one whose state it receives, the latter's parameters, and where shapes differ.
OTHERS: dict[str, tuple[Any, Any, jax.Array, str]] = {
    "top_k": (
        NODES(inner_ranks=2),
        NODES(inner_ranks=4),
        WIDE,
        r"\[15\] at `\.residual`, but must be \[30\] here",
    ),
    "one_bit_adam": (
        BITS(ranks=2),
        BITS(ranks=4),
        WIDE,
        r"\[16\] at `\.server_residual`, but must be \[32\] here",
    ),
    "decoupled_momentum": (
        exchange.decoupled_momentum(0.1, "node"),
        exchange.decoupled_momentum(0.1, "node", chunk=4),
        WIDE,
        r"\[6, 12\] at `\.momentum`, but must be \[1, 60\] here",
    ),
    "gtop_k": (
        *[exchange.gtop_k(0.1, "node")] * 2,
        NARROW,
        r"\[54\] at `\.residual`, but must be \[60\] here",
    ),
    "power_sgd, of another rank": (
        LOW(1),
        LOW(2),
        WIDE,
        r"\[10, 2\] at `\.factor`, but must be \[10, 1\] here",
    ),
    "power_sgd": (
        *[exchange.power_sgd(1, "node")] * 2,
        NARROW,
        r"\[9, 1\] at `\.factor`, but must be \[10, 1\] here",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_other_shapes_is_refused(name: str) -> None:
    tx, other, params, where = OTHERS[name]
    step = vmapped(lambda g: tx.update(g, other.init(params)), AXES)
    with pytest.raises(ValueError, match=rf"^the state of `{name.split(',')[0]}` is {where}"):
        jax.eval_shape(step, jnp.ones((2, 2, *WIDE.shape)))


@pytest.mark.parametrize("make", [exchange.top_k, exchange.gtop_k, exchange.decoupled_momentum])
def test_optimizer_that_compresses_nothing_warns_once(make: Any) -> None:
    tx, grads = optax.flatten(make(0.1, "batch")), {"w": jnp.ones((4, 6)), "b": jnp.ones(4)}
    with pytest.warns(
        UserWarning,
        match="^`(g?top_k|decoupled_momentum)` compresses none of these parameters: vectors",
    ):
        state = tx.init(grads)
    jax.make_jaxpr(tx.update, axis_env=[("batch", 2)])(
        grads, state
    )  # this suite turns warnings into errors


def test_no_warning_if_compression_is_partial_or_off() -> None:
    """No warning is given if something is compressed or the user asked for no compression."""
    exchange.top_k(0.1, "batch").init({"w": jnp.ones((4, 6)), "b": jnp.ones(4)})
    exchange.top_k(0.1, "batch").init(
        {"s": jnp.ones(()), "n": jnp.ones(3, jnp.int32), "e": jnp.ones(0)}
    )
    exchange.top_k(0.1, "batch", skip=lambda path, leaf: True).init(jnp.ones(5))
    optax.flatten(exchange.top_k(0.1, "batch", skip=lambda path, leaf: False)).init(jnp.ones(5))
    cost = JobCost(name="a", compute_s=1.0, exchange_s=2.0, params=jnp.ones(5))
    choose_compression(1.0, [cost], "batch", ranks=2)


FLOAT32: dict[str, tuple[str, optax.GradientTransformation]] = {
    "top_k": ("the values of `top_k`", exchange.top_k(0.5, "batch")),
    "gtop_k": ("the values of `gtop_k`", exchange.gtop_k(0.5, "batch")),
    "decoupled_momentum": (
        "the momenta of `decoupled_momentum`",
        exchange.decoupled_momentum(0.5, "batch"),
    ),
    "power_sgd": ("the factors of `power_sgd`", exchange.power_sgd(1, "batch")),
    "qsgd": ("the levels of `qsgd`", exchange.qsgd(7, "batch")),
    "one_bit_adam": ("the moments of `one_bit_adam`", exchange.one_bit_adam(5, "batch", ranks=2)),
}


@pytest.mark.mostly_integration("gtop_k", "power_sgd", "qsgd", "one_bit_adam")
@pytest.mark.parametrize("name", FLOAT32)
def test_float64_is_not_cut(name: str) -> None:
    what, tx = FLOAT32[name]
    step = vmapped(lambda g: tx.update(g, tx.init(g))[0], {"batch": 2})
    with jax.enable_x64(True):
        grads = {"w": jnp.ones((2, 4, 6), jnp.float64)}
        with pytest.raises(
            ValueError,
            match=rf"^the update `\['w'\]` is float64, but {what} are float32 and would round it",
        ):
            jax.eval_shape(step, grads)
        narrow = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        assert jax.eval_shape(step, narrow)["w"].dtype == jnp.float32


@pytest.mark.integration
def test_votes_of_float64_are_its_signs() -> None:
    tx = exchange.sign_sgd("batch")
    with jax.enable_x64(True):
        grads = jnp.asarray([[-1e-300, 1e300, -0.0], [-1.0, 1.0, 1.0]], jnp.float64)
        updates = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="batch")(grads)
        assert updates.dtype == jnp.float64 and updates.tolist() == [[-1, 1, 1]] * 2


REAL: dict[str, tuple[str, optax.GradientTransformation]] = {
    "qsgd": ("the levels of `qsgd`", exchange.qsgd(7, "batch")),
    "sign_sgd": ("the votes of `sign_sgd`", exchange.sign_sgd("batch")),
    "one_bit_adam": ("the moments of `one_bit_adam`", exchange.one_bit_adam(5, "batch", ranks=2)),
    "adasum": ("Adasum's dot products", exchange.adasum("batch")),
}


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
@pytest.mark.parametrize("name", REAL)
def test_what_is_no_real_float_is_refused_by_its_name(name: str, dtype: Any) -> None:
    what, tx = REAL[name]
    grads = {"w": jnp.ones((2, 3)), "n": jnp.ones((2, 3), dtype)}
    step = vmapped(lambda g: tx.update(g, tx.init(g)), {"batch": 2})
    kind = jnp.dtype(dtype).name
    with pytest.raises(
        ValueError,
        match=rf"^the update `\['n'\]` is {kind}, but {what} need real floating-point leaves\.",
    ):
        jax.eval_shape(step, grads)


@pytest.mark.parametrize("name", REAL)
def test_without_them_the_others_are_exchanged(name: str) -> None:
    tx = optax.masked(
        REAL[name][1],
        lambda tree: jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), tree),
    )
    grads = {"w": jnp.ones((2, 3)), "n": jnp.ones((2, 3), jnp.int32)}
    step = vmapped(lambda g: tx.update(g, tx.init(g))[0], {"batch": 2})
    assert jax.eval_shape(step, grads)["w"].shape == (2, 3)
