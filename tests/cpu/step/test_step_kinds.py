"""Which callables `crossover` accepts, and what it suggests instead of the others."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jaxcross
from jaxcross.errors import CutError
from jaxcross.program import stages
from jaxcross.program.step_checks import check_step
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks

STATE, BATCH = jnp.zeros(2), jnp.ones(2)
SPECS = {"in_specs": (PartitionSpec(), PartitionSpec("batch")), "out_specs": PartitionSpec()}
REMEDY = (
    "Give `crossover` the function itself, pmap's `axis_name` as `axes`, and arguments without the "
    "leading axis"
)


def step(state: Any, batch: Any) -> Any:
    return state + jax.lax.pmean(batch.sum(), "batch")


class Called:
    def __call__(self, state: Any, batch: Any) -> Any:
        return step(state, batch)

    def method(self, state: Any, batch: Any) -> Any:
        return step(state, batch)


def sharded(inner: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(inner, mesh=AbstractMesh((2,), ("batch",)), **SPECS)


PMAPPED = jax.pmap(step, axis_name="batch")
KINDS = {
    "plain": step,
    "jit": jax.jit(step),
    "jit of jit": jax.jit(jax.jit(step, donate_argnums=0)),
    "partial": functools.partial(step),
    "partial of jit": functools.partial(jax.jit(step)),
    "object": Called(),
    "method": Called().method,
    "shard_map of jit": sharded(jax.jit(step)),
    "jit of shard_map": jax.jit(sharded(step)),
    "remat": jax.checkpoint(step),
    "remat of jit": jax.checkpoint(jax.jit(step)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_function_is_the_same_step(kind: str) -> None:
    check_step(KINDS[kind], kind)
    program = stages.cut(trace(KINDS[kind], (STATE, BATCH), axes={"batch": 2}, wire=LocalRanks()))
    assert [x.op for x in program.exchanges] == ["psum"]


@pytest.mark.parametrize(
    "wrong",
    [
        PMAPPED,
        jax.jit(PMAPPED),
        functools.partial(PMAPPED),
        jax.pmap(step, "batch", donate_argnums=0),
    ],
)
def test_a_pmap_is_refused_with_what_to_give_instead(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"^`step` is a `jax.pmap`. .*{REMEDY}"):
        jaxcross.crossover(wrong, axes="batch")


@pytest.mark.parametrize(
    "lengths", [(2,), (1, 2)], ids=["a rank's own batch", "with an axis of devices"]
)
def test_a_step_that_calls_a_pmap_is_refused_likewise(lengths: tuple[int, ...]) -> None:
    with pytest.raises(CutError, match=f"^`<lambda>` calls a `jax.pmap`. .*{REMEDY}"):
        trace(
            lambda state, batch: PMAPPED(state, batch),
            (jnp.zeros(lengths), jnp.ones(lengths)),
            axes={"batch": 2},
            wire=LocalRanks(),
        )


def test_static_jit_arguments_must_be_named_twice() -> None:
    jitted = jax.jit(lambda state, batch, n: n * step(state, batch), static_argnums=2)
    with pytest.raises(
        CutError,
        match=r"^`<lambda>` .* Name its static arguments in `static_argnums` or",
    ):
        trace(jitted, (STATE, BATCH, 3), axes={"batch": 2}, wire=LocalRanks())


def test_what_is_no_function_is_refused() -> None:
    jitted = jax.jit(lambda state: state)
    for wrong, text in (
        (jitted.lower(STATE), "not a `Lowered`"),
        (jitted.lower(STATE).compile(), "not a `Compiled`"),
        (Called, "not the class `Called`"),
        (3, "not `int`"),
    ):
        with pytest.raises(TypeError, match=f"^`crossover` takes a function, {text}"):
            jaxcross.crossover(wrong, axes="batch")
    with pytest.raises(
        TypeError,
        match=r"^`step` is a crossover step already. Pass its function to `crossover`, `step\.",
    ):
        jaxcross.crossover(jaxcross.crossover(step, axes="batch"), axes="batch")
