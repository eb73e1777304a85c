"""Executables are shared only by segments that compute the same, whatever their text omits."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.random import define_prng_impl, threefry_prng_impl

from jaxcross.program import stages
from jaxcross.program.digest import _Same, program_digest, segment_key
from jaxcross.program.ir import Program
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks

X = jnp.ones(2)


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """Two of these may print alike, since NumPy abbreviates long arrays."""

    table: np.ndarray

    def __call__(self, x: Any) -> Any:
        return np.asarray(x) * self.table[1500]

    def method(self, x: Any) -> Any:
        return self(x)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Compares equal to every other instance."""

    by: float = dataclasses.field(compare=False, repr=False)

    def __call__(self, x: Any) -> Any:
        return np.asarray(x) * np.float32(self.by)


def lookup(k: int) -> Lookup:
    return Lookup(np.where(np.arange(3000) == 1500, k, 0).astype(np.float32))


def keys(callback: Any, call: Any = jax.pure_callback) -> list[Any]:
    def step(x: Any) -> Any:
        return call(callback, jax.ShapeDtypeStruct((2,), jnp.float32), lax.pmean(x, "batch"))

    program = stages.cut(trace(step, (X,), axes={"batch": 2}, wire=LocalRanks()))
    return [segment_key(s) for s in program.segments]


@pytest.mark.parametrize("call", [jax.pure_callback, io_callback])
@pytest.mark.parametrize(
    "pair",
    [
        (lookup(1), lookup(10)),
        (lookup(1).method, lookup(10).method),
        (Scale(1), Scale(2)),
        (functools.partial(lookup(1)), functools.partial(lookup(10))),
        (jax.jit(lambda x: x), jax.jit(lambda x: x)),
    ],
    ids=["object", "method", "equal", "partial", "jitted"],
)
def test_callbacks_that_look_alike_share_nothing(pair: Any, call: Any) -> None:
    one, other = pair
    assert keys(one, call) != keys(other, call)
    assert keys(one, call) == keys(one, call), "traced again"


def test_bound_method_has_the_same_key_every_time() -> None:
    """A bound method has the same key no matter how often it's looked up."""
    table = lookup(1)
    assert keys(table.method) == keys(table.method)


def test_bound_arguments_of_a_callback_count() -> None:
    """Arguments bound to a callback are part of its key."""
    seen: Any = [[], []]
    one, other = (functools.partial(lambda into, x: into.append(x) or x, into) for into in seen)
    assert keys(one) != keys(other), "the lists are equal now, but not the same"


def test_a_key_keeps_what_it_tells_apart() -> None:
    callback = lookup(1)
    kept, alive = keys(callback), weakref.ref(callback)
    del callback
    jax.clear_caches()
    gc.collect()
    assert alive() is not None and kept, (
        "another object could get its place in memory, hence its identity"
    )


def noisy(impl: Any = None) -> Program:
    """Returns a step whose key is an array of words, like that of `jax.random.PRNGKey`."""

    def step(words: Any, x: Any) -> Any:
        key = words if impl is None else jax.random.wrap_key_data(words, impl=impl)
        return lax.pmean(x + jax.random.normal(key, x.shape), "batch")

    return stages.cut(trace(step, (jax.random.PRNGKey(0), X), axes={"batch": 2}, wire=LocalRanks()))


def rematerialised(by: float = 1.0) -> Program:
    """Returns a step whose backward pass decides what was saved by newly created functions."""

    def saves_nothing(*_: Any, **__: Any) -> bool:
        return False

    @functools.partial(jax.checkpoint, policy=saves_nothing)
    def inner(w: Any) -> Any:
        return jnp.sin(jnp.sin(w) * by)

    outer = jax.checkpoint(
        lambda w: jnp.cos(inner(w)), policy=jax.checkpoint_policies.save_only_these_names("y")
    )
    grad = jax.grad(lambda w: outer(w).sum())
    return stages.cut(
        trace(lambda w: lax.pmean(grad(w), "batch"), (X,), axes={"batch": 2}, wire=LocalRanks())
    )


STEPS = (noisy, rematerialised)


@pytest.mark.parametrize("make", STEPS)
def test_wrapped_functions_are_keyed_by_computation(make: Any) -> None:
    """Functions that JAX wraps are recognised by what they compute."""
    program = make()
    assert any(
        f"{name}[" in str(program.traced) for name in ("random_wrap", "checkpoint", "remat2")
    ), "it is there"
    assert not any(isinstance(part, _Same) for s in program.segments for part in segment_key(s))
    assert program_digest(make()) == program_digest(program), "with functions of its own"


def test_what_a_checkpoint_recomputes_counts() -> None:
    assert program_digest(rematerialised(1.0)) != program_digest(rematerialised(2.0))


@pytest.mark.integration
def test_steps_are_known_again_in_other_processes() -> None:
    script = (
        "import tests.cpu.program.test_digest as t; print(*(t.program_digest(make()) for make in "
        "t.STEPS))"
    )
    path = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    others = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    said = [other.communicate(timeout=240)[0] for other in others]
    assert said[0] == said[1] and len(said[0].split()) == len(STEPS)


@pytest.mark.parametrize("loop", [False, True])
def test_contexts_count(loop: bool) -> None:
    def make(partitionable: bool) -> Program:
        def noise(key: Any) -> Any:
            with jax.threefry_partitionable(partitionable):
                return jax.random.normal(key, X.shape)

        def step(key: Any, x: Any) -> Any:
            if loop:
                return lax.pmean(
                    lax.scan(lambda c, _: (c + noise(key), None), x, None, length=2)[0], "batch"
                )
            return lax.pmean(x + noise(key), "batch")

        return stages.cut(trace(step, (jax.random.key(0), X), axes={"batch": 2}, wire=LocalRanks()))

    assert program_digest(make(True)) != program_digest(make(False))
    assert program_digest(make(True)) == program_digest(make(True))


def test_generators_with_equal_names_share_nothing() -> None:
    impl: Any = threefry_prng_impl

    def define(bits: Any) -> Any:
        return define_prng_impl(
            key_shape=impl.key_shape,
            seed=impl.seed,
            split=impl.split,
            random_bits=bits,
            fold_in=impl.fold_in,
            name=impl.name,
            tag=impl.tag,
        )

    def negated(*args: Any) -> Any:
        return ~impl.random_bits(*args)

    found = [
        segment_key(noisy(i).segments[0]) for i in (define(impl.random_bits), define(negated), None)
    ]
    assert len(set(found)) == 3
