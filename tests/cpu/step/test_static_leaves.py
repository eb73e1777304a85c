"""Steps take and return pytrees with leaves that JAX can't trace, as `eqx.filter_jit` does."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross._pytree import (
    Static,
    StaticSplit,
    described_static,
    forms_of,
    hold_static,
    rebuild,
    release_static,
    snapshot,
    static_places,
    why_not_static,
)
from jaxcross.exchange.validation import require_params
from jaxcross.step.signature import describe_structures
from jaxcross.testing import vmap_oracle
from tests.support.script_text import run_to_end


class Layer:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)

    def __call__(self, x: object) -> object:
        return x


def test_static_leaves_survive_a_round_trip() -> None:
    tree = {"f": jax.nn.relu, "s": ("text", jnp.ones(2)), "n": 1.5, "none": None}
    held = hold_static(tree)
    assert [type(x) for x in jax.tree.leaves(held)] == [float, type(jnp.ones(2))]
    assert release_static(held) == {**tree, "s": ("text", held["s"][1])}
    assert hold_static(held) == held
    plain = {"a": jnp.ones(2), "b": 1}
    assert hold_static(plain) is plain


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ("a", "b"), (len, max)]
)
def test_static_leaves_that_compile_differently_are_unequal(one, other) -> None:
    assert Static(one) != Static(other)
    assert Static(one) == Static(one)
    structures = [jax.tree.structure({"x": Static(x)}) for x in (one, other)]
    assert structures[0] != structures[1]


def test_nan_is_equal_to_itself_as_a_static_leaf() -> None:
    assert Static(float("nan")) == Static(float("nan"))
    assert hash(Static(float("nan"))) == hash(Static(float("nan")))


@pytest.mark.parametrize(
    "leaf", [jax.nn.relu, jnp.tanh, jnp.add, len, "a", int, Layer(), partial(len)]
)
def test_functions_texts_and_classes_can_be_static(leaf) -> None:
    assert why_not_static(leaf) is None


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        ({1}, "it cannot be hashed and compared (unhashable type: 'set')"),
        (object(), "it has no `__eq__`"),
        (Layer(w=jnp.ones(2)), "its attribute `w` holds arrays"),
        (Layer(w=[np.ones(2)]).__call__, "its attribute `w` holds arrays"),
        (partial(jnp.add, np.ones(2)), "its attribute `args` holds arrays"),
        (partial(jnp.add, y=[np.ones(2)]), "its attribute `keywords` holds arrays"),
        (Layer(table={1: 1, "a": 2}), "its attribute `table` cannot be flattened"),
    ],
)
def test_leaves_whose_changes_would_go_unnoticed_cannot_be_static(leaf, reason) -> None:
    assert (why_not_static(leaf) or "").startswith(reason)


def test_sets_are_described_in_the_same_way_whatever_their_order() -> None:
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert repr(one) != repr(other)
    assert described_static(one) == described_static(other) == "frozenset of 0, 8"


def test_split_takes_other_objects_as_unknown() -> None:
    tree = {"f": len, "x": jnp.ones(2)}
    leaves, whole = jax.tree.flatten(tree)
    places = static_places(leaves, tree)
    assert places == (0,)
    split = StaticSplit(whole, jax.tree.structure(hold_static(tree)), ((0, len),))
    assert split.matches(leaves, whole)
    assert not split.matches([max, leaves[1]], whole)
    assert split.arrays_of(leaves) == [leaves[1]]


def test_rebuilt_state_has_the_static_leaves_of_its_target() -> None:
    state = {"f": jax.nn.relu, "w": jnp.arange(2.0), "name": "a"}
    leaves = snapshot(state)
    assert list(leaves) == ["['w']"]
    target = {"f": jax.nn.gelu, "w": jnp.zeros(2), "name": "b"}
    arrays = {path: leaf.array for path, leaf in leaves.items()}
    found = rebuild(target, forms_of(state), arrays)
    assert found["f"] is jax.nn.gelu
    assert found["name"] == "b"
    assert (found["w"] == state["w"]).all()
    with pytest.raises(TypeError, match="`\\['s'\\]` of the state is of type `set`, but a check"):
        forms_of({"s": {1}})


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("a", "b", "a static leaf of `args[0]` was 'a', is 'b'"),
        (1, 2, "a static leaf of `args[0]` was 1, is 2. Make a number that varies an array"),
        (len, "b", "a static leaf of `args[0]` was <built-in function len>, is 'b'"),
    ],
)
def test_notice_names_the_static_leaf_that_changed(old, new, text) -> None:
    trees = [jax.tree.structure((({"x": Static(x)},), {})) for x in (old, new)]
    assert describe_structures(*trees).startswith(text)


CHECKS = """
import jax, jax.numpy as jnp, numpy as np
import jaxcross
from jax import lax

jaxcross.initialize()
traces = []


def step(state, x, *, power=2.0):
    traces.append(state["name"])
    w = state["activation"](state["w"]) + lax.pmean(x, "batch") ** power
    return {**state, "w": w}, {"name": state["name"], "w": w.sum(), "f": (lax.psum,)}


crossed = jaxcross.crossover(step, axes="batch", donate_argnums=0)
start = lambda **other: {"w": jnp.arange(3.0), "activation": jnp.tanh, "name": "a", **other}

# what comes back, on the first call and on those that find a known program
state = start()
expected = np.arange(3.0, dtype=np.float32)
for n in range(4):
    x = (np.ones(3, np.float32), jnp.ones(3))[n % 2]
    state, metrics = crossed(state, x, power=2.0)
    expected = np.tanh(expected) + 1
    np.testing.assert_allclose(state["w"], expected, rtol=1e-6)
    assert state["activation"] is jnp.tanh and state["name"] == "a"
    assert metrics["name"] == "a" and metrics["f"] == (lax.psum,)
    assert isinstance(metrics["w"], jax.Array)
assert traces == ["a"], traces

# a static leaf that changes isn't ignored, and one that changes back is known
for activation, value in ((jnp.sin, np.sin(1)), (jnp.tanh, np.tanh(1)), (jnp.sin, np.sin(1))):
    got, _ = crossed(start(w=jnp.ones(3), activation=activation), jnp.zeros(3), power=2.0)
    np.testing.assert_allclose(got["w"], value, rtol=1e-6)
assert len(traces) == 2, traces
got, metrics = crossed(start(name="".join("ab")), jnp.zeros(3), power=2.0)
assert metrics["name"] == "ab"

# equal but not identical: known
count = len(traces)
crossed(start(name="".join("ab")), jnp.zeros(3), power=2.0)
assert len(traces) == count

# a static leaf where there was an array, and the other way round
either = jaxcross.crossover(
    lambda f, x: lax.pmean(f(x) if callable(f) else f * x, "batch"), axes="batch"
)
assert [float(either(f, jnp.float32(2))) for f in (jnp.float32(3), jnp.exp2, jnp.float32(4))] == [
    6, 4, 8
]

# Python numbers are traced, as ever
rate = jaxcross.crossover(lambda s, r: lax.pmean(s["w"], "batch") * r, axes="batch")
assert [float(rate(start(w=jnp.float32(2)), r)) for r in (1.5, 2.5)] == [3, 5]
assert len(rate._roots) == 1

# a donated argument
state = start()
crossed(state, jnp.zeros(3), power=2.0)
assert state["w"].is_deleted()
for bad, what in (({1}, "unhashable type: 'set'"), (object(), "it has no `__eq__`")):
    try:
        crossed(start(name=bad), jnp.zeros(3), power=2.0)
        raise SystemExit("accepted")
    except jaxcross.CutError as error:
        assert "argument `args[0]['name']` of `step` holds a" in str(error), error
        assert what in str(error), error
try:
    crossed(state, jnp.zeros(3), power=2.0)
    raise SystemExit("accepted")
except ValueError as error:
    assert "argument [0]['w'] of `step` was donated" in str(error), error

# types instead of arrays
types = jax.eval_shape(lambda: {"w": jnp.zeros(3)})
traced = crossed.trace({**start(), **types}, jnp.zeros(3), power=2.0)
assert len(traced.in_avals) == 3 and len(traced.paths[0]) == 3
print("end")
"""


def test_step_traces_arrays_and_holds_other_leaves_static() -> None:
    run_to_end(CHECKS)


def test_vmap_oracle_takes_and_returns_static_leaves() -> None:
    def step(state, x):
        return {**state, "w": state["f"](state["w"]) + jax.lax.psum(x, "batch")}

    state = {"f": jnp.negative, "w": jnp.float32(1)}
    results = vmap_oracle(step, {"batch": 2}, [(state, jnp.float32(n)) for n in (1, 2)])
    assert [(r["f"], float(r["w"])) for r in results] == [(jnp.negative, 2.0)] * 2


def test_exchange_of_parameters_says_to_filter_the_module() -> None:
    with pytest.raises(TypeError, match="`\\['f'\\]` of the `params` .* `eqx.filter\\(model, "):
        require_params({"w": jnp.ones(2), "f": len}, "`elastic_average`")
