"""With an accelerator, small work between exchanges stays on the host.

No array has to go there and back for it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxcross import exchange
from jaxcross.program import stages
from jaxcross.program.ir import Program
from jaxcross.program.trace import Traced, trace
from jaxcross.testing import LocalRanks, run_program

BIG = 4_000_000  # elements, three times as many bytes as are free


def traced(step: Any, *args: Any, ranks: int = 4) -> Traced:
    return trace(step, args, axes={"batch": ranks}, wire=LocalRanks())


def program(flat: Traced, *, accelerator: bool = True, **options: Any) -> Program:
    with mock.patch("jaxcross.program.cut.on_accelerator", return_value=accelerator):
        return stages.cut(flat, **options)


def exchanges(step: Any, *args: Any, accelerator: bool = True) -> int:
    """Returns the number of collective segments: work between two of them is on the accelerator."""
    return len(program(traced(step, *args), accelerator=accelerator).collectives)


def adasum(grads: Any) -> Any:
    return exchange.adasum("batch").update(grads, optax.EmptyState())[0]


@pytest.mark.mostly_integration("2", "3")
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_adasum_is_handed_over_once(ranks: int) -> None:
    """Only the gradients are handed over: indices and masks are created on the host."""
    grads = [np.zeros(shape, np.float32) for shape in ((70,), (8, 6), ())]
    flat = traced(adasum, grads, ranks=ranks)
    assert len(program(flat, accelerator=False).collectives) > 1
    kept = program(flat)
    (collective,) = kept.collectives
    constants = set(kept.inputs[: kept.constants])
    given = [kept.values[v].nbytes for v in collective.inputs if v not in constants]
    assert sum(given) < 2 * sum(x.nbytes for x in grads)


@pytest.mark.integration
def test_adasum_keeps_its_bits_on_the_host() -> None:
    """Compares, equation by equation, with the cut for a CPU."""
    rng = np.random.default_rng(0)
    leaves = [[rng.normal(size=(9,)).astype(np.float32)] for _ in range(3)]
    flat = traced(adasum, leaves[0], ranks=3)
    apart, kept = (run_program(program(flat, accelerator=way), leaves) for way in (False, True))
    for a, b in zip(apart, kept, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.integration
def test_adasum_of_a_large_model_is_handed_over_once() -> None:
    """Adasum's passes take less time than its exchanges, however large the gradients are."""
    large = {
        "w": jax.ShapeDtypeStruct((50 * BIG,), jnp.float32),
        "b": jax.ShapeDtypeStruct((3,), jnp.float32),
    }
    assert exchanges(adasum, large) == 1


def test_a_dot_product_of_what_arrived_stays() -> None:
    def step(x: Any) -> Any:
        mean = lax.pmean(x, "batch")
        return mean, lax.pmax(jnp.vdot(mean, mean), "batch")

    assert exchanges(step, jax.ShapeDtypeStruct((BIG,), jnp.float32)) == 1
    assert exchanges(step, jax.ShapeDtypeStruct((BIG,), jnp.float32), accelerator=False) == 2


def test_matrix_products_go_to_the_accelerator() -> None:
    def step(x: Any) -> Any:
        mean = lax.pmean(x, "batch")
        return lax.pmean(mean @ mean, "batch")

    assert exchanges(step, jnp.ones((16, 16))) == 2


@pytest.mark.parametrize(("passes", "expected"), [(4, 1), (12, 2)])
def test_many_passes_go_to_the_accelerator(passes: int, expected: int) -> None:
    """An operation that takes longer on the host than the exchange itself isn't small."""

    def step(x: Any) -> Any:
        x = lax.psum(x, "batch")
        for n in range(passes):
            x = jnp.cumsum(x + n)
        return lax.psum(x, "batch")

    assert exchanges(step, jax.ShapeDtypeStruct((BIG,), jnp.float32)) == expected


@pytest.mark.parametrize(("tables", "expected"), [(2, 1), (10, 2)])
def test_what_the_accelerator_must_bring_costs_too(tables: int, expected: int) -> None:
    """The tables were never exchanged, and the host would need all of them for a single number."""

    def step(tables: Any, x: Any) -> Any:
        x = lax.psum(x, "batch")
        return lax.psum(jnp.max(sum(table * x for table in tables)), "batch")

    array = jax.ShapeDtypeStruct((BIG,), jnp.float32)
    assert exchanges(step, [array] * tables, array) == expected


def test_ranks_of_unequal_batches_decide_alike() -> None:
    """Shapes derived from a rank's batch are ignored, whatever the cost."""

    def step(x: Any) -> Any:
        mean = lax.pmean(x.mean(0), "batch")
        return lax.pmean(jnp.cumsum((x - mean) ** 2, axis=0)[-1], "batch")

    assert len({exchanges(step, jnp.ones((n, 4))) for n in (1, 2, 1000)}) == 1
