"""What every exchange guarantees, for every row of the table, with all ranks in one process."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross import exchange
from jaxcross.errors import CutError
from jaxcross.program.nonfinite import is_finite
from jaxcross.program.stages import cut
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide, run_jaxpr, run_program
from jaxcross.wire.bytes import wire_bytes
from tests.support.exchange_row import Row
from tests.support.exchange_runs import (
    assert_close,
    compiled,
    flat_ranks,
    ranks_of_gradients,
    run,
    stacked,
)
from tests.support.exchange_table import RTOL16, SHAPES, TABLE, gradients, params, start, step_of
from tests.support.quick_compiler import OPTIONS

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WORLDS = [(row, n) for row in TABLE for n in range(1, 17) if row.worlds(n)]
BAD = (np.nan, np.inf, -np.inf)


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def check_identical_on_all_ranks(row: Row, ranks: int) -> None:
    (values, state), updates_of = run(row, ranks)
    same = lambda parts: all(  # noqa: E731
        same_bits(x[r], x[0]) for x in jax.tree.leaves(parts) for r in range(ranks)
    )
    assert same([values] if row.kind == "parameter" else [values, *updates_of]) == (
        row.identical or ranks == 1
    )
    assert same(row.shared(state))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("row", "ranks"),
    [pytest.param(row, n, id=f"{row.name} on {n}") for row, n in WORLDS if row.lossless],
)
def test_lossless_equals_its_reference(row: Row, ranks: int) -> None:
    (values, _), updates_of = run(row, ranks, "lossless")
    if row.kind == "gradient" and isinstance(row.referred(ranks).init(params()), optax.EmptyState):
        for n, updates in enumerate(updates_of):
            grads = ranks_of_gradients(ranks, n)
            assert_close(
                updates,
                jax.tree.map(lambda g: np.broadcast_to(g.mean(0), g.shape), grads),
                row.rtol,
            )
    else:
        (expected, _), _ = run(row, ranks, "reference")
        assert_close(values, expected, row.rtol)


def check_state_types_and_bits_survive_rerun_and_resume(row: Row, ranks: int) -> None:
    """The state keeps its types, and a run repeats and resumes bit for bit."""
    first = run(row, ranks)
    assert same_bits(run(row, ranks), first) or not row.deterministic
    step, fresh = compiled(row, ranks, "make")
    carry, updates_of = fresh, []
    for n in range(row.steps):
        # Saves as plain arrays, and restores into a newly created state.
        saved = [np.array(x) for x in jax.tree.leaves(carry)]
        assert [(x.shape, x.dtype) for x in saved] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(fresh)
        ]
        carry = jax.tree.unflatten(jax.tree.structure(fresh), saved)
        carry, updates = step(carry, ranks_of_gradients(ranks, n))
        updates_of.append(updates)
    assert same_bits((carry, updates_of), first) or not row.deterministic


def check_no_gradient_no_update(row: Row, ranks: int) -> None:
    _, updates_of = run(row, ranks, change=lambda n, grads: jax.tree.map(np.zeros_like, grads))
    for path, x in jax.tree.leaves_with_path(updates_of):
        assert np.max(np.abs(np.asarray(x)), initial=0) <= (0 if row.rests else 1e-6), (
            jax.tree_util.keystr(path)
        )


def check_what_is_not_finite_on_one_rank_is_seen_on_all(row: Row, ranks: int, bad: float) -> None:
    for first, leaf, at in (
        (0, "kernel", (ranks - 1, 3, 2)),
        (1, "kernel", (ranks - 1, 3, 2)),
        (1, "kernel", (0, 0, 5)),
        (1, "scale", (0,)),
        (0, "tiny", (ranks - 1, 0, 1)),
        (0, "bias", (ranks // 2, 4)),
    ):

        def spoil(
            step: int, grads: Any, first: int = first, leaf: str = leaf, at: tuple[int, ...] = at
        ) -> Any:
            if first <= step < first + row.spoils:
                grads[leaf][at] = bad
            return grads

        (values, _), _ = run(row, ranks, change=spoil, steps=first + row.spreads(ranks))
        for r in range(ranks):
            assert not np.all(np.isfinite(values[leaf][r])), (
                f"rank {r}, {leaf} {bad} in step {first}"
            )


@pytest.mark.mostly_integration("sign_sgd-inf", "sign_sgd--inf")
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "name",
    [
        "sign_sgd",
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("top_k", "gtop_k", "power_sgd", "qsgd")
        ),
        pytest.param("one_bit_adam", marks=pytest.mark.exhaustive),
    ],
)
def test_what_is_not_finite_is_an_exchanged_float(name: str, bad: float) -> None:
    """`nonfinite` checks what exchanges produced on some rank, and nothing computed after them."""
    (row,) = (row for row in TABLE if row.name == name)
    tx, axes = row.made(2), row.axes(2)
    for first in (0, *row.later[:1]) if row.later else (0,):
        carry, _ = run(row, 2, steps=first)
        args = [(jax.tree.map(lambda x: x[r], carry), gradients(r, first)) for r in range(2)]  # noqa: B023
        args[1][1]["kernel"][3, 2] = bad
        leaves = [jax.tree.leaves(each) for each in args]
        program = cut(
            decide(trace(step_of(tx), args[0], {}, axes=axes, wire=LocalRanks()), leaves[0])
        )
        exchanged = {
            v
            for segment in program.segments
            if segment.kind == "collective"
            for v in segment.outputs
        }
        seen = []

        def compute(
            segment: Any, axes: Any, args: Any, exchanged: Any = exchanged, seen: Any = seen
        ) -> Any:
            for values in args:
                seen.extend(
                    x for v, x in zip(segment.inputs, values, strict=True) if v in exchanged
                )
            return run_jaxpr(segment.jaxpr, axes, args)

        run_program(program, leaves, compute=compute)
        assert not all(map(is_finite, seen)), f"step {first}"


def check_bytes_on_the_wire_are_those_of_the_formula(row: Row, ranks: int) -> None:
    tx = row.made(ranks)
    for n, formula in [(0, row.bytes), *([row.later] if row.later else [])]:
        carry = jax.tree.map(lambda x: x[0], run(row, ranks, steps=n)[0])
        args = (carry, gradients(0, n))
        traced = trace(step_of(tx), args, {}, axes=row.axes(ranks), wire=LocalRanks())
        program = cut(decide(traced, jax.tree.leaves(args)), bucket_bytes=0)
        brought = sum(wire_bytes(x, row.axes(ranks)) for x in program.exchanges)
        assert brought == formula(list(SHAPES.values()), ranks), f"step {n}"


QUICK = {"mean, hierarchical, bfloat16", "gossip, ring"}
SLOW = {"top_k, threshold"}  # compiles as long as ten other rows


def in_which_tier(row: Row, ranks: int) -> list[pytest.MarkDecorator]:
    """Returns the markers of a row: a fast one runs on 4 ranks in the quick or integration tier.

    All else is exhaustive.
    """
    if ranks != 4 or row.name in SLOW:
        return [pytest.mark.exhaustive]
    return [] if row.name in QUICK else [pytest.mark.integration]


# A single test covers all of these properties, because compiling a row takes nearly all of the
# time. With one test per property, the pytest-xdist workers compiled most rows several times.
@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        pytest.param(row, n, id=f"{row.name} on {n}", marks=in_which_tier(row, n))
        for row, n in WORLDS
    ],
)
def test_row(row: Row, ranks: int) -> None:
    check_identical_on_all_ranks(row, ranks)
    check_state_types_and_bits_survive_rerun_and_resume(row, ranks)
    check_no_gradient_no_update(row, ranks)
    for bad in BAD:
        check_what_is_not_finite_on_one_rank_is_seen_on_all(row, ranks, bad)
    check_bytes_on_the_wire_are_those_of_the_formula(row, ranks)


TREES = {
    "empty": {},
    "None": {"a": None},
    "scalar": jnp.float32(2),
    "no element": {"a": jnp.zeros((0, 3)), "b": jnp.ones((3, 4))},
    "bfloat16": {"a": jnp.ones((4, 6), jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)},
    "nested": [{"a": (jnp.ones((3, 4)),)}, jnp.ones(2)],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if row.worlds(4)])
def test_any_tree(row: Row, tree: str) -> None:
    """Only traces: updates have the gradients' structure, shapes and types.

    The new state has those of the old one.
    """
    tx, values = row.made(4), TREES[tree]
    args = jax.eval_shape(lambda: (values, tx.init(values)))
    step = flat_ranks(lambda g, s, p: tx.update(g, s, p), row.axes(4))
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), args)
    assert jax.eval_shape(step, *many, many[0]) == many


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if row.worlds(4)])
def test_matrices_of_sixteen_bits_beside_none(row: Row) -> None:
    """Two steps give the same result as in float32 on the same numbers, up to 8-bit rounding."""

    def two_steps(dtype: Any) -> tuple[Any, Any]:
        def typed(tree: Any, *ranks: int) -> Any:
            as_ = lambda x: x.astype(jnp.bfloat16).astype(  # noqa: E731
                dtype if x.ndim > 1 + len(ranks) else jnp.float32
            )
            return jax.tree.map(as_, tree) | {"none": jnp.zeros((*ranks, 0, 3), dtype)}

        tx, values = row.made(4), typed(params())
        carry = stacked((values, tx.init(values)), 4)
        grads = [typed(ranks_of_gradients(4, n), 4) for n in range(2)]
        step = jax.jit(flat_ranks(step_of(tx), row.axes(4))).lower(carry, grads[0])
        step = step.compile(compiler_options=OPTIONS)
        carry, _ = step(carry, grads[0])
        (after, _), updates = step(carry, grads[1])
        assert (
            jax.tree.map(lambda x: x.dtype, (after, updates))
            == (jax.tree.map(lambda x: x.dtype, values),) * 2
        )
        return jax.tree.map(lambda x: np.asarray(x, np.float32), (after, updates))

    narrow, wide = two_steps(jnp.bfloat16), two_steps(jnp.float32)
    # Some updates move parameters to the mean over the ranks. Such an update is a small difference
    # of large numbers, so it's only as precise as the parameters.
    which = 0 if row.kind == "parameter" else 1
    assert_close(narrow[which], wide[which], RTOL16)


@pytest.mark.mostly_integration(
    "mean, hierarchical",
    "mean, hierarchical of 4",
    "gossip, torus",
    "gossip, exponential",
    "gossip, complete",
)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if row.worlds(4)])
def test_an_axis_that_is_not_bound_is_refused(row: Row) -> None:
    tx = row.made(4)
    with pytest.raises(
        CutError,
        match=r"(?s)^`step` uses an axis that is not bound: .* of this step are `other` of 4;",
    ):
        trace(step_of(tx), (start(tx), gradients(0, 0)), {}, axes={"other": 4}, wire=LocalRanks())


def test_the_table_is_whole() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names)) == 55 and {*names} >= QUICK | SLOW
    missing = {n for n in exchange.__all__ if not any(name.split(",")[0] == n for name in names)}
    assert missing == {"finish", "scale_by_trust_ratio"}, "which are part of an exchange"


@pytest.mark.integration
def test_there_is_a_row_that_differs_between_ranks() -> None:
    """Shows that the bitwise comparison above can fail: raw gradients differ across ranks."""
    identity = lambda a: optax.identity()  # noqa: E731
    nothing = Row(name="nothing", make=identity, lossless=identity, bytes=lambda shapes, ranks: 1)
    (values, _), _ = run(nothing, 4)
    assert not same_bits(values["kernel"][0], values["kernel"][1])
    with pytest.raises(AssertionError):
        test_lossless_equals_its_reference(nothing, 4)
    with pytest.raises(AssertionError):
        check_what_is_not_finite_on_one_rank_is_seen_on_all(nothing, 4, np.nan)
    with pytest.raises(AssertionError):
        check_bytes_on_the_wire_are_those_of_the_formula(nothing, 4)
