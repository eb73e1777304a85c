"""The work of tracing and cutting is linear in the step's size: counts calls rather than time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross.program import shared_buffers, stages
from jaxcross.program.digest import program_digest
from jaxcross.program.ir import Program
from jaxcross.program.lowered import compile_with_arguments
from jaxcross.program.trace import trace
from jaxcross.program.verify import verify
from jaxcross.testing import LocalRanks, run_program, vmap_oracle
from tests.support.calls import count_calls

AXES = {"batch": 2}


def mean(x: Any) -> Any:
    return lax.pmean(x, "batch")


def leaves(count: int) -> dict[str, jax.Array]:
    return {f"{n}": jnp.ones(4) for n in range(count)}


def gradients(state: Any, x: Any) -> Any:
    return {name: v - 0.1 * mean(v * x) for name, v in state.items()}


def chain(state: Any, x: Any) -> Any:
    """Each exchange needs the previous one, with light work in between."""
    total = x
    for v in state.values():
        total = mean(total * v[0]) + x
    return total


def recomputed(state: Any, x: Any) -> Any:
    def loss(state: Any) -> Any:
        total = x
        for v in state.values():
            total = jax.checkpoint(lambda total, v: mean(jnp.tanh(total * v[0])))(total, v)
        return total

    return jax.grad(loss)(state)


def one_conditional(state: Any, x: Any) -> Any:
    return lax.cond(x > 0, lambda s: {name: mean(v) for name, v in s.items()}, lambda s: s, state)


def conditionals(state: Any, x: Any) -> Any:
    return {name: lax.cond(x > 0, mean, lambda v: v, v) for name, v in state.items()}


def conditionals_in_one(state: Any, x: Any) -> Any:
    def inner(state: Any) -> Any:
        return {name: lax.cond(v[0] > x, mean, lambda v: v, v) for name, v in state.items()}

    return lax.cond(x > 0, inner, lambda s: s, state)


def made(step: Callable[..., Any], count: int, cut: Any = "whole") -> Program:
    return stages.cut(
        trace(
            step, (leaves(count), jnp.float32(1)), axes=AXES, wire=LocalRanks(), donate_argnums=(0,)
        ),
        cut,
    )


@pytest.mark.mostly_integration("gradients-16")
@pytest.mark.parametrize("cut", ["whole", 16])
@pytest.mark.parametrize(
    "step",
    [gradients, chain, recomputed, one_conditional, conditionals, conditionals_in_one],
    ids=lambda f: f.__name__,
)
def test_work_grows_as_the_leaves(step: Callable[..., Any], cut: Any) -> None:
    """Four times the leaves take four times the calls, to a tenth; quadratic would be 16."""

    def work() -> None:
        program = made(step, count, cut)
        verify(program), program_digest(program), program.text(), program.exchange_hash()

    count = 8
    work()  # once per process
    count = 16
    few = count_calls(work)
    count = 64
    assert count_calls(work) < 4.4 * few


@pytest.mark.parametrize("step", [one_conditional, conditionals_in_one], ids=lambda f: f.__name__)
def test_a_conditional_exchanges_in_one_segment(step: Callable[..., Any]) -> None:
    """A conditional has one segment for any number of exchanges that don't need one another."""
    assert [len(made(step, count).segments) for count in (2, 50)] == [3, 3]


def of_two_levels(x: Any) -> Any:
    def branch(x: Any) -> Any:
        first = mean(x)
        second = mean(jnp.tanh(x))  # needs no other exchange, though it comes after one
        return mean(jnp.sin(first)) + second

    return lax.cond(x[0] > 0, branch, lambda x: x, x)


@pytest.mark.integration
def test_exchanges_of_a_conditional_go_level_by_level() -> None:
    traced = trace(of_two_levels, (jnp.ones(4),), axes=AXES, wire=LocalRanks())
    program = stages.cut(traced, bucket_bytes=0)
    assert [sum(x.shape == (4,) for x in s.exchanges) for s in program.collectives] == [2, 1]
    args = [(np.arange(1, 5, dtype=np.float32),), (np.arange(2, 6, dtype=np.float32),)]
    got = run_program(program, args)
    for (mine,), wanted in zip(got, vmap_oracle(of_two_levels, AXES, args), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)


def test_ordered_callbacks_in_a_cond_keep_their_order() -> None:
    """A callback between two exchanges stays after the first, and so does what follows it."""

    def step(x: Any) -> Any:
        def branch(x: Any) -> Any:
            jax.debug.print("a", ordered=True)
            first = mean(x)
            jax.debug.print("b {}", first, ordered=True)
            jax.debug.print("c", ordered=True)
            return first + mean(jnp.tanh(x))

        return lax.cond(x[0] > 0, branch, lambda x: x, x)

    traced = trace(step, (jnp.ones(4),), axes=AXES, wire=LocalRanks())
    conds = [
        str(e.params["branches"]) for e in traced.jaxpr.jaxpr.eqns if e.primitive.name == "cond"
    ]
    found = [re.findall(r"fmt='?(\w)", text) for text in conds]
    assert found == [["a"], ["b", "c"]]


@pytest.mark.mostly_integration("1", "5")
@pytest.mark.parametrize("count", [1, 3, 4, 5, 21])
def test_a_buffer_gives_back_what_was_put_in(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses one concatenation, several, and several nested ones: four operands are the most here."""
    monkeypatch.setattr(shared_buffers, "OPERANDS", 4)
    shapes = [((), (3,), (2, 2))[n % 3] for n in range(count)]
    values = [jnp.full(shape, n) for n, shape in enumerate(shapes)]
    flat = shared_buffers.packed(values)
    assert flat.tolist() == [n for n, v in enumerate(values) for _ in range(v.size)]
    for parted in (
        shared_buffers.unpacked(flat, shapes),
        shared_buffers.split(flat, [v.size for v in values]),
    ):
        assert all(
            np.array_equal(np.ravel(a), np.ravel(b)) for a, b in zip(parted, values, strict=True)
        )


def test_slices_of_one_size_share_a_kernel() -> None:
    """The offsets of pieces are arguments of the executable instead of being compiled into it."""
    sizes = [3, 5, 3, 3, 7, 3]
    flat, host = np.arange(sum(sizes), dtype=np.float32), jax.devices("cpu")[0]
    struct = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    bound = compile_with_arguments(
        lambda x: shared_buffers.split(x, sizes), [struct], name="split", host=host, place=None
    )
    wanted = np.split(flat, np.cumsum(sizes)[:-1])
    assert all(map(np.array_equal, bound(flat), wanted))
    assert [int(x[0]) for x in bound.first] == [0, 8, 11, 21]
    assert len(re.findall(r" slice\(", bound.as_text())) == 2  # of sizes 5 and 7
