"""Data-dependent conditionals: what ranks count along with their exchanges, and what's reported."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import lax

from jaxcross.errors import CutError
from jaxcross.program import stages
from jaxcross.program.decision import BranchDecision
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks

X = jnp.ones((4, 2))


def cut(step, *args, axes):
    return stages.cut(trace(step, args, axes=axes, wire=LocalRanks()), bucket_bytes=0)


def decisions(program):
    return [d for segment in program.segments for d in segment.decisions]


def by_value(x):
    return lax.cond(x.sum() > 0, lambda v: lax.psum(v, "batch"), lambda v: v, x)


def test_eight_bytes_beside_the_exchange() -> None:
    program = cut(by_value, X, axes={"batch": 2})
    assert program.exchange_signature().splitlines() == [
        "axes batch=2",
        "psum batch float32[2]",
        "psum batch float32[4, 2]",
        "exchanges of each segment: 2",
    ]
    (decision,) = decisions(program)
    assert (decision.axes, decision.takers) == (("batch",), (1,))
    assert "test_decision.py" in decision.source and "(by_value)" in decision.source


def test_none_where_there_is_nothing_to_decide() -> None:
    """There's only one rank, the predicate is known to the host, or nothing is exchanged inside."""
    assert not decisions(cut(by_value, X, axes={"batch": 1}))

    def by_counter(n, x):
        return lax.cond(n % 2 == 0, lambda v: lax.psum(v, "batch"), lambda v: v, x)

    traced = trace(by_counter, (jnp.int32(0), X), axes={"batch": 2}, wire=LocalRanks())
    assert not any(decisions(stages.cut(traced.decide(branch))) for branch in (0, 1))

    def outside(x):
        return lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: v, lax.psum(x, "batch"))

    assert not decisions(cut(outside, X, axes={"batch": 2}))


def test_one_for_each_group_of_ranks() -> None:
    def step(x):
        ways = [
            lambda v: lax.psum(lax.psum(v, "row"), "col"),
            lambda v: lax.pmax(v, "row"),
            lambda v: lax.psum(v, "col", axis_index_groups=[[0], [1]]),
            lambda v: lax.psum(v, "one"),
        ]
        return lax.switch(jnp.round(x.sum()).astype(jnp.int32), ways, x)

    program = cut(step, X, axes={"row": 2, "col": 2, "one": 1})
    found = sorted((d.axes, d.takers) for d in decisions(program))
    assert found == [(("col",), (0,)), (("col",), (2,)), (("row",), (0, 1))]
    groups = [x for x in program.exchanges if dict(x.params).get("groups") and x.shape == (2,)]
    assert len(groups) == 1


def test_nested_decision_counts_in_the_outer_branch() -> None:
    """A nested decision is counted where the outer one takes that branch."""

    def step(x):
        def inner(v):
            return lax.cond(v[0, 0] > 2, lambda u: lax.psum(u, "batch"), lambda u: u - 1, v)

        return lax.cond(x.sum() > 0, inner, lambda v: v, x)

    program = cut(step, X, axes={"batch": 2})
    assert [d.takers for d in decisions(program)] == [(1,), (1,)]
    assert sorted(x.shape for x in program.exchanges) == [(2,), (2,), (4, 2)]


def test_what_nobody_reads_is_not_counted() -> None:
    def step(x):
        lax.cond(x.sum() > 0, lambda v: lax.psum(v, "batch"), lambda v: v, x)
        return x + 1

    assert not cut(step, X, axes={"batch": 2}).exchanges


def test_no_vote_is_made_between_exchanges() -> None:
    """On a failed rank, such a vote would be computed from zeros and still count."""

    def step(x, t):
        most = lax.pmax(x.max(), "batch")
        y = lax.psum(x * most, "batch")
        return lax.cond(most > t, lambda v: lax.psum(v, "batch"), lambda v: v, y)

    program = cut(step, X, jnp.float32(5), axes={"batch": 2})
    names = [e.primitive.name for s in program.collectives for e in s.jaxpr.jaxpr.eqns]
    assert len(decisions(program)) == 1 and "eq" not in names and "concatenate" not in names


DECISION = BranchDecision(axes=("row", "col"), takers=(0, 2), source="train.py:12 (step)")


@pytest.mark.parametrize("counts", [[4, 0, 0], [0, 3, 0], [0, 0, 4], [0, 0, 0]])
def test_all_alike(counts) -> None:
    """A rank that has failed doesn't count."""
    assert DECISION.mismatch(counts) is None


def test_what_is_said() -> None:
    assert str(DECISION.mismatch([2.0, 0.0, 1.0])).startswith(
        "ranks decided the conditional at train.py:12 (step) differently. Of those that exchange "
        "in it over `row`, `col`, 2 took branch 0, which exchanges, and 1 took one that does not. "
        "They would average in zeros from ranks that"
    )
    both = BranchDecision(axes=("row",), takers=(0, 1), source="here").mismatch([1.0, 3.0])
    assert "1 took branch 0, which exchanges, and 3 took branch 1, which exchanges." in str(both)


def test_what_the_host_is_to_decide_is_not_cut():
    def by_counter(n, x):
        return lax.cond(n % 2 == 0, lambda v: lax.psum(v, "batch"), lambda v: v, x)

    traced = trace(by_counter, (jnp.int32(0), X), axes={"batch": 2}, wire=LocalRanks())
    with pytest.raises(CutError, match="contains a conditional that the host decides"):
        stages.cut(traced)
