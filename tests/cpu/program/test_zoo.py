"""Every step of the zoo, cut, on several ranks in lock step, equals JAX's `vmap` over ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcross
from jaxcross.errors import InternalError
from jaxcross.program import stages
from jaxcross.program.text import parse
from jaxcross.program.trace import Traced, trace
from jaxcross.program.verify import verify
from jaxcross.testing import (
    ComputeUnderVmap,
    LocalRanks,
    decide,
    over_ranks,
    run_jaxpr,
    run_program,
)
from tests.support.zoo import ZOO, Row, assert_close

pytestmark = pytest.mark.usefixtures("compiled_quickly")

RANKS = 4
# Similar rows are in the default run, which also traces, cuts and prints all rows.
MORE = {
    "already jitted",
    "nn.remat",
    "adamw, clipped after the exchange",
    "batch norm, local",
    "batch norm, averaged",
}
ROWS = [
    pytest.param(row, marks=pytest.mark.exhaustive if row.name in MORE else [], id=row.name)
    for row in ZOO
]


def traced(row: Row, ranks: int) -> tuple[Any, Any, Traced]:
    step, state = row.build(ranks)
    args = (state, row.batch(0, 0))
    return (
        step,
        state,
        trace(step, args, axes=row.axes(ranks), wire=LocalRanks(), donate_argnums=(0,)),
    )


@pytest.mark.mostly_integration("literal and passed-through results", "vmap inside")
@pytest.mark.parametrize("row", ROWS)
def test_lock_step_equals_vmap(row: Row) -> None:
    step, state, whole = traced(row, RANKS)
    axes = row.axes(RANKS)
    states, programs = [state] * RANKS, {}
    oracle, compute = over_ranks(step, axes), ComputeUnderVmap()
    for n in range(row.steps):
        args = [(states[r], row.batch(r, n)) for r in range(RANKS)]
        leaves = [jax.tree.leaves((a, {})) for a in args]
        flat = decide(whole, leaves[0])
        if row.vmap:
            expected = oracle(args)
        else:
            out = run_jaxpr(whole.unflattened, axes, leaves)
            expected = [jax.tree.unflatten(whole.out_tree, x) for x in out]
        for cut, bucket_bytes in (("whole", 1 << 20), (3, 64)):
            if (key := (cut, flat.choices)) not in programs:
                programs[key] = stages.cut(flat, cut, bucket_bytes=bucket_bytes)
            results = run_program(programs[key], leaves, compute=compute)
            got = [jax.tree.unflatten(whole.out_tree, x) for x in results]
            assert_close(got, expected, row.rtol, f"{row.name}, step {n}, cut={cut!r}")
        states = [s for s, _ in expected]


@pytest.mark.mostly_integration(
    "1-literal and passed-through results",
    "1-unused exchange",
    "1-groups, and a partial permutation",
    "auto-literal and passed-through results",
    "auto-unused exchange",
)
@pytest.mark.parametrize("row", ZOO, ids=lambda r: r.name)
@pytest.mark.parametrize("cut", ["whole", 1, 3, "auto"])
def test_programs_verify_print_and_parse(row: Row, cut: Any) -> None:
    _, state, whole = traced(row, RANKS)
    flat = decide(whole, jax.tree.leaves(((state, row.batch(0, 0)), {})))
    program = stages.cut(flat, cut)
    assert parse(program.text()).text() == program.text()
    assert program.exchanges, "every row exchanges something"
    package = str(Path(jaxcross.__file__).parent)
    assert all(package not in x.source and ".py" in x.source for x in program.exchanges), (
        "the user's line"
    )
    assert len(str(program).splitlines()) == len(program.segments) + 1


def test_verify_finds_an_exchange_in_a_compute_segment() -> None:
    program = stages.cut(
        trace(
            lambda x: jax.lax.psum(x, "batch"), (jnp.ones(3),), axes={"batch": 2}, wire=LocalRanks()
        )
    )
    (segment,) = [s for s in program.segments if s.exchanges]
    moved = dataclasses.replace(segment, kind="compute", exchanges=())
    segments = (*program.segments[: segment.index], moved, *program.segments[segment.index + 1 :])
    with pytest.raises(InternalError, match=r"compute segment \d+ contains an exchange"):
        verify(dataclasses.replace(program, segments=segments))
