"""Loops with exchanges, of different lengths on each rank, run in lock step as under `vmap`."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jaxcross.errors import CutError, ExchangeError
from jaxcross.program import lockstep
from jaxcross.program.ir import Program
from jaxcross.program.lockstep import FROZEN
from jaxcross.program.text import parse
from jaxcross.step.advice import advise
from jaxcross.testing import over_ranks, run_program
from tests.support.loops import TABLE, cut, loops, number, own, votes

pytestmark = pytest.mark.usefixtures("compiled_quickly")

X = jnp.ones(3)


def compare(name: str, ranks: int) -> None:
    row = TABLE[name]
    axes = row.axes(ranks)
    program = cut(row.step, jnp.int32(0), own(0), axes=axes)
    if row.votes >= 0:
        assert len(votes(program)) == row.votes, program.exchange_signature()
    step, oracle_axes = row.oracle or (row.step, row.axes)
    oracle = over_ranks(step, oracle_axes(ranks))
    for t in range(row.calls):
        args = [(jnp.int32(t), own(r)) for r in range(ranks)]
        got = run_program(program, [jax.tree.leaves(a) for a in args])
        for rank, (mine, want) in enumerate(zip(got, oracle(args), strict=True)):
            for a, b in zip(mine, jax.tree.leaves(want), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_allclose(
                    a, b, rtol=row.rtol, atol=row.rtol, err_msg=f"rank {rank}, call {t}"
                )


# Over MPI all rows run on two ranks, so the default here is four.
ON_TWO = (
    "frozen carry",
    "nested",
    "cond inside",
    "micro-batches",
    "zero iterations",
    "line search",
    "one of two axes",
    "in a cond",
    "equal loop inside",
)
ON_FOUR = ("micro-batches", "nested, local", "predicate exchanges", "two axes", "groups")


@pytest.mark.mostly_integration("zero iterations-2", "equal loop inside-2", "groups-4")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(
            pytest.param(name, 2, marks=[] if name in ON_TWO else pytest.mark.exhaustive)
            for name in TABLE
        ),
        *((name, 4) for name in TABLE),
    ],
)
def test_loop_equals_vmap(name: str, ranks: int) -> None:
    compare(name, ranks)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["frozen carry", "early stop", "nested", "cond inside"])
def test_loop_equals_vmap_in_64_bits(name: str) -> None:
    with jax.enable_x64(True):
        compare(name, 2)


def at_once(program: Program, args: Any) -> Any:
    """Returns the results of a program on all ranks, without cutting it."""
    traced = program.traced
    return over_ranks(
        lambda *a: traced.out_tree.unflatten(jaxpr_as_fun(traced.jaxpr)(*a)), traced.axes
    )(args)


def micro_batches(s: Any, t: Any, x: Any) -> Any:
    n = 2 + (lax.axis_index("batch") + t) % 2
    return lax.fori_loop(0, n, lambda _, c: c + lax.psum(jnp.float32(1), "batch"), s), lax.psum(
        x, "batch"
    )


def test_each_rank_makes_its_own_number_of_iterations() -> None:
    program = cut(micro_batches, jnp.float32(0), jnp.int32(0), jnp.float32(0))
    states, seen = [jnp.float32(0)] * 2, []
    for t in range(4):
        outs = run_program(
            program, [[s, jnp.int32(t), jnp.float32(10 + r)] for r, s in enumerate(states)]
        )
        states = [s for s, _ in outs]
        seen.append([*map(float, states)])
        assert [float(x) for _, x in outs] == [21, 21]
    assert seen == [[4, 6], [10, 10], [14, 16], [20, 20]]


def test_vote_is_four_bytes_and_printed() -> None:
    program = cut(micro_batches, jnp.float32(0), jnp.int32(0), jnp.float32(0))
    assert loops(program) == [
        "pmax batch int32[] loop='while ?'",
        "psum batch float32[] loop='while ?'",
    ]
    (vote,) = (x for x in program.exchanges if x.op == "pmax")
    assert vote.nbytes == 4 and "test_loops.py" in vote.source and "(micro_batches)" in vote.source
    assert parse(program.text()).text() == program.text()


def test_vote_goes_over_all_axes_of_the_loop() -> None:
    program = cut(TABLE["two axes"].step, jnp.int32(0), own(0), axes={"row": 2, "col": 2})
    assert votes(program) == ["pmax row,col int32[] loop='while ?'"]
    groups = cut(TABLE["groups"].step, jnp.int32(0), own(0), axes={"batch": 4})
    assert votes(groups) == ["pmax batch int32[] groups=((0, 1), (2, 3)) loop='while ?'"]


def test_finished_rank_does_not_prolong_an_inner_loop() -> None:
    """Takes remainders by subtraction; given the final carry, the inner loop would never end."""

    def step(a: Any, b: Any, *, exchange: Any) -> Any:
        def outer(c: Any) -> Any:
            a, b, n = c
            rest, n = lax.while_loop(
                lambda d: d[0] >= b, lambda d: (d[0] - b, d[1] + exchange(1)), (a, n)
            )
            return b, rest, n + lax.psum(1.0, "batch") / 2

        return lax.while_loop(lambda c: c[1] > 0, outer, (a, b, 0.0))

    pairs = [[jnp.int32(12), jnp.int32(8)], [jnp.int32(21), jnp.int32(13)]]
    for exchange, extra in [(lambda n: lax.psum(jnp.float32(n), "batch"), 2), (lambda n: n, 1)]:
        program = cut(lambda a, b, exchange=exchange: step(a, b, exchange=exchange), *pairs[0])
        got = run_program(program, pairs)
        assert [int(r[0]) for r in got] == [4, 1]
        assert [float(r[2]) for r in got] == [2 + 3 * extra, 6 + 7 * extra]


@pytest.mark.mostly_integration("2")
@pytest.mark.parametrize("start", range(4))
def test_finished_rank_lets_others_resume_inner_loop(start: int) -> None:
    """The predicate exchanges its carry, so while others iterate, a stopped rank may resume."""

    def step(outer: Any, x: Any) -> Any:
        index = lax.axis_index("batch")
        more = lambda c: (lax.psum(c[1], "batch") % 3 != index) & (c[0] < 6)  # noqa: E731
        inner = lambda x: lax.while_loop(more, lambda c: (c[0] + 1, c[1] + 1 + index), (0, x))  # noqa: E731
        return lax.fori_loop(0, outer, lambda _, c: (c[0] + inner(c[1])[0], c[1] + 1), (0, x))

    args = [(jnp.int32(1 + 2 * r), jnp.int32(start + r)) for r in range(2)]
    got = run_program(cut(step, *args[0]), [list(a) for a in args])
    assert [*map(tuple, got)] == over_ranks(step, {"batch": 2})(args)


def test_callback_runs_only_on_unfinished_ranks() -> None:
    """A callback is called only by ranks that haven't finished the loop."""
    seen: list[Any] = []

    def step(n: Any, x: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            jax.debug.callback(lambda n, i: seen.append((int(n), int(i))), n, i, ordered=True)
            return c + lax.psum(c, "batch")

        return lax.fori_loop(0, n, body, x)

    program = cut(step, jnp.int32(1), X)
    run_program(program, [[jnp.int32(1), X], [jnp.int32(3), X]])
    jax.effects_barrier()
    assert sorted(seen) == [(1, 0), (3, 0), (3, 1), (3, 2)]


def test_callback_with_results_is_refused() -> None:
    from jax.experimental import io_callback

    def step(n: Any, x: Any) -> Any:
        def body(_: Any, c: Any) -> Any:
            return c + lax.psum(
                io_callback(lambda v: v, jax.ShapeDtypeStruct((3,), jnp.float32), c), "batch"
            )

        return lax.fori_loop(0, n, body, x)

    with pytest.raises(CutError, match=r"test_loops\.py:\d+:\d+ \(.*body\).*would call back"):
        cut(step, jnp.int32(1), X)


def test_mutable_array_from_outside_is_refused() -> None:
    def step(n: Any, x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            ref = jax.new_ref(c)

            def write(_: Any, v: Any) -> Any:
                ref[...] = v + 1
                return lax.psum(v, "batch")

            return lax.fori_loop(0, n, write, c) + ref[...], None

        return lax.scan(body, x, None, length=2)[0]

    with pytest.raises(CutError, match=r"test_loops\.py.*mutable array from outside"):
        cut(step, jnp.int32(1), X)


def test_mutable_array_in_a_branch_that_not_all_ranks_take_is_refused() -> None:
    """Other ranks also run the branch, for its exchange, and would keep what it writes."""

    def step(n: Any, x: Any) -> Any:
        def outer(c: Any, _: Any) -> Any:
            ref = jax.new_ref(c)

            def taken(v: Any) -> Any:
                ref[...] = v + 1
                return lax.psum(v, "batch")

            return lax.cond(n > 0, taken, lambda v: v, c) + ref[...], None

        return lax.scan(outer, x, None, length=2)[0]

    with pytest.raises(
        CutError, match=r"the conditional at .*test_loops\.py.*mutable array from outside"
    ):
        cut(step, jnp.int32(1), X)


def test_loop_in_an_untaken_branch_ends() -> None:
    """The body would run forever on zeros."""

    def step(x: Any) -> Any:
        double = lambda v: lax.while_loop(  # noqa: E731
            lambda c: c.sum() < 50, lambda c: c * 2 + 0 * lax.psum(c, "batch"), v
        )
        return lax.cond(x.sum() > 0, double, lambda v: v - 1, x)

    program = cut(step, X)
    for sign in (1, -1):
        args = [(sign * own(r),) for r in range(2)]
        got = run_program(program, [list(a) for a in args])
        want = over_ranks(step, {"batch": 2})(args) if sign > 0 else [a[0] - 1 for a in args]
        for mine, one in zip(got, want, strict=True):
            assert np.array_equal(mine[0], one)
    # If ranks differ, the step fails, and neither waits for the other one's loop.
    with pytest.raises(ExchangeError, match="ranks decided the conditional .* differently"):
        run_program(program, [[own(0)], [-own(1)]])


@pytest.mark.integration
def test_conditional_in_a_kept_loop_is_agreed() -> None:
    """Ranks that decide differently still all run the branch with the exchange, as under `vmap`."""

    def step(x: Any) -> Any:
        def body(c: Any, i: Any) -> Any:
            taken = (i + lax.axis_index("batch")) % 5 == 0
            return lax.cond(
                taken, lambda v: v + lax.psum(v % 3, "batch"), lambda v: v + 1, c
            ) % 19, None

        return lax.scan(body, x, jnp.arange(70))[0]

    program = cut(step, X)
    assert [x.line() for x in program.exchanges] == [
        "pmax batch int32[1] loop='scan 70'",
        "psum batch float32[3] loop='cond ?' loop='scan 70'",
    ]
    args = [(own(r),) for r in range(2)]
    got = run_program(program, [list(a) for a in args])
    for mine, want in zip(got, over_ranks(step, {"batch": 2})(args), strict=True):
        assert np.array_equal(mine[0], want)


def test_loop_in_a_conditional_is_cut_for_one_rank() -> None:
    def step(x: Any) -> Any:
        double = lambda v: lax.while_loop(  # noqa: E731
            lambda c: c.sum() < 50, lambda c: c * 2 + lax.psum(c, "batch"), v
        )
        return lax.cond(x.sum() > 0, double, lambda v: v - 1, x)

    program = cut(step, X, axes={"batch": 1})
    assert [run_program(program, [[sign * X]])[0][0].tolist() for sign in (1, -1)] == [
        [27] * 3,
        [-2] * 3,
    ]


def test_jointly_ended_inner_loop_is_not_cut_short() -> None:
    """A finished rank follows an inner loop that is decided along the axis of its exchange."""

    def step(x: Any) -> Any:
        bound = lax.pmax(x.sum(), "col") + 1500

        def outer(_: Any, c: Any) -> Any:
            inner = lax.while_loop(
                lambda d: d[0] < bound, lambda d: (d[0] + 1, lax.pmax(d[1] + 1, "col")), (0.0, c)
            )
            return inner[1] % 7 + lax.psum(c, "row")

        return lax.fori_loop(0, 1 + lax.axis_index("col"), outer, x)

    axes = {"row": 2, "col": 2}
    program = cut(step, X, axes=axes)
    assert len(votes(program)) == 1 and votes(program)[0].startswith(
        "pmax row,col int32[] loop='while ?'"
    )
    args = [(own(r),) for r in range(4)]
    for mine, want in zip(at_once(program, args), over_ranks(step, axes)(args), strict=True):
        assert np.array_equal(mine, want)


@pytest.mark.mostly_integration("2000", "2001")
@pytest.mark.parametrize("iterations", [FROZEN, FROZEN + 1, FROZEN + 500])
def test_finished_rank_contributes_until_others_finish(iterations: int) -> None:
    """A finished rank keeps contributing as long as others continue."""

    def step(outer: Any, inner: Any) -> Any:
        def more(c: Any) -> Any:
            return c[0] + 1, c[1] + 1, c[2] + lax.psum(c[1], "batch") % 7

        loop = lambda _, s: s + lax.while_loop(lambda c: c[0] < inner, more, (0, 0.0, 0.0))[2]  # noqa: E731
        return lax.fori_loop(0, outer, loop, 0.0)

    args = [(jnp.int32(1 + r), jnp.int32(iterations)) for r in range(2)]
    got = at_once(cut(step, *args[0]), args)
    assert [*map(float, got)] == [*map(float, over_ranks(step, {"batch": 2})(args))]


def left_early(outer: Any, inner: Any, *, kind: str) -> Any:
    """A finished rank needs `inner` iterations, the other two; the other's result sums them."""
    add = lambda x: x + (lax.psum(x + 1, "batch") > 0 if kind == "exchanges" else 1)  # noqa: E731
    length = lambda: lax.while_loop(lambda x: x < inner, add, jnp.zeros_like(inner))  # noqa: E731

    def of_others() -> Any:
        if kind == "in a scan":
            return lax.scan(
                lambda c, _: (c + lax.psum(length(), "batch"), None),
                jnp.zeros_like(inner),
                length=2,
            )[0]
        if kind == "in a cond":
            return lax.psum(lax.cond(inner > 1, length, lambda: inner), "batch")
        if kind == "hidden by a maximum":
            return lax.pmax(jnp.minimum(length(), 3), "batch")
        return lax.psum(length(), "batch")

    return lax.fori_loop(
        0, outer, lambda i, s: jnp.where(i == 0, 0, of_others()), jnp.zeros_like(inner)
    )


KINDS = ["exchanges", "computes", "in a scan", "in a cond", "hidden by a maximum"]


@pytest.mark.mostly_integration("in a cond-int32")
@pytest.mark.parametrize("number", [jnp.float32, jnp.int32])
@pytest.mark.parametrize("kind", KINDS)
def test_unfinished_inner_loop_is_an_error_on_all(monkeypatch: Any, kind: str, number: Any) -> None:
    monkeypatch.setattr(lockstep, "FROZEN", 50)
    monkeypatch.setattr(lockstep, "FROZEN_LOCAL", 50)
    step = lambda outer, inner: left_early(outer, inner, kind=kind)  # noqa: E731
    for needed in (50, 51):
        args = [(jnp.int32(1), number(needed)), (jnp.int32(2), number(2))]
        program = cut(step, *args[0])
        if needed == 50:
            got = run_program(program, [list(a) for a in args])
            assert [float(g) for (g,) in got] == [*map(float, over_ranks(step, {"batch": 2})(args))]
        else:
            with pytest.raises(
                ExchangeError,
                match="On 1 of the ranks that had finished it, .* did not end within",
            ) as raised:
                run_program(program, [list(a) for a in args])
            assert str(raised.value).count("test_loops.py") == 2


@pytest.mark.parametrize("check", [True, False])
def test_loop_in_a_shard_map_equals_vmap(check: bool) -> None:
    def varying(x: Any) -> Any:
        return lax.pcast(x, "batch", to="varying") if check else x

    def step(t: Any, x: Any) -> Any:
        return lax.fori_loop(
            0, number(t), lambda i, c: c + varying(lax.psum(c[::-1] + i, "batch")), x
        )

    mesh = jax.sharding.AbstractMesh((2,), ("batch",))
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch"), check_vma=check
    )
    args = [(jnp.int32(1), own(r)) for r in range(2)]
    got = run_program(cut(mapped, *args[0]), [list(a) for a in args])
    for mine, want in zip(
        got, over_ranks(TABLE["frozen carry"].step, {"batch": 2})(args), strict=True
    ):
        assert np.array_equal(mine[0], want)


@pytest.mark.parametrize(
    ("step", "votes"),
    [
        (micro_batches, True),
        (
            lambda s, t, x: lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, lax.psum(c[1], "batch")), (0, s)
            ),
            False,
        ),
    ],
)
def test_notice_tells_of_the_vote(step: Any, votes: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jaxcross"):
        program = cut(step, jnp.float32(0), jnp.int32(0), jnp.float32(0))
        advise(program.traced, program, set())
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        "exchanges inside a while at" in text and "test_loops.py" in text and "correct" not in text
    )
    assert ("vote before each" in text) == votes
