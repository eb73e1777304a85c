"""Zeros replace what a rank failed to compute: exchanges still run; loops end or are rejected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross.errors import ExchangeError
from jaxcross.program import stages
from jaxcross.program.flatten import UNROLLED
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks
from tests.support.compiled_steps import AXES, compiled


def test_exchange_decided_loop_does_not_run_on_zeros() -> None:
    """A loop on zeros could keep others waiting forever, e.g. for a signal from each rank."""

    def step(x: Any) -> Any:
        def body(c: Any) -> Any:
            return lax.psum((c[1] > 3).astype(jnp.int32).max(), "batch"), c[1] + 1

        return lax.while_loop(lambda c: c[0] < 2, body, (0, jnp.sin(x)))[1]

    args = [jnp.ones(3)]
    done, _ = compiled(step, args=args, donate=())
    (loop,) = [s.index for s in done.program.collectives]
    with pytest.raises(ExchangeError, match="^segment 1 of `step` exchanges inside a `while`"):
        done.execution(args).zero_inputs(loop)


@pytest.mark.mostly_integration("65")
@pytest.mark.parametrize("length", [0, UNROLLED + 1])
def test_a_loop_that_ranks_vote_on_ends_on_zeros(length: int) -> None:
    """A voted loop ends at once on zeros, although they satisfy its predicate; even in a `scan`."""

    def step(x: Any, limit: Any) -> Any:
        def grow(c: Any, _: Any = None) -> Any:
            return lax.while_loop(
                lambda v: v.max() < limit + 1, lambda v: v * 2 + 0 * lax.psum(v, "batch"), c
            ), None

        x = jnp.sin(x)
        return lax.scan(grow, x, None, length=length)[0] if length else grow(x)[0]

    args = [jnp.ones(3), jnp.float32(8)]
    done, _ = compiled(step, args=args, donate=())
    execution = done.execution(args)
    for segment in done.program.segments:
        if segment.kind == "collective":
            execution.zero_inputs(segment.index)
        execution.run(segment.index)
    assert not np.asarray(execution.outputs()).any()


@pytest.mark.integration
def test_zero_buffers_stand_in_for_what_failed() -> None:
    """Zeros replace even random keys, which a loop with an exchange may carry."""

    def step(x: Any, key: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            v, k = c
            return (
                lax.psum(v + jax.random.normal(k, v.shape), "batch"),
                jax.random.split(k)[0],
            ), None

        (x, key), _ = lax.scan(body, (x, key), None, length=UNROLLED + 1)
        return lax.pmax(x.astype(jnp.bfloat16), "batch")

    args = (jnp.ones((3,)), jax.random.key(3))
    traced = trace(step, args, axes=AXES, wire=LocalRanks())
    done = stages.compile(stages.cut(traced, bucket_bytes=0), jax.tree.leaves((args, {})))
    execution = done.execution([*args])
    for segment in done.program.segments:
        if segment.kind == "collective":
            execution.zero_inputs(segment.index)
            execution.run(segment.index)
            execution.wait_outputs(segment.index)
    assert args[0][0] == 1


def test_late_segment_does_not_replace_zeros() -> None:
    """Zeros of the exchange lane stay, even if the segment they replace is dispatched late."""

    def step(x: Any) -> Any:
        return lax.psum(jnp.sin(x), "batch")

    done = stages.compile(
        stages.cut(trace(step, (jnp.ones(3),), axes=AXES, wire=LocalRanks())), [jnp.ones(3)]
    )
    (exchange,) = done.program.collectives
    execution = done.execution([jnp.ones(3)])
    execution.zero_inputs(exchange.index)
    for segment in done.program.segments:
        execution.run(segment.index)
        execution.wait_outputs(segment.index)
    assert not execution.outputs().any()
