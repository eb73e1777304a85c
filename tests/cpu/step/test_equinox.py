"""Equinox modules are arguments and results of steps, as under `eqx.filter_jit`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import warm_python

pytest.importorskip("equinox")

CHECKS = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import jaxcross
from jax import lax

jaxcross.initialize()
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def mean(x, ranks):  # of one rank; `eqx.filter_jit` binds no axis
    return lax.pmean(x, "batch") if ranks else x


def make(tx, ranks):
    def step(state, x):
        model, opt_state = state

        def loss_fn(model):
            return jnp.mean((jax.vmap(model)(x) - x[:, :2]) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        arrays = eqx.filter(model, eqx.is_array)
        updates, opt_state = tx.update(mean(grads, ranks), opt_state, arrays)
        return (eqx.apply_updates(model, updates), opt_state), mean(loss, ranks)

    return step


def fresh(tx):
    model = eqx.nn.MLP(4, 2, 8, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    return model, tx.init(eqx.filter(model, eqx.is_array))


def crossed(function, **options):
    return jaxcross.crossover(function, axes="batch", **options)


def close(a, b):
    a, b = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (a, b))
    assert len(a) == len(b)
    for x, y in zip(a, b):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
"""

CASES = {
    "filter_jit": """
tx = optax.adamw(1e-2)
ours, theirs = fresh(tx), fresh(tx)
mine, jitted = crossed(make(tx, True), donate_argnums=0), eqx.filter_jit(make(tx, False))
wrapped, copy = crossed(eqx.filter_jit(make(tx, True))), fresh(tx)
for _ in range(3):
    ours, loss = mine(ours, X)
    theirs, other = jitted(theirs, X)
    copy, third = wrapped(copy, X)
    np.testing.assert_allclose([loss, third], [other] * 2, rtol=1e-4)
close(ours, theirs)
close(copy, theirs)
assert jax.tree.structure(ours) == jax.tree.structure(theirs) == jax.tree.structure(copy)
assert ours[0].activation is jax.nn.gelu
assert len(mine._roots) == len(wrapped._roots) == 1
""",
    "numbers in modules": """
drop = eqx.nn.Dropout(0.5)
step = crossed(lambda m, x, key: (lax.pmean(m(x, key=key), "batch"), m, 0.25))
seen = []
for p, inference in ((0.5, False), (0.5, True), (0.0, False), (0.9, False), (0.5, False)):
    module = eqx.nn.Dropout(p, inference)
    x, same, number = step(module, jnp.ones(100), jax.random.key(0))
    assert (same.p, same.inference) == (p, inference) and type(same.p) is float
    assert isinstance(number, jax.Array)  # outside of a module, as with `jax.jit`
    seen.append(int((x == 0).sum()))
assert seen[1] == seen[2] == 0 < seen[0] == seen[4] < seen[3], seen
assert len(step._roots) == 4
""",
    "exchanges": """
ex = jaxcross.exchange
for tx in (
    optax.chain(ex.top_k(0.25, axes="batch"), optax.sgd(0.1, momentum=0.9)),
    optax.chain(ex.power_sgd(2, "batch"), optax.adam(1e-2)),
    ex.local_sgd(optax.sgd(0.1), "batch", every=2),
    ex.elastic_average(optax.sgd(0.1), "batch", every=2, alpha=0.1),
    ex.diloco(optax.adam(1e-2), optax.sgd(0.7, momentum=0.9), "batch", every=2),
):
    step, state = crossed(make(tx, False)), fresh(tx)
    arrays, static = eqx.partition(state, eqx.is_array)

    def by_hand(arrays, x):
        state, loss = make(tx, False)(eqx.combine(arrays, static), x)
        return eqx.filter(state, eqx.is_array), loss

    by_hand = crossed(by_hand)
    for _ in range(3):
        state, _ = step(state, X)
        arrays, _ = by_hand(arrays, X)
    assert eqx.tree_equal(eqx.filter(state, eqx.is_array), arrays)
    model, opt_state = state
    params = ex.finish(eqx.filter(model, eqx.is_array), opt_state)
    assert eqx.combine(params, model).activation is jax.nn.gelu
tx = ex.local_sgd(optax.sgd(0.1), "batch", every=2)
model, opt_state = fresh(tx)
try:
    crossed(lambda m, s: tx.update(eqx.filter(m, eqx.is_array), s, m))(model, opt_state)
except TypeError as error:
    assert "With Equinox, that's `eqx.filter(model, eqx.is_array)`" in str(error), error
else:
    raise AssertionError("a module passed for parameters")
""",
}


@pytest.mark.mostly_integration("numbers in modules")
@pytest.mark.parametrize("case", CASES)
def test_modules_work_as_under_filter_jit(case) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [*warm_python.COMMAND, "-c", f"{CHECKS}\n{CASES[case]}\nprint('end')"],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
        check=False,
    )
    assert done.stdout.endswith("end\n"), done.stdout + done.stderr
