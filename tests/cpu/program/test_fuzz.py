"""Cutting is bitwise exact: random steps, evaluated by equation before and after the cut."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from jaxcross.program import stages
from jaxcross.program.digest import program_digest
from jaxcross.program.text import parse
from jaxcross.program.trace import Traced, trace
from jaxcross.program.verify import verify
from jaxcross.testing import LocalRanks, decide, run_jaxpr, run_program
from tests.support.random_steps import RECIPES, Recipe, arguments, build

pytestmark = pytest.mark.usefixtures("compiled_quickly")

CUTS = ("whole", 1, 2, 3, 5, "auto")
# Shrinking recompiles for minutes. Set JAXCROSS_SHRINK=1 to have a failing recipe reduced.
PHASES = [
    Phase.explicit,
    Phase.generate,
    *([Phase.shrink] if os.environ.get("JAXCROSS_SHRINK") else []),
]
FUZZ = settings(
    deadline=None,
    database=None,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def bits(results: list[list[Any]]) -> list[Any]:
    """Returns shapes, types and bytes of every rank's results."""
    arrays = [[np.asarray(x) for x in rank] for rank in results]
    return [[(a.shape, a.dtype.name, a.tobytes()) for a in rank] for rank in arrays]


def traced(recipe: Recipe) -> tuple[Traced, list[list[Any]]]:
    sizes = recipe.sizes
    leaves = [arguments(recipe, r) for r in range(int(np.prod(list(sizes.values()))))]
    return trace(
        build(recipe), leaves[0], axes=sizes, wire=LocalRanks(), donate_argnums=(0, 1)
    ), leaves


def examples(few: int, many: int) -> Any:
    """Runs a test with few examples in CI, and with many before a release."""
    return pytest.mark.parametrize(
        "examples", [few, pytest.param(many, marks=pytest.mark.exhaustive)]
    )


@pytest.mark.integration
@examples(50, 150)
def test_cut_program_equals_its_jaxpr_bit_for_bit(examples: int) -> None:
    @seed(1)
    @settings(FUZZ, max_examples=examples)
    @given(RECIPES, st.sampled_from([0, 40, 1 << 20]))
    def equal(recipe: Recipe, bucket_bytes: int) -> None:
        whole, leaves = traced(recipe)
        flat = decide(whole, leaves[0])
        consts = list(flat.consts)
        expected = bits(run_jaxpr(flat.jaxpr, flat.axes, [consts + x for x in leaves]))
        seen = set()
        for cut, packed in itertools.product(CUTS, (False, True)):
            with mock.patch("jaxcross.program.cut.on_accelerator", return_value=packed):
                program = stages.cut(flat, cut, bucket_bytes=bucket_bytes)
            text = program.text()
            assert parse(text).text() == text
            assert verify(parse(text)).exchange_signature() == program.exchange_signature()
            if (digest := program_digest(program)) not in seen:
                seen.add(digest)
                assert bits(run_program(program, leaves)) == expected, (
                    f"cut={cut!r}, packed={packed}\n{program}"
                )

    equal()


@pytest.mark.integration
@examples(40, 120)
def test_flat_jaxpr_equals_the_step_as_jax_traced_it(examples: int) -> None:
    """Inlining, deciding and splitting `cond` are bitwise exact; unread values aren't made."""

    @seed(2)
    @settings(FUZZ, max_examples=examples)
    @given(RECIPES)
    def equal(recipe: Recipe) -> None:
        whole, leaves = traced(recipe)
        flat = decide(whole, leaves[0])
        got = run_jaxpr(flat.jaxpr, flat.axes, [list(flat.consts) + x for x in leaves])
        expected = run_jaxpr(whole.unflattened, whole.axes, leaves)
        assert bits(got) == bits(expected)

    equal()


@pytest.mark.integration
@seed(3)
@settings(FUZZ, max_examples=40)
@given(RECIPES)
def test_digest_and_signature_depend_on_the_step_alone(recipe: Recipe) -> None:
    one, leaves = traced(recipe)
    two, _ = traced(recipe)
    one, two = decide(one, leaves[-1]), decide(two, leaves[0])
    lines = set()
    for cut in CUTS:
        first, second = stages.cut(one, cut, bucket_bytes=0), stages.cut(two, cut, bucket_bytes=0)
        assert program_digest(first) == program_digest(second)
        assert first.exchange_signature() == second.exchange_signature()
        assert first.exchange_hash() == second.exchange_hash()
        lines.add(tuple(sorted(x.line() for x in first.exchanges)))
    assert len(lines) == 1, "without buckets, every cut makes the same exchanges"


@pytest.mark.integration
def test_fuzzer_reaches_what_it_is_for() -> None:
    """Most random programs have exchanges, and many have several segments.

    Some have a loop, or a `cond` that the host decides.
    """
    counts = dict.fromkeys(
        ("exchange", "two collectives", "undecided", "loop", "cond", "bucket", "packed"), 0
    )

    @seed(1)
    @settings(FUZZ, max_examples=100)
    @given(RECIPES)
    def count(recipe: Recipe) -> None:
        whole, leaves = traced(recipe)
        flat = decide(whole, leaves[0])
        program = stages.cut(flat, "whole")
        counts["exchange"] += bool(program.exchanges)
        counts["two collectives"] += sum(s.kind == "collective" for s in program.segments) > 1
        counts["undecided"] += whole.undecided is not None
        counts["loop"] += any("loop" in dict(x.params) for x in program.exchanges)
        counts["cond"] += any(e.primitive.name == "cond" for e in flat.jaxpr.jaxpr.eqns)
        counts["bucket"] += len(stages.cut(flat, "whole", bucket_bytes=0).exchanges) > len(
            program.exchanges
        )
        with mock.patch("jaxcross.program.cut.on_accelerator", return_value=True):
            counts["packed"] += stages.cut(flat, "whole").text() != program.text()

    count()
    assert counts["exchange"] >= 50 and min(counts.values()) >= 2, str(counts)


@pytest.mark.integration
def test_results_are_those_of_vmap() -> None:
    """Checks the fake wire against JAX: all collectives, on integers, whose sums are exact."""
    from jaxcross.testing import vmap_oracle
    from tests.support.random_steps import EXCHANGES, Op

    for axes in range(3):
        for kind in dict.fromkeys(EXCHANGES):
            if "scatter" in kind and axes == 2:
                continue  # JAX is wrong under two `vmap`s: it scatters another dimension
            over = (
                (0, 1, 3) if kind.startswith(("p", "v")) and "scatter" not in kind else (0, 1)
            )  # all that `vmap` supports
            ops = tuple(
                Op(kind, x=0, y=1, axes=a, flag=f) for a in over for f in (1, 3)
            )  # whole rings
            recipe = Recipe(axes, ((2, 2), (1, 2)), ops, tuple(range(2 * len(over))), 1)
            flat, leaves = traced(recipe)
            got = run_program(stages.cut(flat, 2), leaves)
            for a, b in zip(got, vmap_oracle(build(recipe), recipe.sizes, leaves), strict=True):
                jax.tree.map(
                    partial(np.testing.assert_array_equal, err_msg=f"{kind} over {recipe.sizes}"),
                    a,
                    b,
                )
