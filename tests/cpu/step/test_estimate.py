"""`jaxcross.estimate` on one rank: what it accepts, what it leaves unchanged, what it reports."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support import warm_python
from tests.support.script_text import RAISED

SCRIPT = (
    RAISED
    + """
import warnings
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax import lax
import jaxcross

warnings.simplefilter("ignore")
world = jaxcross.initialize()
X = np.ones((4, 3), np.float32)


def plain(state, batch):
    grads = lax.pmean(jax.grad(lambda w: ((batch @ w) ** 2).mean())(state), "batch")
    return state - 0.1 * grads, {"norm": (grads**2).sum()}


step = jaxcross.crossover(plain, axes="batch", donate_argnums=0)
state = jnp.ones((3, 2))

# One rank exchanges nothing. The state is as it was, and was not given away.
alone = jaxcross.estimate(step, state, X)
assert alone.cost.exchange_s == 0 and alone.cost.whole.ranks == 1 and alone.cost.compute_s > 0
assert [p.most for p in alone.gains] == [1.0] * 4 and alone.cut_alone is None
assert alone.recommendation.startswith("One rank exchanges nothing: m = 0.")
assert not state.is_deleted() and (state == 1).all()
assert step.latest_program is None, "the step itself was not touched"
assert alone.cost.limit_bytes > 10**8 and alone.fitting_jobs > 4

# On a link that was asked for it stands for one of two, which receive as many bytes as the gradient
# has.
linked = jaxcross.estimate(step, state, X, jobs=7, steps=1, mbps=0.001, memory="1GB")
assert linked.cost.wire_bytes == 24 and linked.cost.narrow_wire_bytes == 12
assert abs(linked.cost.exchange_s - 24 * 8 / 1000) < 1e-9, linked.cost
assert abs(linked.cost.mbps - 0.001) < 1e-12
assert linked.of(7).jobs == 7 and linked.cost.limit_bytes == 10**9
assert linked.of(1).most_narrow > 1.5

# A function without a decorator, static arguments, NNX objects
assert jaxcross.estimate(plain, state, X, axes="batch", steps=1).cost.whole.name == "plain"
static = jaxcross.crossover(
    lambda s, x, n: s + n * lax.pmean(x, "batch"), axes="batch", static_argnums=2
)
jaxcross.estimate(static, X, X, 2, steps=1)


@jaxcross.crossover(axes="batch", donate_argnums=0)
def objects(model, batch):
    grads = nnx.grad(lambda m: (m(batch) ** 2).mean())(model)
    model.kernel.set_value(model.kernel.get_value() - lax.pmean(grads.kernel.get_value(), "batch"))


model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
before = np.asarray(model.kernel.get_value())
jaxcross.estimate(objects, model, X, steps=1)
assert (np.asarray(model.kernel.get_value()) == before).all()

# In a job
def job(context):
    found.append(jaxcross.estimate(step, state, X, steps=1))

found = []
runner = jaxcross.Runner(world)
runner.add("one", job)
runner.run()
assert found[0].cost.where == "job `one`"

# What is wrong is said before anything runs.
def says(start, *args, error="ValueError", **kwargs):
    text = raised(lambda: jaxcross.estimate(*args, **kwargs))
    assert text.startswith(f"{error}: {start}"), text

says("`jobs` must be at least 1, got 0", step, state, X, jobs=0)
says("`jobs` must be a whole number, got 1.5", step, state, X, jobs=1.5, error="TypeError")
text = "`contention` must be a `MachineContention` or None, got 1.1"
says(text, step, state, X, contention=1.1, error="TypeError")
says("`steps` must be at least 1, got 0", step, state, X, steps=0)
says("`mbps` must be above 0 and finite, got -1", step, state, X, mbps=-1)
says("`memory` must be a number of bytes with a unit", step, state, X, memory="lots")
says("`memory` must be a whole number of bytes", step, state, X, memory=0.5, error="TypeError")
says("`plain` is not a `crossover` step, so you have to", plain, state, X, error="TypeError")
says(
    "`plain` is a `crossover` step and has its own axes",
    step, state, X, axes="batch", error="TypeError",
)
nothing = jaxcross.crossover(lambda s, x: s + x.sum(), axes="batch")
says("`<lambda>` exchanges nothing with these arguments", nothing, state, X, error="CutError")
assert "dot_general" in raised(lambda: jaxcross.estimate(step, state, jnp.ones((4, 5))))


def fails(x):
    raise RuntimeError("no disk")


shape = jax.ShapeDtypeStruct((4, 3), jnp.float32)
broken = jaxcross.crossover(
    lambda s, x: s + lax.pmean(jax.pure_callback(fails, shape, x), "batch"),
    axes="batch",
)
says("`<lambda>` cannot be measured, as it fails on copies", broken, X, X, error="ExchangeError")
assert step(state, X)[0].shape == (3, 2), "and training goes on"
assert state.is_deleted()
print("end")
"""
)


@pytest.mark.integration
def test_an_estimate_on_one_rank(quick_compiler: dict[str, str]) -> None:
    env = {**os.environ, **quick_compiler}
    done = subprocess.run(
        [*warm_python.COMMAND, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "end"
