"""With an accelerator, compute segments pack and unpack shared buffers: few arrays go over."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxcross.program import stages
from jaxcross.program.ir import Program
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide

LEAVES = 12


def program(step: Any, *, packed: bool, cut: Any = "whole", **options: Any) -> Program:
    args = ({f"w{n}": jnp.ones((n + 1, 4)) for n in range(LEAVES)}, jnp.ones(4))
    with mock.patch("jaxcross.program.cut.on_accelerator", return_value=packed):
        return stages.cut(trace(step, args, axes={"batch": 2}, wire=LocalRanks()), cut, **options)


def sgd(params: Any, x: Any) -> Any:
    grads = jax.grad(lambda params: sum(jnp.sum(jnp.tanh(w * x)) for w in params.values()))(params)
    return jax.tree.map(lambda w, g: w - g, params, jax.lax.pmean(grads, "batch"))


def twice(params: Any, x: Any) -> Any:
    """The second exchange depends on the first one, in a single segment."""
    sums = jax.lax.psum({name: w * x for name, w in params.items()}, "batch")
    return jax.lax.psum({name: w * 2 for name, w in sums.items()}, "batch")


def collective_sizes(program: Program) -> list[tuple[int, int]]:
    return [(len(s.inputs), len(s.outputs)) for s in program.segments if s.kind == "collective"]


@pytest.mark.integration
def test_one_array_a_buffer_is_handed_over() -> None:
    assert collective_sizes(program(sgd, packed=False)) == [(LEAVES, LEAVES)]
    assert collective_sizes(program(sgd, packed=True)) == [(1, 1)]
    assert collective_sizes(program(sgd, packed=True, cut=3)) == [(1, 1)] * 3
    assert collective_sizes(program(sgd, packed=True, bucket_bytes=0)) == [(LEAVES, LEAVES)]


@pytest.mark.parametrize("step", [sgd, twice])
@pytest.mark.parametrize("cut", ["whole", 2])
def test_ranks_exchange_the_same_things(step: Any, cut: Any) -> None:
    """Ranks with and without an accelerator exchange the same things, in equally many segments."""
    one, other = (program(step, packed=packed, cut=cut) for packed in (False, True))
    assert one.exchange_signature() == other.exchange_signature()
    assert [s.kind for s in one.segments] == [s.kind for s in other.segments]


def test_what_an_exchange_of_the_same_segment_needs_stays() -> None:
    """Between two exchanges of one segment, nothing goes to the accelerator and back."""
    one, other = (program(twice, packed=packed) for packed in (False, True))
    assert len(one.segments) == len(other.segments)


def test_checked_decisions_stay_in_collective_segments() -> None:
    """The number of ranks that took a branch is exchanged along with other sums.

    The segment that exchanges it returns it.
    """

    def step(x: Any) -> Any:
        branches = [lambda v: jax.lax.psum(v, "batch"), lambda v: v - 1]
        return [jax.lax.cond(x[n] > n, *branches, x) for n in range(2)], jax.lax.psum(
            x.astype(int), "batch"
        )

    args = (jnp.ones(4),)
    traced = decide(trace(step, args, axes={"batch": 2}, wire=LocalRanks()), list(args))
    assert traced.decisions
    for packed in (False, True):
        with mock.patch("jaxcross.program.cut.on_accelerator", return_value=packed):
            program = stages.cut(traced)
        checking = [segment for segment in program.segments if segment.decisions]
        assert checking and all(segment.kind == "collective" for segment in checking)
