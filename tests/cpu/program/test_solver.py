"""Linear solvers whose operator exchanges give JAX's own results, on all ranks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxcross.program import stages
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, run_program, vmap_oracle
from tests.support.solvers import RTOL, STEPS, rows, weights

pytestmark = pytest.mark.usefixtures("compiled_quickly")

RANKS = 2
AXES = {"batch": RANKS}


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * np.max(np.abs(b)))


@pytest.mark.mostly_integration("a solver alone")
@pytest.mark.parametrize("name", STEPS)
def test_a_solver_that_exchanges_equals_vmap(name: str) -> None:
    args = [(weights(), rows(rank)) for rank in range(RANKS)]
    program = stages.cut(trace(STEPS[name], args[0], axes=AXES, wire=LocalRanks()))
    got = run_program(program, args)
    want = vmap_oracle(STEPS[name], AXES, args)
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs)


def test_a_solver_without_exchange_stays_as_it_is() -> None:
    """JAX's own equation, which includes the rank's index."""

    def step(x: Any) -> Any:
        scale = 2.0 ** jax.lax.axis_index("batch")
        return jax.lax.psum(
            jax.lax.custom_linear_solve(lambda v: v * scale, x, lambda _, b: b / scale), "batch"
        )

    assert "custom_linear_solve" in str(trace(step, (weights(),), axes=AXES, wire=LocalRanks()))


def custom_vmap(function: Any) -> Any:
    called = jax.custom_batching.custom_vmap(function)
    called.def_vmap(lambda size, batched, x: (x, True))  # for a user's `vmap`, which isn't there
    return called


@pytest.mark.parametrize(
    "wrap", [custom_vmap, lambda function: jax.lax.composite(function, "own.call")]
)
def test_other_calls_that_exchange_are_inlined(wrap: Any) -> None:
    call = wrap(lambda x: jax.lax.psum(2 * x, "batch"))
    program = stages.cut(trace(lambda x: call(x) + 1, (weights(),), axes=AXES, wire=LocalRanks()))
    for (got,) in run_program(program, [(weights(),)] * RANKS):
        np.testing.assert_array_equal(got, 2 * RANKS * weights() + 1)
