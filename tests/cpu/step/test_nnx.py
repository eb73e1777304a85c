"""Steps that change NNX objects in place work as under `nnx.jit`, wherever objects are passed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxcross.step.nnx import holds_objects
from tests.support import warm_python

CHECKS = """
import threading
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax import lax
import jaxcross

jaxcross.initialize()
X = jnp.arange(8.0).reshape(4, 2) / 8


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.drop = nnx.Linear(2, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.drop(self.linear(x))


def fresh():
    model = Net()
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def mean(x, ranks):  # of one rank; `nnx.jit` binds no axis
    return lax.pmean(x, "batch") if ranks else x


def update(model, optimizer, x, ranks, scale=1.0):
    loss, grads = nnx.value_and_grad(lambda m: (scale * m(x) ** 2).mean())(model)
    optimizer.update(model, mean(grads, ranks))
    return mean(loss, ranks)


def same(a, b):
    def close(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

    a, b = nnx.to_pure_dict(nnx.state(a)), nnx.to_pure_dict(nnx.state(b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(close, a, b)


def compare(step, make, *rest, times=3, **options):
    \"\"\"`step(objects, rest, ranks)` by `crossover` and by `nnx.jit`; returns the objects of
    `crossover`.
    \"\"\"
    ours, theirs = make(), make()
    mine = jaxcross.crossover(
        lambda o, *r, **k: step(o, *r, ranks=True, **k), axes="batch", **options
    )
    jitted = nnx.jit(lambda o, *r, **k: step(o, *r, ranks=False, **k))
    for _ in range(times):
        np.testing.assert_allclose(mine(ours, *rest), jitted(theirs, *rest), rtol=1e-5)
    same(ours, theirs)
    assert len(mine._pure._roots) == 1, len(mine._pure._roots)
    return ours
"""

CASES = {
    "array": (
        "m, _ = compare(lambda o, x, ranks: update(*o, x, ranks), fresh, X); assert "
        "m.calls.get_value() == 3"
    ),
    "numpy": "compare(lambda o, x, ranks: update(*o, x, ranks), fresh, np.asarray(X))",
    "tuple": "compare(lambda o, b, ranks: update(*o, b[0], ranks, b[1]), fresh, (X, 2.0))",
    "scalar": "compare(lambda o, x, s, ranks: update(*o, x, ranks, s), fresh, X, 0.5)",
    "dict": "compare(lambda o, b, ranks: update(*o, b['x'], ranks), fresh, {'x': X})",
    "nested": """
def make():
    return dict(zip(("m", "o"), fresh()))
o = compare(lambda o, x, ranks: update(o["m"], o["o"], x, ranks), make, X, donate_argnums=0)
assert o["m"].calls.get_value() == 3
""",
    "positional": """
model, optimizer = fresh()
step = jaxcross.crossover(
    lambda m, o, x, scale: update(m, o, x, True, scale), axes="batch", donate_argnums=(0, 1)
)
other = fresh()
for _ in range(2):
    step(model, optimizer, X, scale=2)
    nnx.jit(lambda o, x: update(*o, x, False, 2))(other, X)
same((model, optimizer), other)
assert not X.is_deleted()
""",
    "shared": """
class Pair(nnx.Module):
    def __init__(self, net):
        self.net = net
net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
pair = Pair(net)
kernel = net.kernel
@jaxcross.crossover(axes="batch")
def train_step(net, box, x):
    assert net is box["pair"].net
    net.kernel.set_value(net.kernel.get_value() + lax.pmean(x.mean(), "batch"))
    return box["pair"].net(x)
train_step(net, {"pair": pair}, X)
after = kernel.get_value()
train_step(net, {"pair": pair}, X)
assert net is pair.net and net.kernel is kernel and not jnp.array_equal(kernel.get_value(), after)
""",
    "metric": """
metric = nnx.metrics.Average()
@jaxcross.crossover(axes="batch")
def eval_step(metric, x):
    metric.update(values=lax.pmean(x, "batch"))
for n in (1.0, 2.0):
    eval_step(metric, n * X)
np.testing.assert_allclose(metric.compute(), 1.5 * X.mean(), rtol=1e-6)
""",
    "rngs": """
rngs, twin = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
step = jaxcross.crossover(
    lambda r, x: lax.pmean(x + jax.random.normal(r["rngs"].dropout()), "batch"), axes="batch"
)
draws = [step({"rngs": rngs}, X)[0, 0] for _ in range(3)]
wanted = [X[0, 0] + jax.random.normal(twin.dropout()) for _ in range(3)]
np.testing.assert_allclose(draws, wanted, rtol=1e-6)
same(rngs, twin)
""",
    "returned": """
model, _ = fresh()
@jaxcross.crossover(axes="batch")
def train_step(model, x):
    model.last = nnx.Variable(lax.pmean(x, "batch"))
    return model, nnx.Linear(2, 1, rngs=nnx.Rngs(1))
same_model, new = train_step(model, X)
assert same_model is model and jnp.array_equal(model.last.get_value(), X)
assert new(X).shape == (4, 1)
""",
    "shared by jobs": """
step = jaxcross.crossover(lambda m, o, x: update(m, o, x, True), axes="batch")
def train(job, objects):
    for _ in range(5):
        step(*objects, X)
    return nnx.state(objects)
(model, optimizer), other = fresh(), fresh()
for first, second in (
    ((model, optimizer), (model, optimizer)),
    ((model, optimizer), (model, other[1])),
    ((other[0], optimizer), (model, optimizer)),
):
    both = threading.Barrier(2)
    def together(job, objects):
        both.wait()
        return train(job, objects)
    try:
        with jaxcross.Runner() as runner:
            runner.add("a", together, {"objects": first})
            runner.add("b", together, {"objects": second})
            runner.run()
    except jaxcross.JobError as error:
        assert "passes an NNX object (`" in str(error), error
        assert "Only the `optax` optimizer can be shared" in str(error), error
    else:
        raise AssertionError("two jobs changed one object")
# one after the other, and objects of their own
for objects in (fresh(), fresh()), ((model, optimizer),):
    with jaxcross.Runner() as runner:
        for name, each in zip("ab", objects):
            runner.add(name, train, {"objects": each})
        runner.run()
""",
    "static leaves": """
model, optimizer = fresh()
step = jaxcross.crossover(
    lambda o, extra, x: (update(*o, extra["f"](x), True), extra["name"]), axes="batch"
)
for f, name in ((jnp.sin, "sin"), (jnp.cos, "cos")):
    loss, got = step((model, optimizer), {"f": f, "name": name}, X)
    assert got == name
other = fresh()
for f in (jnp.sin, jnp.cos):
    update(*other, f(X), False)
same((model, optimizer), other)
""",
    "static": """
model, optimizer = fresh()
step = jaxcross.crossover(
    lambda m, kind, o, x: update(m, o, x, True, 1.0 if kind == "one" else 2.0),
    axes="batch",
    static_argnums=1,
)
step(model, "one", optimizer, X)
step(model, "two", optimizer, X)
other = fresh()
for scale in (1.0, 2.0):
    update(*other, X, False, scale)
same((model, optimizer), other)
try:
    jaxcross.crossover(lambda m, x: m(x), axes="batch", static_argnums=0)(model, X)
except ValueError as error:
    assert str(error).startswith(
        "static argument 0 of `<lambda>` holds NNX objects, whose arrays cannot be static."
    )
else:
    raise AssertionError("a static module passed")
""",
    "static and donated by name": """
def half(m, o, x, *, kind):
    return update(m, o, x, True, 1.0 if kind == "one" else 2.0)
model, optimizer = fresh()
step = jaxcross.crossover(half, axes="batch", static_argnames="kind", donate_argnames=("m", "o"))
step(model, optimizer, X, kind="one")
step(m=model, x=X, o=optimizer, kind="two")
other = fresh()
for scale in (1.0, 2.0):
    update(*other, X, False, scale)
same((model, optimizer), other)
assert not X.is_deleted()
try:
    jaxcross.crossover(half, axes="batch", static_argnames="m")(optimizer, optimizer, X, kind="one")
except ValueError as error:
    assert str(error).startswith("static argument 0 of `half` holds NNX objects"), error
else:
    raise AssertionError("a static optimizer passed")
""",
    "trace": """
model, optimizer = fresh()
step = jaxcross.crossover(lambda m, o, x: update(m, o, x, True), axes="batch")
traced = step.trace(model, optimizer, X)
assert "psum" in str(traced)
same((model, optimizer), fresh())
step(model, optimizer, X)
""",
    "leaves": """
# A module that isn't a pytree is a leaf, as is the array that was in its place before.
class Leaf(nnx.Module, pytree=False):
    def __init__(self):
        self.w = nnx.Param(X[0])
class Outer(nnx.Module, pytree=False):
    def __init__(self):
        self.leaf = Leaf()
    def __call__(self):
        return self.leaf
step = jaxcross.crossover(
    lambda m, x: lax.pmean(x * (m() if callable(m) else m).w[...], "batch")
    if isinstance(m, nnx.Module) else lax.pmean(m * x, "batch"),
    axes="batch",
)
for model in (X[0], Outer(), 2.0, Leaf(), X[0]):
    for factor in (1.0, 2.0):
        found = step(model, X)
        if isinstance(model, nnx.Module):
            leaf = model() if callable(model) else model
            assert jnp.array_equal(found, factor * X * X[0]), model
            leaf.w.set_value(2 * leaf.w[...])
        else:
            assert jnp.array_equal(found, model * X), model
""",
    "failure": """
model, optimizer = fresh()
def train_step(m, o, x, bad=False):
    loss = update(m, o, x, True)
    if x.shape[0] == 3:
        raise ArithmeticError("three")
    return loss
step = jaxcross.crossover(train_step, axes="batch")
try:
    step(model, optimizer, X[:3])
except ArithmeticError:
    same((model, optimizer), fresh())
else:
    raise AssertionError("the step's error was lost")
step(model, optimizer, X)
assert model.calls.get_value() == 1
""",
    "functional": """
graph, state = nnx.split(fresh())
def train_step(graph, state, x):
    objects = nnx.merge(graph, state)
    loss = update(*objects, x, True)
    return nnx.state(objects), loss
step = jaxcross.crossover(train_step, axes="batch")
state, _ = step(graph, state, X)
assert isinstance(state, nnx.State) and "_pure" not in vars(step)
other = fresh()
update(*other, X, False)
same(nnx.merge(graph, state), other)
""",
    "threads": """
step = jaxcross.crossover(lambda m, o, x: update(m, o, x, True), axes="batch")
pures = []
def ask():
    gate.wait()
    pures.append(step.pure_step())
gate = threading.Barrier(4)
threads = [threading.Thread(target=ask) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(set(map(id, pures))) == 1
""",
}


RUN = """
import traceback
for name, code in CASES.items():
    try:
        exec(code, dict(globals()))
        print(f"{name}: passed", flush=True)
    except BaseException:
        print(f"{name}: failed\\n{traceback.format_exc()}", flush=True)
"""
PLAIN = ("dict", "positional", "returned", "failure", "threads")


@pytest.mark.mostly_integration("plain")
@pytest.mark.parametrize(
    "cases", [PLAIN, tuple(sorted(CASES.keys() - set(PLAIN)))], ids=["plain", "others"]
)
def test_objects_change_as_under_nnx_jit(
    quick_compiler: dict[str, str], cases: tuple[str, ...]
) -> None:
    """The cases of a tier share a process, so no pytest worker runs another worker's cases."""
    pytest.importorskip("mpi4jax")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **quick_compiler}
    code = f"{CHECKS}\nCASES = { {case: CASES[case] for case in cases}!r}\n{RUN}"
    line = [*warm_python.COMMAND, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.stdout.splitlines() == [f"{case}: passed" for case in cases], (
        done.stdout + done.stderr
    )


@pytest.mark.integration
def test_what_is_an_object() -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    for tree in (
        model,
        {"a": [model]},
        nnx.Rngs(0),
        (nnx.metrics.Average(),),
        model.kernel,
        {"p": nnx.Param(0.0)},
    ):
        assert holds_objects((tree, 1.0), {})
        assert holds_objects((), {"key": tree})
    for tree in (
        state,
        graph,
        {"s": (state,)},
        nnx.to_flat_state(state),
        nnx.to_pure_dict(state),
        jnp.ones(2),
        "x",
    ):
        assert not holds_objects((tree, 1.0), {"key": tree})
