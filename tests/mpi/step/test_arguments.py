"""Arguments of a step over MPI, as scripts for `jax.jit` pass them: shared, by name, and of types
without values.
"""

from tests.support.script_text import RAISED

SCRIPT = (
    RAISED
    + """
import warnings
import jax, jax.numpy as jnp
import jaxcross
from jax import lax

warnings.simplefilter("ignore")
world = jaxcross.initialize()


# a state that holds an array twice, as that array and as its buffer, and donates both
@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(state, batch):
    params = state["params"] + lax.pmean(batch.sum(), "batch")
    return {"params": params, "ema": (state["ema"] + params) / 2}


def again(x):  # another array of the same buffer
    return jax.device_put(x, jax.devices()[0])


batch = jnp.full(3, 2.0 * world.rank)
for call in (train_step, jaxcross.crossover(train_step.step, axes="batch", donate_argnums=0)):
    params = jnp.ones(3)
    state = call({"params": params, "ema": params if call is train_step else again(params)}, batch)
    assert params.is_deleted()
    assert state["params"].tolist() == [4.0] * 3 and state["ema"].tolist() == [2.5] * 3
    state = call({**state, "ema": state["params"]}, batch)  # types known by now
    assert state["params"].tolist() == [7.0] * 3 and state["ema"].tolist() == [5.5] * 3
# buffers are not compared at every step, but an error names the leaves
what = raised(lambda: train_step({**state, "ema": again(state["params"])}, batch))
assert what.startswith(
    "ValueError: `args[0]['ema']` and `args[0]['params']` of `train_step` share one buffer, "
    "which the step would"
), what
assert not state["params"].is_deleted()

# static and donated arguments by name
@jaxcross.crossover(axes="batch", donate_argnums=0, static_argnums=2)
def scaled(state, x, train):
    return state + lax.pmean(x, "batch") if train else state


first = jnp.ones(3)
for train, want in ((True, 1.5), (False, 1.5), (True, 2.0)):
    second = scaled(x=jnp.full(3, 1.0 * world.rank), train=train, state=first)
    assert first.is_deleted() >= train and second.tolist() == [want] * 3
    first = second
assert len(scaled.trace(train=True, state=first, x=first).donated) == 1

# types are for `trace`, and a call with one is no exchange that failed halfway
what = raised(lambda: train_step(jax.ShapeDtypeStruct((3,), jnp.float32), jnp.ones(3)))
assert what.startswith(
    "TypeError: `train_step` is called with a `jax.ShapeDtypeStruct`, which has no values"
), what
assert call(state, jnp.zeros(3))["params"].tolist() == [7.0] * 3
print("end")
"""
)


def test_arguments_as_jit_takes_them(mpirun, quick_compiler) -> None:
    finished = mpirun(2, SCRIPT, env=quick_compiler)
    assert finished.check().stdout.count("end") == 2, finished.stdout + finished.stderr
