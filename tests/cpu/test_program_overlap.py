"""A step that is cut where its gradients become ready: their exchanges wait for computation, not for one another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jaxcross import exchange
from jaxcross.program.segments import Program
from jaxcross.program.trace import trace
from jaxcross.testing_wire import LocalRanks, decide

LAYERS, WIDTH = 8, 64
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adamw": optax.adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "adafactor": optax.adafactor(1e-3),
}


def program(tx: optax.GradientTransformation, pieces: int, wire: str | None = None) -> Program:
    mean = exchange.mean("batch", wire_dtype=None if wire is None else jnp.dtype(wire))

    def loss_of(params: Any, x: Any) -> Any:
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return (x**2).mean()

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        grads = mean.update(grads, optax.EmptyState())[0]
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": lax.pmean(loss, "batch"), "norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = [{"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)} for _ in range(LAYERS)]
    args = ((params, tx.init(params)), jnp.ones((4, WIDTH)))
    traced = trace(step, args, axes={"batch": 2}, wire=LocalRanks(), donate_argnums=(0,))
    return decide(traced, jax.tree.leaves(args)).cut(pieces, bucket_bytes=0)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_travel_while_the_backward_pass_goes_on(optimizer: str, wire: str | None) -> None:
    cut = program(OPTIMIZERS[optimizer], pieces=4, wire=wire)
    collectives = [s.index for s in cut.collectives]
    assert len(collectives) >= 4
    after = cut.after()
    for index in collectives:
        assert [n for n in collectives if after[index] >> n & 1] == [], cut.text()
    assert cut.segments[-1].kind == "compute"
    assert all(after[-1] >> n & 1 for n in collectives)
    # Also where what is done to each gradient is written behind the whole backward pass.
    products = [
        sum(eqn.primitive.name == "dot_general" for eqn in segment.jaxpr.jaxpr.eqns)
        for segment in cut.segments
        if segment.kind == "compute"
    ]
    assert sum(products) == 3 * LAYERS - 1
    assert max(products[1:4]) - min(products[1:4]) <= 2, products
    assert products[0] <= LAYERS + 5, products


def test_what_depends_on_an_exchange_stays_with_those_who_wait_for_it_anyway() -> None:
    """Two exchanges in a row: what reads the first and keeps little is computed before the second, not at the end."""

    def step(x: Any) -> Any:
        first = lax.pmean(x, "batch")
        second = lax.pmean(jnp.tanh(first @ first), "batch")
        return second, (first @ first.T).sum()

    args = (jnp.ones((WIDTH, WIDTH)),)
    traced = trace(step, args, axes={"batch": 2}, wire=LocalRanks())
    cut = decide(traced, jax.tree.leaves(args)).cut("whole", bucket_bytes=0)
    middle = cut.segments[cut.collectives[0].index + 1]
    assert any(eqn.primitive.name == "reduce_sum" for eqn in middle.jaxpr.jaxpr.eqns)
