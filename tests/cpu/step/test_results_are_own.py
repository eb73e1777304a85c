"""As with `jax.jit`, results are unshared arrays: donating one changes nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross.program import stages
from jaxcross.program.execution import Compiled
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks

AXES = {"batch": 2}
ROOT = jax.random.key(7)
FIRST = jnp.arange(4.0)
TABLE = np.arange(5000, dtype=np.float32)


def compiled(step: Any, args: Any, donate: tuple[int, ...] = ()) -> Compiled:
    traced = trace(step, args, axes=AXES, wire=LocalRanks(), donate_argnums=donate)
    return stages.compile(stages.cut(traced), jax.tree.leaves((args, {})))


def run(done: Compiled, args: Any) -> Any:
    execution = done.execution(jax.tree.leaves((args, {})))
    for segment in done.program.segments:
        execution.run(segment.index)
    return execution.outputs()


def place(x: Any) -> int:
    return (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    ).unsafe_buffer_pointer()


def delete(tree: Any) -> None:
    for x in jax.tree.leaves(tree):
        x.delete()


def test_results_that_repeat_can_be_donated_together() -> None:
    def step(state: Any, x: Any) -> Any:  # the target network was just computed
        p = state["p"] - lax.pmean(x, "batch") + 0 * state["t"]
        return {"p": p, "t": p}

    state = {"p": jnp.ones(4), "t": jnp.zeros(4)}
    done = compiled(step, (state, jnp.ones(4)), (0,))
    for n in range(3):
        state = run(done, (state, jnp.ones(4)))
        assert np.array_equal(state["p"], np.full(4, 1.0 - (n + 1))) and np.array_equal(
            state["p"], state["t"]
        )
        assert place(state["p"]) != place(state["t"])


@pytest.mark.parametrize("donate", [(), (0,)])
def test_constants_outlive_what_becomes_of_the_results(donate: tuple[int, ...]) -> None:
    def step(state: Any, x: Any) -> Any:
        return {
            "acc": FIRST,
            "w": state["w"] + state["acc"] * lax.pmean(x.mean(), "batch"),
            "key": ROOT,
            "t": TABLE,
        }

    def fresh() -> Any:
        return {
            "acc": jnp.ones(4),
            "w": jnp.ones(4),
            "key": jax.random.key(1),
            "t": jnp.zeros(5000),
        }

    done = compiled(step, (fresh(), jnp.ones(4)), donate)
    for _ in range(2):
        state = fresh()
        for _ in range(3):
            state = run(done, (state, jnp.ones(4)))
        assert np.array_equal(state["w"], 2.0 + 2 * np.arange(4.0)) and np.array_equal(
            state["t"], TABLE
        )
        delete(state)
    assert np.array_equal(FIRST, np.arange(4.0)) and not ROOT.is_deleted()


@pytest.mark.integration
def test_numpy_constant_has_its_value_at_compilation() -> None:
    """A NumPy constant keeps the value it had when the step was compiled."""
    for count in (16, 100_000, 20_000_000):  # JAX takes, copies, copies later
        raw = np.empty(count + 16, np.float32)
        start = -raw.ctypes.data % 64 // 4  # JAX takes memory aligned like this as it is
        table = raw[start : start + count]
        table[:] = 1
        x = jnp.ones(count)
        done = compiled(lambda x, table=table: lax.pmean(x, "batch") * table, (x,))
        table[:] = 5
        assert np.array_equal(run(done, (x,)), np.ones(count))


@pytest.mark.integration
def test_cuts_and_variants_share_one_constant_copy() -> None:
    def step(n: Any, x: Any) -> Any:
        return lax.cond(n % 2 == 0, lambda x: lax.pmean(x, "batch"), lambda x: x, x * FIRST) + FIRST

    args = (jnp.int32(0), jnp.ones(4))
    traced = trace(step, args, axes=AXES, wire=LocalRanks())
    programs = [stages.cut(traced.decide(choice), cut) for choice in (0, 1) for cut in ("whole", 2)]
    copies = [stages.compile(program).constants for program in programs]
    assert len({place(x) for constants in copies for x in constants} - {place(FIRST)}) == 1
    assert all(
        np.array_equal(run(stages.compile(p), args), done)
        for p, done in zip(programs, [2 * FIRST] * 4, strict=True)
    )


def test_inputs_that_come_back_are_copies() -> None:
    def step(state: Any, x: Any) -> Any:
        return state, {"again": state["a"], "sum": lax.psum(x, "batch")}

    state = {"a": jnp.arange(3.0), "key": jax.random.key(3), "weak": jnp.asarray(2.0)}
    results = run(compiled(step, (state, jnp.ones(2))), (state, jnp.ones(2)))
    wanted = jax.jit(lambda s: (s, s["a"]))(state)
    assert len({place(x) for x in jax.tree.leaves((state, results))}) == len(
        jax.tree.leaves((state, results))
    )
    assert [jax.typeof(x) for x in jax.tree.leaves(results[0])] == [
        jax.typeof(x) for x in jax.tree.leaves(wanted[0])
    ]
    delete(results)
    assert np.array_equal(state["a"], np.arange(3.0)) and jax.random.bits(state["key"]) is not None


def test_donated_inputs_that_come_back_are_moved_once() -> None:
    def step(state: Any, x: Any) -> Any:
        return {"a": state["a"], "b": state["a"], "n": state["n"] + lax.psum(x, "batch")}

    state = {"a": jnp.ones(4), "b": jnp.zeros(4), "n": jnp.zeros(())}
    done = compiled(step, (state, jnp.ones(())), (0,))
    before, peak = place(state["a"]), done.peak_live_bytes()
    state = run(done, (state, jnp.ones(())))
    assert place(state["a"]) == before != place(state["b"])
    assert run(done, (state, jnp.ones(())))["n"] == 4
    frozen = compiled(
        lambda s, x: {**s, "n": s["n"] + lax.psum(x, "batch")}, (state, jnp.ones(())), (0,)
    )
    assert frozen.passthroughs == ((0, True), (1, True)), "a frozen part of the state costs nothing"
    assert frozen.peak_live_bytes() <= peak


@pytest.mark.parametrize("donate", [(), (0,)])
def test_what_is_no_array_of_jax_comes_back_as_one(donate: tuple[int, ...]) -> None:
    given = {
        "zeros": np.zeros(16),
        "long": np.int64(5),
        "n": 3,
        "f": 0.5,
        "yes": True,
        "half": np.ones(2, np.float16),
    }

    def step(state: Any, x: Any) -> Any:
        return state, lax.pmean(x, "batch")

    out, _ = run(compiled(step, (given, jnp.ones(2)), donate), (given, jnp.ones(2)))
    given["zeros"][:] = 7
    wanted = jax.jit(lambda s: s)({**given, "zeros": np.zeros(16)})
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
        assert isinstance(got, jax.Array) and np.array_equal(got, want)
        assert jax.typeof(got) == jax.typeof(want)


def test_segment_results_are_returned_as_they_are() -> None:
    def step(params: Any, x: Any) -> Any:
        return params - lax.pmean(x, "batch"), x.sum(), 0.0

    done = compiled(step, (jnp.ones(4), jnp.ones(4)), (0,))
    assert done.passthroughs == ()
