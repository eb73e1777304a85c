"""Loops with exchanges vote only if their number of iterations may differ across ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross.program.mismatch import signature_mismatch
from jaxcross.testing import over_ranks, run_program
from tests.support.loops import cut, loops, own, votes

X = jnp.ones(3)


def by_literals(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 2, lax.psum(c[1], "batch")), (1, x))


def by_exchange(x: Any) -> Any:
    def body(c: Any) -> Any:
        i, _, v = c
        return i + 1, jnp.sqrt(lax.psum(jnp.sum(v), "batch")), v / 2

    return lax.while_loop(lambda c: (c[1] > 0.01) & (c[0] < 20), body, (0, jnp.inf, x))


def by_exchange_outside(x: Any) -> Any:
    n = lax.pmax(x.sum(), "batch").astype(jnp.int32)
    return lax.fori_loop(0, n, lambda _, v: lax.pmean(v, "batch"), x)


def by_predicate_exchange(x: Any) -> Any:
    return lax.while_loop(lambda v: lax.pmax(jnp.max(v), "batch") < 9, lambda v: v * 2, x)


def nested_equal(x: Any) -> Any:
    def body(c: Any) -> Any:
        i, v = c
        return i + 1, lax.while_loop(
            lambda d: d[0] < i, lambda d: (d[0] + 1, lax.psum(d[1], "batch")), (0, v)
        )[1]

    return lax.while_loop(lambda c: c[0] < 3, body, (0, x))


def by_all_gather(x: Any) -> Any:
    total = lax.all_gather(x, "batch").sum()
    return lax.while_loop(
        lambda c: c[0] < total, lambda c: (c[0] + 1, lax.pmean(c[1], "batch")), (0.0, x)
    )


EQUAL = [
    by_literals,
    by_exchange,
    by_exchange_outside,
    by_predicate_exchange,
    nested_equal,
    by_all_gather,
]


@pytest.mark.mostly_integration("by_predicate_exchange", "nested_equal", "by_all_gather")
@pytest.mark.parametrize("step", EQUAL, ids=lambda step: step.__name__)
def test_no_vote_where_ranks_cannot_differ(step: Any) -> None:
    program = cut(step, X)
    assert loops(program) and not votes(program)
    assert all("until" in dict(x.params) for x in program.exchanges if "loop" in dict(x.params))
    args = [(own(r),) for r in range(2)]
    got = run_program(cut(step, own(0)), [list(a) for a in args])
    for mine, want in zip(got, over_ranks(step, {"batch": 2})(args), strict=True):
        for a, b in zip(mine, jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def by_input(n: Any, x: Any) -> Any:
    return lax.fori_loop(0, n, lambda _, v: lax.psum(v, "batch"), x)


def by_rank(n: Any, x: Any) -> Any:
    return by_input(2 + 0 * n + lax.axis_index("batch"), x)


def by_constant(n: Any, x: Any) -> Any:
    return by_input(jnp.asarray([3, 4])[0] + 0 * n, x)


def by_permutation(n: Any, x: Any) -> Any:
    return by_input(lax.ppermute(n, "batch", [(0, 1), (1, 0)]), x)


def by_group(n: Any, x: Any) -> Any:
    return by_input(lax.psum(n, "batch", axis_index_groups=[[0], [1]]), x)


def by_callback(n: Any, x: Any) -> Any:
    return by_input(
        jax.pure_callback(lambda: np.int32(2), jax.ShapeDtypeStruct((), jnp.int32)) + 0 * n, x
    )


DIFFERENT = [by_input, by_rank, by_constant, by_permutation, by_group, by_callback]


@pytest.mark.parametrize("step", DIFFERENT, ids=lambda step: step.__name__)
def test_vote_where_ranks_may_differ(step: Any) -> None:
    program = cut(step, jnp.int32(1), X)
    assert votes(program) == ["pmax batch int32[] loop='while ?'"]


def test_sum_over_an_axis_is_equal_along_it_alone() -> None:
    """A sum over one axis is identical along that axis only."""

    def step(x: Any, over: str) -> Any:
        n = lax.psum(x.sum(), "row")
        return lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, lax.psum(c[1], over)), (0.0, x)
        )

    axes = {"row": 2, "col": 2}
    assert not votes(cut(lambda x: step(x, "row"), X, axes=axes))
    assert votes(cut(lambda x: step(x, "col"), X, axes=axes)) == ["pmax col int32[] loop='while ?'"]


def test_one_rank_does_not_vote() -> None:
    assert not votes(cut(by_input, jnp.int32(1), X, axes={"batch": 1}))
    assert not votes(
        cut(lambda n, x: by_input(n, x), jnp.int32(1), X, axes={"batch": 1, "other": 2})
    )


def test_rank_local_number_in_the_code_is_reported() -> None:
    """The predicate has a rank-local Python number: signatures differ before any exchange."""

    def on(rank: int) -> str:
        bound = 3 + rank
        step = lambda x: lax.while_loop(  # noqa: E731
            lambda c: c[0] < bound, lambda c: (c[0] + 1, lax.psum(c[1], "batch")), (0, x)
        )
        return cut(step, X).exchange_signature()

    assert on(0) == on(0)
    with pytest.raises(ValueError, match="are equal"):
        signature_mismatch("step", [on(0), on(0)])
    text = signature_mismatch("step", [on(0), on(1)])
    assert (
        "make different numbers of iterations of a loop" in text
        and "pass them to the step as an argument" in text
    )


def test_rank_local_numbers_in_a_voted_loop_are_equal() -> None:
    """The numbers are equal even if an outer loop's carry reveals late that they may differ."""

    def on(rank: int) -> str:
        def outer(c: Any) -> Any:
            i, v = c
            inner = lambda d: (d[0] + 1, lax.psum(d[1], "batch"))  # noqa: E731
            return i + v[0], lax.while_loop(lambda d: d[0] < i * (1 + rank), inner, (0.0, v))[1]

        return cut(
            lambda x: lax.while_loop(lambda c: c[0] < 9 + rank, outer, (0.0, x)), X
        ).exchange_signature()

    assert on(0) == on(1) and "until" not in on(0)
