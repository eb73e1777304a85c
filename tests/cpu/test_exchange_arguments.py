"""Axes in a list, leaves that are no real floats: taken as they are meant, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross import exchange
from jaxcross.testing_wire import vmapped

SGD = optax.sgd(0.1)
AXES = {"node": 2, "local": 2}
OVER_SEVERAL: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "mean": exchange.mean,
    "mean, bfloat16": lambda axes: exchange.mean(axes, jnp.bfloat16),
    "mean, hierarchical": lambda axes: exchange.mean(axes, pattern="hierarchical"),
    "top_k": lambda axes: exchange.top_k(0.1, axes),
    "top_k, hierarchical": lambda axes: exchange.top_k(0.1, axes, pattern="hierarchical", local_size=2),
    "qsgd": lambda axes: exchange.qsgd(7, axes),
    "power_sgd": lambda axes: exchange.power_sgd(1, axes),
    "local_sgd": lambda axes: exchange.local_sgd(SGD, axes, every=1),
    "elastic_average": lambda axes: exchange.elastic_average(SGD, axes, every=1, alpha=0.1),
    "bounded_stale": lambda axes: exchange.bounded_stale(SGD, axes, bound=1),
    "adasum": lambda axes: exchange.adasum(axes[:1], inner_axis=axes[1:]),
}


@pytest.mark.parametrize("name", OVER_SEVERAL)
def test_axes_may_come_in_a_list(name: str) -> None:
    make, params = OVER_SEVERAL[name], jax.ShapeDtypeStruct((8, 6), jnp.float32)

    def traced(axes: Any) -> str:
        tx = make(axes)
        made = jax.make_jaxpr(lambda p: tx.update(p, tx.init(p), p), axis_env=list(AXES.items()))(params)
        return str(made)

    assert traced(list(AXES)) == traced(tuple(AXES))


def test_a_list_is_held_to_the_same_rules() -> None:
    with pytest.raises(ValueError, match=r"^the axes of an exchange are `\('a', 'a'\)`, one of them twice"):
        exchange.mean(["a", "a"])
    with pytest.raises(ValueError, match=r"^`axis_name` of `sign_sgd` is `\['a', 'b'\]`: its hops need one axis"):
        exchange.sign_sgd(["a", "b"])


@pytest.mark.parametrize("axes", ["batch", ("node", "local")])
def test_nodes_that_a_flat_top_k_would_not_see_are_refused(axes: Any) -> None:
    with pytest.raises(ValueError, match=r'^`local_size` of `top_k` is 8, but `pattern="flat"` knows no nodes'):
        exchange.top_k(0.01, axes, local_size=8)


@pytest.mark.parametrize("delays", [True, [True, False], [[0, 1], [True, 2]]])
def test_a_delay_is_not_a_yes(delays: Any) -> None:
    with pytest.raises(ValueError, match=r"^`delays` of `asynchronous` are `.*True.*`: they are whole numbers"):
        exchange.asynchronous(SGD, "batch", delays=delays)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: exchange.one_bit_adam(1, "batch", ranks=2, b1=1.0),
            r"^`b1` of `one_bit_adam` is `1.0`: it is a moment",
        ),
        (lambda: exchange.one_bit_adam(1, "batch", ranks=2, b2=-0.1), r"^`b2` of `one_bit_adam` is `-0.1`: it is a"),
        (lambda: exchange.one_bit_adam(1, "batch", ranks=2, b2=math.nan), r"^`b2` of `one_bit_adam` is `nan`: it is a"),
        (lambda: exchange.one_bit_adam(1, "batch", ranks=2, eps=0), r"^`eps` of `one_bit_adam` is `0`: it keeps a"),
        (lambda: exchange.power_sgd(1, "batch", min_ratio=math.nan), r"^`min_ratio` of `power_sgd` is `nan`: it is"),
        (lambda: exchange.power_sgd(1, "batch", min_ratio=-1), r"^`min_ratio` of `power_sgd` is `-1`: it is"),
        (lambda: exchange.top_k(True, "batch"), r"^`density` is True: it is the share of elements"),
        (lambda: exchange.gtop_k(True, "batch"), r"^`density` is True: it is the share of elements"),
        (lambda: exchange.top_k("0.1", "batch"), r"^`density` is '0\.1': it is the share of elements that are sent"),
        (lambda: exchange.top_k(np.True_, "batch"), r"^`density` is np\.True_: it is the share of elements that are"),
        (lambda: exchange.gtop_k(None, "batch"), r"^`density` is None: it is the share of elements that are sent"),
        (lambda: exchange.top_k(optax.linear_schedule(1, 0.1, 5), "batch"), r"(?s)^`density` is <.* is a `warm_up` of"),
        (lambda: exchange.top_k(0.1, "batch", warm_up=0.5), r"^`warm_up` is 0\.5: it is a list of pairs of a step and"),
        (lambda: exchange.top_k(0.1, "batch", warm_up=[(1,)]), r"^`warm_up` is \[\(1,\)\]: it is a list of pairs"),
        (lambda: exchange.top_k(0.1, "batch", warm_up=[(1.5, 0.2)]), r"^`warm_up` of `top_k`, .* step, is `1\.5`: it "),
        (lambda: exchange.mean(()), r"^the axes of an exchange are `\(\)`: over none nothing is exchanged"),
        (lambda: exchange.local_sgd(optax.sgd(1.0), [], every=1), r"^the axes of an exchange are `\[\]`: over none"),
        (lambda: exchange.top_k(0.1, "batch", warm_up=[(1, True)]), r"^`warm_up` is True: it is the share of elements"),
    ],
)
def test_numbers_out_of_range_are_refused_when_it_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


FLOAT32: dict[str, tuple[str, optax.GradientTransformation]] = {
    "top_k": ("the values of `top_k`", exchange.top_k(0.5, "batch")),
    "gtop_k": ("the values of `gtop_k`", exchange.gtop_k(0.5, "batch")),
    "power_sgd": ("the factors of `power_sgd`", exchange.power_sgd(1, "batch")),
    "qsgd": ("the levels of `qsgd`", exchange.qsgd(7, "batch")),
    "one_bit_adam": ("the moments of `one_bit_adam`", exchange.one_bit_adam(5, "batch", ranks=2)),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_float64_is_not_cut(name: str) -> None:
    what, tx = FLOAT32[name]
    step = vmapped(lambda g: tx.update(g, tx.init(g))[0], {"batch": 2})
    with jax.enable_x64(True):
        grads = {"w": jnp.ones((2, 4, 6), jnp.float64)}
        with pytest.raises(ValueError, match=rf"^the update `\['w'\]` is float64: {what} are float32 and would cut it"):
            jax.eval_shape(step, grads)
        narrow = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        assert jax.eval_shape(step, narrow)["w"].dtype == jnp.float32


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
    with pytest.raises(ValueError, match=rf"^the update `\['n'\]` is {kind}: {what} need real floating-point leaves\."):
        jax.eval_shape(step, grads)


@pytest.mark.parametrize("name", REAL)
def test_without_them_the_others_are_exchanged(name: str) -> None:
    tx = optax.masked(REAL[name][1], lambda tree: jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), tree))
    grads = {"w": jnp.ones((2, 3)), "n": jnp.ones((2, 3), jnp.int32)}
    step = vmapped(lambda g: tx.update(g, tx.init(g))[0], {"batch": 2})
    assert jax.eval_shape(step, grads)["w"].shape == (2, 3)
