"""Labels detect reordered equations whenever that changes the order of the exchanges."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from jaxcross import _jax_compat as compat
from jaxcross.program import stages
from jaxcross.program.exchange_labels import labelled, order_of
from jaxcross.program.ir import Program
from jaxcross.program.trace import Traced, trace
from jaxcross.testing import LocalRanks, decide
from tests.support.label_ranks import verdict
from tests.support.random_steps import RECIPES, Op, Recipe, arguments, build
from tests.support.zoo import ZOO


def reordered(traced: Traced, rng: random.Random) -> Traced:
    """Returns the step with its equations in a random order, each after those it reads."""
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    left, known = list(inner.eqns), {*inner.invars}
    eqns = []
    while left:
        ready = [
            e for e in left if all(isinstance(a, compat.Literal) or a in known for a in e.invars)
        ]
        eqns.append(rng.choice(ready))
        left.remove(eqns[-1])
        known.update(eqns[-1].outvars)
    jaxpr = compat.make_jaxpr_of(inner.invars, inner.outvars, eqns, traced.jaxpr)
    return dataclasses.replace(traced, jaxpr=jaxpr, _own={})


def travelling(program: Program) -> list[Any]:
    """Returns exchange results in wire order, each with its index among its equation's."""
    eqns = program.traced.jaxpr.jaxpr.eqns
    made = {
        id(x): (tuple(map(id, eqns[i].outvars)), n)
        for i, several in labelled(program.traced).items()
        for n, x in enumerate(several)
    }
    return [made[id(member.labelled)] for member in order_of(program)]


def compared(traced: Traced, rng: random.Random, cut: Any, bucket_bytes: int) -> bool:
    """Returns whether the two equation orders differ on the wire, which must be detected."""
    one, other = (
        stages.cut(t, cut, bucket_bytes=bucket_bytes) for t in (traced, reordered(traced, rng))
    )
    ranks = math.prod(traced.axes.values())
    assert verdict([one] * ranks) == ""
    if one.exchange_signature() != other.exchange_signature():
        return False
    moved = travelling(one) != travelling(other)
    assert bool(verdict([one, *[other] * (ranks - 1)])) == moved, f"{one}\n{other}"
    return moved


FUZZ = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    max_examples=120,
)
KINDS = ("psum", "psum", "psum", "psum", "pmean", "psum_tree", "tanh", "scale", "matmul", "sub")
ALIKE = st.builds(
    Recipe,
    st.just(0),
    st.just(((2, 0),) * 3),
    st.lists(
        st.builds(Op, st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 11)),
        min_size=6,
        max_size=14,
    ).map(tuple),
    st.lists(st.integers(0, 12), min_size=6, max_size=12).map(tuple),
    st.just(1),
)
"""Steps whose exchanges are alike: of one shape, over one axis."""


@pytest.mark.integration
def test_random_steps_in_another_order() -> None:
    moved = []

    @seed(1)
    @FUZZ
    @given(
        st.one_of(ALIKE, ALIKE, RECIPES),
        st.integers(0, 10**6),
        st.sampled_from([0, 1 << 20]),
        st.sampled_from(["whole", 3]),
    )
    def search(recipe: Recipe, order: int, bucket_bytes: int, cut: Any) -> None:
        leaves = arguments(recipe, 0)
        traced = decide(trace(build(recipe), leaves, axes=recipe.sizes, wire=LocalRanks()), leaves)
        moved.append(compared(traced, random.Random(order), cut, bucket_bytes))

    search()
    assert sum(moved) >= 15, f"only {sum(moved)} of {len(moved)} steps had exchanges that moved"


@pytest.mark.integration
@pytest.mark.parametrize("row", ZOO, ids=lambda row: row.name)
def test_zoo_in_another_order(row: Any) -> None:
    step, state = row.build(2)
    args = state, row.batch(0, 0)
    traced = decide(
        trace(step, args, axes=row.axes(2), wire=LocalRanks()), jax.tree.leaves((args, {}))
    )
    for n in range(2):
        compared(traced, random.Random(n), "whole", 0)
