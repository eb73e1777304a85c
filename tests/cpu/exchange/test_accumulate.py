"""Gradient accumulation: one optimizer step and one exchange per group of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.exchange import accumulate, local_sgd, mean, one_bit_adam, top_k
from jaxcross.program import stages
from jaxcross.program.suspect_exchanges import repeated_exchanges
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide

RANKS, EVERY = 3, 4
AXES = {"batch": RANKS}
PARAMS = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4), "b": np.ones(4, np.float32)}


def gradients(step: int) -> Any:
    """Returns the gradients of all ranks, different on each rank."""
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: rng.normal(size=(RANKS, *p.shape)).astype(p.dtype), PARAMS)


def trained(
    tx: Any, steps: int, change: Callable[[int, Any], Any] = lambda n, grads: grads
) -> list[Any]:
    """Returns all ranks' (parameters, state, updates) after each step, under `vmap`."""
    everywhere = jax.tree.map(lambda p: np.stack([p] * RANKS), PARAMS)

    @jax.jit
    @lambda f: jax.vmap(f, axis_name="batch")
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    carry, history = (everywhere, jax.vmap(tx.init)(everywhere)), []
    for n in range(steps):
        params, state, updates = jax.tree.map(
            np.asarray, step(change(n, gradients(n)), carry[1], carry[0])
        )
        carry = params, state
        history.append((params, state, updates))
    return history


def means_of(tx: Any, steps: int) -> list[Any]:
    """Does the same for `tx` alone, which gets the mean of every `EVERY` gradients."""

    def averaged(n: int, grads: Any) -> Any:
        del grads
        parts = [gradients(n * EVERY + i) for i in range(EVERY)]
        return jax.tree.map(lambda *g: sum(g) / np.float32(EVERY), *parts)

    return trained(tx, steps // EVERY, averaged)


def close(got: Any, want: Any, rtol: float = 2e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, want)


INNER = {
    "mean, adam": lambda: optax.chain(mean("batch"), optax.adam(0.1)),
    "mean, clipping, schedule": lambda: optax.chain(
        mean("batch"),
        optax.clip_by_global_norm(0.5),
        optax.sgd(optax.linear_schedule(0.1, 0.01, 3)),
    ),
    "top_k": lambda: optax.chain(top_k(0.25, "batch"), optax.sgd(0.1)),
    "one_bit_adam": lambda: optax.chain(
        one_bit_adam(1, "batch", ranks=RANKS, block=8), optax.scale(-0.1)
    ),
    "local_sgd": lambda: local_sgd(optax.sgd(0.1), "batch", every=2),
}


@pytest.mark.integration
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_accumulate_equals_its_optimizer_on_the_means(make: Callable[[], Any]) -> None:
    """In between, updates are zero, and neither parameters nor optimizer state change."""
    steps = 3 * EVERY
    got, want = trained(accumulate(make(), every=EVERY), steps), means_of(make(), steps)
    before = jax.tree.map(lambda p: np.stack([p] * RANKS), PARAMS), jax.vmap(make().init)(got[0][0])
    for n, (params, state, updates) in enumerate(got):
        if (n + 1) % EVERY:
            assert not any(u.any() for u in jax.tree.leaves(updates))
            jax.tree.map(np.testing.assert_array_equal, (params, state.inner), before)
        else:
            close((params, state.inner), want[n // EVERY][:2], 1e-5)
            assert not any(t.any() for t in jax.tree.leaves(state.total))
            before = params, state.inner


@pytest.mark.integration
def test_accumulate_equals_multi_steps() -> None:
    tx = INNER["mean, adam"]()
    got, want = trained(accumulate(tx, every=EVERY), 9), trained(optax.MultiSteps(tx, EVERY), 9)
    for (params, _, updates), (expected, _, others) in zip(got, want, strict=True):
        close((params, updates), (expected, others), 1e-5)


@pytest.mark.integration
def test_accumulate_of_every_gradient_is_its_optimizer() -> None:
    tx = INNER["mean, adam"]()
    got, want = trained(accumulate(tx, every=1), 3), trained(tx, 3)
    for (params, state, updates), (*expected, others) in zip(got, want, strict=True):
        jax.tree.map(
            np.testing.assert_array_equal, (params, state.inner, updates), (*expected, others)
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_spoils_one_step(bad: float) -> None:
    """The non-finite value shows up in that step only.

    The next sum starts from zero, which `(1 - emit) * total` wouldn't ensure.
    """

    def spoil(n: int, grads: Any) -> Any:
        if n == 1:
            grads["w"][2, 0, 0] = bad
        return grads

    history = trained(accumulate(optax.chain(mean("batch"), optax.sgd(0.1)), every=2), 4, spoil)
    assert not np.isfinite(history[1][2]["w"][:, 0, 0]).any()
    assert np.isfinite(history[3][2]["w"]).all()


@pytest.mark.integration
def test_updates_and_sums_have_types_of_their_own() -> None:
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)

    def wider(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u: u.astype(jnp.float32), updates)

    for dtype, expected in ((None, "float32"), (jnp.bfloat16, "bfloat16")):
        tx = accumulate(optax.stateless(wider), every=2, dtype=dtype)
        state = tx.init(half)
        for total in (0.0, 1.0, 0.0):
            assert {str(t.dtype) for t in jax.tree.leaves(state.total)} == {expected}
            assert all((t == total).all() for t in jax.tree.leaves(state.total))
            updates, state = tx.update(jax.tree.map(jnp.ones_like, half), state, half)
            assert {str(u.dtype) for u in jax.tree.leaves(updates)} == {"float32"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: accumulate(optax.sgd(0.1), every=0),
            "`every` of `accumulate` must be .*, got `0`",
        ),
        (
            lambda: accumulate(optax.sgd(0.1), every=2.0),
            r"`every` of `accumulate` must be .*, got `2\.0`",
        ),
        (
            lambda: accumulate(lambda g: g, every=2),
            "the optimizer of `accumulate` must be an optax optimizer",
        ),
        (
            lambda: accumulate(optax.sgd(0.1), every=2, dtype=jnp.int32),
            "`dtype` of `accumulate` must be a floating",
        ),
    ],
)
def test_accumulate_refuses_what_is_out_of_range(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def step_of(tx: Any) -> Callable[..., Any]:
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def exchanges_of(tx: Any, steps: int) -> list[int]:
    """Returns the number of exchanges in each step's program."""
    step, state, found = step_of(tx), tx.init(PARAMS), []
    for _ in range(steps):
        args = PARAMS, state, PARAMS
        traced = decide(
            trace(step, args, axes={"batch": 1}, wire=LocalRanks()), jax.tree.leaves(args)
        )
        found.append(sum(len(s.exchanges) for s in stages.cut(traced).segments))
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], args)
        state = jax.tree.map(lambda x: x[0], jax.vmap(step, axis_name="batch")(*one)[1])
    return found


@pytest.mark.integration
def test_accumulate_exchanges_only_in_every_kth_step() -> None:
    """`accumulate` exchanges on every k-th step only, whereas `optax.MultiSteps` always does."""
    tx = optax.chain(mean("batch"), optax.sgd(0.1))
    assert exchanges_of(accumulate(tx, every=3), 6) == [0, 0, 2, 0, 0, 2]
    assert exchanges_of(optax.MultiSteps(tx, 3), 3) == [2, 2, 2]
    # Nested counters: exchanges on every second optimizer step.
    assert exchanges_of(accumulate(local_sgd(optax.sgd(0.1), "batch", every=2), every=2), 4) == [
        0,
        0,
        0,
        2,
    ]


@jax.jit
def averaged(grads: Any) -> Any:
    return jax.lax.pmean(grads, "batch")


def multi_steps(tx: Any, every: Any = 4, **options: Any) -> Any:
    return optax.MultiSteps(tx, every, **options).gradient_transformation()


INSIDE = optax.chain(mean("batch"), optax.sgd(0.1))
JITTED = optax.chain(optax.stateless(lambda grads, params: averaged(grads)), optax.sgd(0.1))
REPEATED = {
    "mean": multi_steps(INSIDE),
    "a schedule": multi_steps(INSIDE, lambda step: jnp.where(step < 3, 1, 4)),
    "skips": multi_steps(INSIDE, should_skip_update_fn=optax.skip_not_finite),
    "in a chain": optax.chain(optax.clip(1.0), multi_steps(INSIDE)),
    "in accumulate": accumulate(multi_steps(INSIDE), every=2),
    "jitted": multi_steps(JITTED),
    "local_sgd": multi_steps(local_sgd(optax.sgd(0.1), "batch", every=2)),
}
NOT_REPEATED = {
    "every step": multi_steps(INSIDE, 1),
    "before": optax.chain(mean("batch"), multi_steps(optax.sgd(0.1))),
    "before, jitted": optax.chain(
        optax.stateless(lambda g, p: averaged(g)), multi_steps(optax.sgd(0.1))
    ),
    "after": optax.chain(multi_steps(optax.sgd(0.1)), mean("batch")),
    "between": optax.chain(multi_steps(optax.sgd(0.1)), mean("batch"), multi_steps(optax.sgd(0.1))),
    "accumulate": accumulate(INSIDE, every=4),
    "apply_if_finite": optax.apply_if_finite(INSIDE, 3),
}


def repeated(tx: Any, wrap: Callable[[Any], Any] = lambda step: step) -> list[str]:
    args = PARAMS, tx.init(PARAMS), PARAMS
    traced = trace(wrap(step_of(tx)), args, axes=AXES, wire=LocalRanks())
    return list(repeated_exchanges(traced.unflattened, traced.axes, traced.wire))


@pytest.mark.mostly_integration(
    "mean-checkpoint", "in a chain-jit", "in a chain-checkpoint", "jitted-plain", "jitted-jit"
)
@pytest.mark.parametrize(
    "wrap", [lambda step: step, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"]
)
@pytest.mark.parametrize("name", REPEATED)
def test_multi_steps_around_an_exchange_is_found(name: str, wrap: Callable[[Any], Any]) -> None:
    """The error names the user's line that calls `update`, wherever it is in the step."""
    (source,) = repeated(REPEATED[name], wrap)
    assert "test_accumulate.py" in source and "step_of.<locals>.step" in source


@pytest.mark.parametrize("name", NOT_REPEATED)
def test_other_exchanges_are_not_taken_for_it(name: str) -> None:
    repeated(
        REPEATED["jitted"]
    )  # JAX attributes what was traced once there to lines of `MultiSteps`
    assert repeated(NOT_REPEATED[name]) == []
