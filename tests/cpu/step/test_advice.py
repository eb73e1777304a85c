"""Advice, given once, on steps that are legal but rarely intended, with the fix; none on others."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from optax.contrib import sophia

from jaxcross.program import stages
from jaxcross.program.suspect_exchanges import own_derivatives
from jaxcross.program.trace import Traced, trace
from jaxcross.step.advice import advise
from jaxcross.testing import LocalRanks
from tests.support.zoo import ZOO, Row

AXES = {"batch": 2}
W, X = jnp.ones(3), jnp.ones((4, 3))
MASK, MICRO = jnp.ones(4), jnp.ones((5, 4, 3))


def traced(step: Any, *args: Any, **options: Any) -> Traced:
    return trace(step, args, axes=AXES, wire=LocalRanks(), **options)


@pytest.fixture
def advice_on(caplog: pytest.LogCaptureFixture) -> Any:
    def texts(found: Traced) -> list[str]:
        caplog.clear()
        while found.undecided is not None:
            found = found.decide(0)
        with caplog.at_level(logging.WARNING, "jaxcross"):
            warned: set[str] = set()
            for cut in ("whole", 2):  # compiled twice, advised once
                advise(found, stages.cut(found, cut), warned)
        return [text for text in caplog.messages if " exchanges inside a " not in text]

    return texts


def losses(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) ** 2


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(losses(w, x))


def masked(w: Any, x: Any, mask: Any) -> Any:
    return (mask * losses(w, x)).sum() / jnp.maximum(mask.sum(), 1)


def where(w: Any, x: Any, mask: Any) -> Any:
    return jnp.mean(losses(w, x), where=mask > 0)


def labelled(w: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(losses(w, x) * (mask != 0)) / jnp.sum(mask != 0)


def averaged(function: Any, w: Any, x: Any, mask: Any) -> Any:
    value, grads = jax.value_and_grad(function)(w, x, mask)
    return w - lax.pmean(grads, "batch"), value


def only_the_loss_averaged(function: Any, w: Any, x: Any, mask: Any) -> Any:
    return w, lax.pmean(function(w, x, mask), "batch")


def weighed(function: Any, w: Any, x: Any, mask: Any) -> Any:
    count, grads = mask.sum(), jax.grad(function)(w, x, mask)
    return w - lax.psum(count * grads, "batch") / lax.psum(count, "batch")


def weighed_by_means(function: Any, w: Any, x: Any, mask: Any) -> Any:
    count, grads = mask.sum(), jax.grad(function)(w, x, mask)
    return w - lax.pmean(count * grads, "batch") / lax.pmean(count, "batch")


def sums_first(_: Any, w: Any, x: Any, mask: Any) -> Any:
    grads = jax.grad(lambda w: (mask * losses(w, x)).sum())(w)
    return w - lax.psum(grads, "batch") / lax.psum(mask.sum(), "batch")


@pytest.mark.parametrize(
    "function", [masked, where, labelled, jax.jit(masked), jax.checkpoint(masked)]
)
@pytest.mark.parametrize("step", [averaged, only_the_loss_averaged])
def test_mean_of_means_is_reported(advice_on: Any, step: Any, function: Any) -> None:
    (text,) = advice_on(traced(partial(step, function), W, X, MASK))
    assert text.startswith(f"`{step.__name__}` divides a loss by a count of this rank's batch, at ")
    assert "test_advice.py" in text and "pass `weight=count` to the `update`" in text


@pytest.mark.parametrize("function", [masked, where])
@pytest.mark.parametrize("step", [weighed, weighed_by_means, sums_first])
def test_mean_over_all_examples_is_not_reported(advice_on: Any, step: Any, function: Any) -> None:
    assert advice_on(traced(partial(step, function), W, X, MASK)) == []


def test_mean_over_equal_batches_is_not_reported(advice_on: Any) -> None:
    assert advice_on(traced(partial(averaged, lambda w, x, _: loss(w, x)), W, X, MASK)) == []


def scanned(w: Any, xs: Any) -> Any:
    def body(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, lax.pmean(jax.grad(loss)(w, x), "batch")), None

    return w - 0.1 * lax.scan(body, jnp.zeros_like(w), xs)[0] / len(xs)


def looped(w: Any, xs: Any) -> Any:
    total = 0.0
    for x in xs:
        total += lax.pmean(jax.grad(loss)(w, x), "batch") / len(xs)
    return w - total


def behind_the_loop(w: Any, xs: Any) -> Any:
    total = lax.scan(lambda total, x: (total + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)[
        0
    ]
    return w - lax.pmean(total, "batch") / len(xs)


def step_by_step(w: Any, xs: Any) -> Any:
    return lax.scan(lambda w, x: (w - lax.pmean(jax.grad(loss)(w, x), "batch"), None), w, xs)[0]


@pytest.mark.parametrize("step", [scanned, looped])
def test_exchange_for_each_micro_batch_is_reported(advice_on: Any, step: Any) -> None:
    (text,) = advice_on(traced(step, W, MICRO))
    assert text.startswith(f"`{step.__name__}` exchanges 12 B of gradients 5 times per step, at ")
    assert "exchange the sum after the loop" in text and "and sends 48 B less." in text


def with_noise(w: Any, xs: Any) -> Any:
    """The noise scale needs the mean gradient of each micro-batch."""
    each = [lax.pmean(jax.grad(loss)(w, x), "batch") for x in xs]
    return w - 0.1 * sum(each), sum(jnp.sum(grads**2) for grads in each)


def harmonic(w: Any, xs: Any) -> Any:
    """Sums of reciprocals aren't reciprocals of sums."""
    return w - sum(1.0 / lax.pmean(jax.grad(loss)(w, x), "batch") for x in xs)


@pytest.mark.parametrize("step", [behind_the_loop, step_by_step, with_noise, harmonic])
def test_other_loops_over_micro_batches_are_not_reported(advice_on: Any, step: Any) -> None:
    """If each micro-batch updates the parameters, the next gradient needs the exchange."""
    assert advice_on(traced(step, W, MICRO)) == []


def searches(w: Any, state: Any, x: Any) -> Any:
    optimizer = optax.lbfgs()
    value, grads = lax.pmean(jax.value_and_grad(loss)(w, x), "batch")
    value_fn = lambda w: lax.pmean(loss(w, x), "batch")  # noqa: E731
    updates, state = optimizer.update(grads, state, w, value=value, grad=grads, value_fn=value_fn)
    return optax.apply_updates(w, updates), state


def estimates(w: Any, state: Any, x: Any) -> Any:
    grads = lax.pmean(jax.grad(loss)(w, x), "batch")
    updates, state = sophia(0.1).update(grads, state, w, obj_fn=lambda w: loss(w, x))
    return optax.apply_updates(w, updates), state


@pytest.mark.parametrize(
    ("step", "optimizer", "name"),
    [(searches, optax.lbfgs(), "optax.lbfgs"), (estimates, sophia(0.1), "optax.contrib.sophia")],
)
def test_optimizer_that_differentiates_is_reported(
    advice_on: Any, step: Any, optimizer: Any, name: str
) -> None:
    state = optimizer.init(W)
    (text,) = advice_on(traced(step, W, state, X))
    assert text.startswith(f"`{name}` in `{step.__name__}` differentiates the loss itself, at ")
    assert "test_advice.py" in text and "Make the whole step a `jax.shard_map(" in text
    spec = PartitionSpec
    specs = {"in_specs": (spec(), spec(), spec("batch")), "out_specs": spec()}
    inserted = jax.shard_map(step, mesh=AbstractMesh((2,), ("batch",)), **specs)
    found = traced(inserted, W, state, X)
    assert not list(own_derivatives(found.unflattened, AXES, found.wire))


def counting(state: Any, x: Any) -> Any:
    return {
        "n": state["n"] + jnp.float32(1),
        "w": lax.pmean(x.sum(0) + state["w"], "batch"),
    }, x.sum()


@pytest.mark.parametrize("count", [0, jnp.int32(0), np.int32(0)])
def test_state_whose_types_change_is_reported(advice_on: Any, count: Any) -> None:
    (text,) = advice_on(traced(counting, {"n": count, "w": W}, X, donate_argnums=(0,)))
    assert text.startswith("`counting` takes `args[0]['n']` as ")
    assert "and returns it as float32, so the next step is compiled again. " in text
    assert "`jnp.asarray(value, jnp.float32)`" in text


def test_state_whose_types_stay_is_not_reported(advice_on: Any) -> None:
    assert advice_on(traced(counting, {"n": jnp.float32(0), "w": W}, X, donate_argnums=(0,))) == []


def test_arguments_that_are_no_state_are_not_reported(advice_on: Any) -> None:
    assert advice_on(traced(lambda s, x: (s["n"] + 1, lax.pmean(x, "batch")), {"n": 0}, X)) == []
    narrow = {"w": W.astype(jnp.bfloat16)}
    assert (
        advice_on(
            traced(
                lambda p: jax.tree.map(lambda g: lax.pmean(g.astype(jnp.float32), "batch"), p),
                narrow,
            )
        )
        == []
    )
    assert (
        advice_on(
            traced(
                lambda w, rate: (w, lax.pmean(rate * w.sum(), "batch")), W, 0.1, donate_argnums=(0,)
            )
        )
        == []
    )


@pytest.mark.mostly_integration(
    "linen pmap-style", "dropout", "schedule, injected", "nnx functional"
)
@pytest.mark.parametrize("row", ZOO, ids=[row.name for row in ZOO])
def test_zoo_gets_no_advice(row: Row, advice_on: Any) -> None:
    step, state = row.build(2)
    found = trace(step, (state, row.batch(0, 0)), axes=row.axes(2), wire=LocalRanks())
    assert [
        text for text in advice_on(found) if " in every mini-step of `optax.MultiSteps`" not in text
    ] == []
