"""The executable cache: equal segments share an entry, and only the latest unused ones are kept."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross.program import stages
from jaxcross.program.compile import MAX_IDLE_EXECUTABLES, ExecutableCache
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks
from tests.support.compiled_steps import AXES


def test_executables_of_one_mesh_do_not_serve_another() -> None:
    """Both are a `psum` over `a`, at the same coordinates."""
    cache, x, found = ExecutableCache(), jnp.ones(3), []
    for axes in ({"a": 2, "b": 1}, {"a": 1, "b": 2}):
        traced = trace(lambda x: lax.psum(2 * x, "a"), (x,), axes=axes, wire=LocalRanks())
        execution = stages.compile(stages.cut(traced, "whole"), [x], cache=cache).execution([x])
        for segment in range(len(stages.cut(traced, "whole").segments)):
            execution.run(segment)
        found.append(float(execution.outputs()[0]))
    assert found == [4, 2]


def test_equal_steps_compile_once_others_do_not_share() -> None:
    def scaled(by: np.ndarray) -> Any:
        inner = jax.jit(lambda x: x * by)  # a constant that isn't in the text of a jaxpr
        return lambda x: lax.psum(inner(x), "batch")

    def called(by: float) -> Any:
        shape = jax.ShapeDtypeStruct((5,), jnp.float32)
        return lambda x: lax.psum(
            jax.pure_callback(lambda v: np.asarray(v) * np.float32(by), shape, x), "batch"
        )

    x, cache = jnp.ones(5), ExecutableCache()

    def result(step: Any) -> np.ndarray:
        program = stages.cut(trace(step, (x,), axes=AXES, wire=LocalRanks()))
        execution = stages.compile(program, [x], cache=cache).execution([x])
        for segment in program.segments:
            execution.run(segment.index)
        return np.asarray(execution.outputs())

    ones = np.ones(5, np.float32)
    assert np.array_equal(result(scaled(ones * 2)), ones * 4)
    once = cache.compiled
    assert np.array_equal(result(scaled(ones * 2)), ones * 4) and cache.compiled == once
    assert np.array_equal(result(scaled(ones * 3)), ones * 6), "another constant"
    assert np.array_equal(result(called(2)), ones * 4)
    assert np.array_equal(result(called(3)), ones * 6), "another function behind the callback"
    assert np.array_equal(result(lambda x: lax.psum(x * 2, "batch")), ones * 4)
    assert np.array_equal(result(lambda x: lax.psum(x * 3, "batch")), ones * 6), "another literal"


class Thing:
    """Supports weak references."""


def test_latest_unused_executables_are_retained() -> None:
    cache = ExecutableCache()
    used = [cache.get(("used", n), Thing) for n in range(3)]
    for n in range(2 * MAX_IDLE_EXECUTABLES):
        cache.get(n, Thing)
    gc.collect()
    assert len(cache) == 3 + MAX_IDLE_EXECUTABLES
    assert [
        cache.get(("used", n), Thing) for n in range(3)
    ] == used and cache.compiled == 3 + 2 * MAX_IDLE_EXECUTABLES
    cache.get(2 * MAX_IDLE_EXECUTABLES - 1, Thing)
    assert cache.compiled == 3 + 2 * MAX_IDLE_EXECUTABLES, "one of the latest"
    cache.get(0, Thing)
    assert cache.compiled == 4 + 2 * MAX_IDLE_EXECUTABLES, "made again"


def test_executable_that_failed_is_tried_again() -> None:
    """If an executable can't be created, the next request tries again."""
    cache = ExecutableCache()

    def fails() -> Any:
        raise MemoryError("LLVM")

    with pytest.raises(MemoryError):
        cache.get("a", fails)
    assert isinstance(cache.get("a", Thing), Thing) and cache.compiled == 1
