"""Executables are shared by segments that compute the same and by no others, whatever their text leaves out."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxcross.program.digest import segment_key
from jaxcross.program.trace import trace
from jaxcross.testing_wire import LocalRanks

X = jnp.ones(2)


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """Two of them print alike: NumPy leaves out the middle of a long array."""

    table: np.ndarray

    def __call__(self, x: Any) -> Any:
        return np.asarray(x) * self.table[1500]

    def method(self, x: Any) -> Any:
        return self(x)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Equal to every other one."""

    by: float = dataclasses.field(compare=False, repr=False)

    def __call__(self, x: Any) -> Any:
        return np.asarray(x) * np.float32(self.by)


def lookup(k: int) -> Lookup:
    return Lookup(np.where(np.arange(3000) == 1500, k, 0).astype(np.float32))


def keys(callback: Any, call: Any = jax.pure_callback) -> list[Any]:
    def step(x: Any) -> Any:
        return call(callback, jax.ShapeDtypeStruct((2,), jnp.float32), lax.pmean(x, "batch"))

    program = trace(step, (X,), axes={"batch": 2}, wire=LocalRanks()).cut()
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


def test_a_method_is_the_same_however_often_it_is_taken() -> None:
    table = lookup(1)
    assert keys(table.method) == keys(table.method)


def test_what_a_callback_gets_beside_its_operands_counts() -> None:
    seen: Any = [[], []]
    one, other = (functools.partial(lambda into, x: into.append(x) or x, into) for into in seen)
    assert keys(one) != keys(other), "the lists are equal now, but not the same"


def test_a_key_keeps_what_it_tells_apart() -> None:
    callback = lookup(1)
    kept, alive = keys(callback), weakref.ref(callback)
    del callback
    jax.clear_caches()
    gc.collect()
    assert alive() is not None and kept, "another object could get its place in memory, hence its identity"
