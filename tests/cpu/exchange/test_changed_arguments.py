"""A state created with other arguments, e.g. before a restart: what each strategy does with it.

Either a strategy continues from it, or it says why it can't. A different `every` of
`streaming_diloco` is tested in `test_streaming_diloco.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross import exchange
from jaxcross.testing import vmapped

pytestmark = pytest.mark.usefixtures("compiled_quickly")

RANKS = 4
SGD, OUTER = optax.sgd(0.1), optax.sgd(0.7, momentum=0.9, nesterov=True)
PARAMS = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4), "b": np.ones(4, np.float32)}

Make = Callable[[int], Any]


def gradients(step: int) -> Any:
    """Returns the gradients of all ranks, different on each rank."""
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(RANKS, *p.shape)).astype(p.dtype) for name, p in PARAMS.items()}


def begun(tx: Any) -> Any:
    """Returns every rank's parameters and state before the first step."""
    everywhere = jax.tree.map(lambda p: np.stack([p] * RANKS), PARAMS)
    return everywhere, jax.vmap(tx.init)(everywhere)


def trained(
    tx: Any, steps: range, carry: Any, grads: Callable[[int], Any] = gradients
) -> tuple[Any, list[Any]]:
    """Returns every rank's parameters and state after these steps, and the updates of each step."""

    def one(grads: Any, state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    step, history = jax.jit(vmapped(one, {"batch": RANKS})), []
    for n in steps:
        params, state, updates = step(grads(n), carry[1], carry[0])
        carry = params, state
        history.append(updates)
    return carry, history


ROUNDS: dict[str, Make] = {
    "accumulate": lambda every: exchange.accumulate(
        optax.chain(exchange.mean("batch"), SGD), every=every
    ),
    "local_sgd": lambda every: exchange.local_sgd(SGD, "batch", every=every),
    "diloco": lambda every: exchange.diloco(SGD, OUTER, "batch", every=every),
    "sparse_loco": lambda every: exchange.sparse_loco(
        SGD, OUTER, "batch", every=every, density=0.5
    ),
    "federated_average": lambda every: exchange.federated_average(
        SGD, "batch", every=every, participation=0.5
    ),
    "elastic_average": lambda every: exchange.elastic_average(SGD, "batch", every=every, alpha=0.1),
    "no_loco": lambda every: exchange.no_loco(SGD, "batch", every=every),
}


@pytest.mark.mostly_integration(
    "accumulate-3-4-2-4", "accumulate-2-4-2-3", "local_sgd-2-4-2-3", "elastic_average-2-4-2-3"
)
@pytest.mark.parametrize(
    ("made", "every", "then", "length"),
    [(3, 4, 2, 4), (2, 4, 2, 3), (1, 4, 2, 2), (1, 2, 4, 4), (3, 4, 1, 4)],
)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_under_way_takes_the_new_length_or_ends_at_once(
    name: str, made: int, every: int, then: int, length: int
) -> None:
    """The result equals a round of that length from the start: nothing is lost or counted twice."""
    make = ROUNDS[name]
    under_way, _ = trained(make(every), range(made), begun(make(every)))
    got, _ = trained(make(then), range(made, length), under_way)
    want, _ = trained(make(length), range(length), begun(make(length)))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_accumulated_gradients_are_divided_by_their_number() -> None:
    """Four gradients of 1 move the parameter by 1, though `every` drops to 2 after three."""
    three, two = (exchange.accumulate(optax.sgd(1.0), every=every) for every in (4, 2))
    state, params = three.init(jnp.zeros(())), jnp.zeros(())
    for _ in range(3):
        _, state = three.update(jnp.ones(()), state, params)
    updates, state = two.update(jnp.ones(()), state, params)
    assert float(updates) == -1.0 and int(state.mini_step) == 0


SENT_LATER: dict[str, Callable[[float], Any]] = {
    "top_k": lambda density: exchange.top_k(density, "batch"),
    "top_k, bucket then": lambda density: exchange.top_k(density, "batch", bucket=density == 1.0),
    "gtop_k": lambda density: exchange.gtop_k(density, "batch"),
    "decoupled_momentum": lambda density: exchange.decoupled_momentum(density, "batch", decay=1.0),
}


@pytest.mark.mostly_integration("top_k")
@pytest.mark.parametrize("make", SENT_LATER.values(), ids=SENT_LATER)
def test_another_density_sends_what_the_old_one_left(make: Callable[[float], Any]) -> None:
    carry, early = trained(make(0.25), range(3), begun(make(0.25)))
    _, late = trained(make(1.0), range(3, 4), carry)
    got = sum(np.asarray(updates["w"]) for updates in [*early, *late])
    want = sum(gradients(n)["w"].mean(0) for n in range(4))
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("before", "then"), [(2, 9), (9, 2)])
def test_one_bit_adam_knows_its_second_moment_after_another_freeze_step(
    before: int, then: int
) -> None:
    """With moments corrected by age, constant gradients give directions of magnitude one."""

    one = jax.tree.map(
        lambda p: np.where(np.arange(p.size).reshape(p.shape) % 3, 2, -2).astype(p.dtype), PARAMS
    )
    alike = jax.tree.map(lambda g: np.stack([g] * RANKS), one)
    first, second = (
        exchange.one_bit_adam(freeze, "batch", ranks=RANKS, block=8) for freeze in (before, then)
    )
    carry, early = trained(first, range(5), begun(first), lambda n: alike)
    _, late = trained(second, range(5, 8), carry, lambda n: alike)
    for updates in [*early, *late]:
        jax.tree.map(
            lambda u, g: np.testing.assert_allclose(u, np.sign(g), rtol=1e-4), updates, alike
        )


def stream(**changed: Any) -> Any:
    arguments: Any = {"every": 4, "fragments": 2, "delay": 2, "bits": 32, **changed}
    return exchange.streaming_diloco(SGD, OUTER, "batch", **arguments)


def everything(path: str, leaf: Any) -> bool:
    del path, leaf
    return False


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "top_k, error_feedback": (
        exchange.top_k(0.5, "batch"),
        exchange.top_k(0.5, "batch", error_feedback=False),
        r"the state of `top_k` is \[24\] at .* but must be nothing here",
    ),
    "top_k, skip": (
        exchange.top_k(0.5, "batch", skip=everything),
        exchange.top_k(0.5, "batch"),
        r"the state of `top_k` is \[4\] at .* but must be nothing here",
    ),
    "decoupled_momentum, chunk": (
        exchange.decoupled_momentum(0.5, "batch"),
        exchange.decoupled_momentum(0.5, "batch", chunk=2),
        r"the state of `decoupled_momentum` is \[1, 24\]",
    ),
    "sparse_loco, chunk": (
        exchange.sparse_loco(SGD, OUTER, "batch", every=2),
        exchange.sparse_loco(SGD, OUTER, "batch", every=2, chunk=8),
        r"the state of `sparse_loco` is \[1, 24\]",
    ),
    "power_sgd, rank": (
        exchange.power_sgd(1, "batch"),
        exchange.power_sgd(2, "batch", min_ratio=0),
        r"the state of `power_sgd` is \[4, 1\]",
    ),
    "power_sgd, min_ratio": (
        exchange.power_sgd(1, "batch"),
        exchange.power_sgd(1, "batch", min_ratio=9),
        r"the state of `power_sgd` is \[4, 1\] at .* but must be nothing here",
    ),
    "one_bit_adam, ranks": (
        exchange.one_bit_adam(1, "batch", ranks=2, block=8),
        exchange.one_bit_adam(1, "batch", ranks=RANKS, block=8),
        "the state of `one_bit_adam` is",
    ),
    "sharded_optimizer, ranks": (
        exchange.sharded_optimizer(optax.adam(0.1), "batch", ranks=2),
        exchange.sharded_optimizer(optax.adam(0.1), "batch"),
        r"the state of `sharded_optimizer` is \[",
    ),
    "bounded_stale, bound": (
        exchange.bounded_stale(SGD, "batch", staleness=2),
        exchange.bounded_stale(SGD, "batch", staleness=1),
        "`bounded_stale` got a state with 2 slots for delayed gradients",
    ),
    "asynchronous, delays": (
        exchange.asynchronous(SGD, "batch", delays=2),
        exchange.asynchronous(SGD, "batch", delays=0),
        "`asynchronous` got a state with 3 slots for delayed gradients",
    ),
    "streaming_diloco, fragments": (
        stream(),
        stream(fragments=1),
        "the state of `streaming_diloco` has 2 arrays",
    ),
    "streaming_diloco, delay": (
        stream(),
        stream(delay=1),
        "the state of `streaming_diloco` has 2 arrays",
    ),
    "streaming_diloco, bits": (
        stream(),
        stream(bits=8),
        "the state of `streaming_diloco` has 2 arrays",
    ),
}


@pytest.mark.parametrize(("before", "then", "text"), REFUSED.values(), ids=REFUSED)
def test_a_state_of_another_form_is_refused(before: Any, then: Any, text: str) -> None:
    """Every rank raises while tracing, before any exchange. `job.restore` rejects its shapes."""
    params = jax.tree.map(jnp.asarray, PARAMS)

    state = before.init(params)  # outside the step, where no axis is bound

    def update(params: Any) -> Any:
        return then.update(params, state, params)

    with pytest.raises(ValueError, match=f"^{text}"):
        jax.make_jaxpr(update, axis_env=[("batch", RANKS)])(params)
