"""Exchanges of the previous step's results wait for no computation; all costly work overlaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxcross.program import stages
from jaxcross.program.ir import Program
from jaxcross.program.text import parse
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide, run_program, vmap_oracle

WIDTH = 32
AXES = {"batch": 2}
pytestmark = pytest.mark.usefixtures("compiled_quickly")


def loss_of(params: Any, x: Any) -> Any:
    return (jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2).mean()


def leaf_by_leaf(pending: Any) -> Any:
    return lax.pmean(pending, "batch")


def in_sixteen_bits(pending: Any) -> Any:
    return jax.tree.map(
        lambda x: lax.psum(x.astype(jnp.bfloat16), "batch").astype(x.dtype) / 2, pending
    )


def as_a_vector(pending: Any) -> Any:
    mean = lax.pmean(jnp.concatenate([x.reshape(-1) for x in pending.values()]), "batch")
    return {k: v.reshape(WIDTH, WIDTH) for k, v in zip(pending, jnp.split(mean, 2), strict=True)}


def in_two_hops(pending: Any) -> Any:
    def mean(x: Any) -> Any:
        return (
            lax.all_gather(
                lax.psum_scatter(x.reshape(-1), "batch", tiled=True), "batch", tiled=True
            )
            / 2
        )

    return jax.tree.map(lambda x: mean(x).reshape(x.shape), pending)


MEANS = (leaf_by_leaf, in_sixteen_bits, as_a_vector, in_two_hops)


def step_of(mean: Callable[[Any], Any], *, metric: bool = False) -> Callable[..., Any]:
    def step(state: Any, x: Any) -> Any:
        params, pending, m = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        due = mean(pending)
        m = jax.tree.map(lambda a, b: 0.9 * a + b, m, due)
        params = jax.tree.map(lambda p, a: p - 0.1 * a, params, m)
        return (params, grads, m), lax.pmean(loss, "batch") if metric else loss

    return step


def state_of(fill: float) -> Any:
    leaf = np.linspace(-1, fill, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) / 8
    return tuple({"a": jnp.asarray(leaf * k), "b": jnp.asarray(leaf.T * k)} for k in (1, 2, 3))


def cut_of(step: Callable[..., Any], *args: Any, cut: Any = "whole") -> Program:
    traced = trace(step, args, axes=AXES, wire=LocalRanks(), donate_argnums=(0,))
    return stages.cut(decide(traced, jax.tree.leaves(args)), cut)


def products(program: Program) -> list[int]:
    return [
        sum(e.primitive.name == "dot_general" for e in s.jaxpr.jaxpr.eqns) for s in program.segments
    ]


@pytest.mark.mostly_integration(
    "64-in_two_hops-False-whole",
    "64-in_two_hops-False-4",
    "64-in_two_hops-True-whole",
    "64-in_two_hops-True-auto",
    "64-in_two_hops-True-4",
)
@pytest.mark.parametrize("cut", ["whole", "auto", 4])
@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("rows", [1, 64])
def test_carried_exchange_waits_for_nothing_and_overlaps_all_products(
    mean: Any, metric: bool, cut: Any, rows: int
) -> None:
    """Even gradients larger than their inputs aren't left until after the commit."""
    program = cut_of(step_of(mean, metric=metric), state_of(1), jnp.ones((rows, WIDTH)), cut=cut)
    (carried,) = program.order.carried
    assert not program.order.after[carried]
    assert len(program.collectives) == 1 + metric
    early = [s.index for s in program.segments if s.index not in program.order.after_commit]
    assert sum(products(program)[n] for n in early) == sum(products(program)) == 5
    lines = str(program).splitlines()[1:]
    assert [n for n, line in enumerate(lines) if ", carried <- inputs" in line] == [carried]
    assert parse(program.text()).text() == program.text()


@pytest.mark.mostly_integration("True-in_sixteen_bits", "True-as_a_vector", "True-in_two_hops")
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("metric", [False, True])
def test_results_are_those_of_vmap(mean: Any, metric: bool) -> None:
    step = step_of(mean, metric=metric)
    ranks = [(state_of(r), jnp.full((4, WIDTH), 0.5 + r)) for r in range(2)]
    program = cut_of(step, *ranks[0])
    got = run_program(program, [jax.tree.leaves(args) for args in ranks])
    for mine, theirs in zip(got, vmap_oracle(step, AXES, ranks), strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("cut", ["whole", "auto", 3])
def test_what_a_later_exchange_needs_of_the_work_is_made_early(cut: Any) -> None:
    """A metric of gradients and update comes after both, but gradients don't wait for updates."""

    def step(state: Any, x: Any) -> Any:
        params, pending, _ = state
        due = lax.psum(pending, "batch")
        grads = jax.grad(loss_of)(params, x)
        align = lax.psum(jnp.vdot(grads["b"], due["b"]), "batch")
        return jax.tree.map(jnp.subtract, params, due), grads, align

    ranks = [(state_of(r), jnp.full((4, WIDTH), 0.5 + r)) for r in range(2)]
    program = cut_of(step, *ranks[0], cut=cut)
    (carried,) = program.order.carried
    assert (
        sum(
            products(program)[n]
            for n, after in enumerate(program.order.after)
            if not after >> carried & 1
        )
        == 5
    )
    got = run_program(program, [jax.tree.leaves(args) for args in ranks])
    for mine, theirs in zip(got, vmap_oracle(step, AXES, ranks), strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_counter_decides_whether_it_is_made(turn: int) -> None:
    """`lax.cond` on a counter, as in every strategy with rounds."""

    def step(state: Any, turn: Any, x: Any) -> Any:
        params, pending, m = state
        grads = jax.grad(loss_of)(params, x)
        due = lax.cond(turn == 1, lambda: leaf_by_leaf(pending), lambda: pending)
        return (jax.tree.map(lambda p, d: p - d, params, due), grads, m), turn + 1

    program = cut_of(step, state_of(1), jnp.int32(turn), jnp.ones((4, WIDTH)))
    assert len(program.order.carried) == len(program.collectives) == turn


def of_the_batch(state: Any, x: Any) -> Any:
    """The operand is derived from a batch, whose rows may not exist on another rank."""
    return jax.grad(loss_of)(state[0], x), lax.psum((x * 2).sum(0), "batch")


def of_arithmetic_with_other_readers(state: Any, x: Any) -> Any:
    """The product has two readers, so it mustn't be computed twice.

    XLA may contract a multiplication and the addition that reads it into one operation, so a second
    copy of the product could differ in its last bit.
    """
    scaled = state[1]["a"] * 3
    return jax.grad(loss_of)(state[0], x), lax.psum(scaled, "batch"), scaled + 1


def of_work(state: Any, x: Any) -> Any:
    return jax.grad(loss_of)(state[0], x), lax.psum(state[1]["a"] @ state[1]["b"], "batch")


def that_all_work_waits_for(state: Any, x: Any) -> Any:
    whole = jax.tree.map(lambda p: lax.pmean(p, "batch"), state[0])
    return jax.grad(loss_of)(whole, x)


def without_other_work(state: Any, x: Any) -> Any:
    return lax.psum(state[1], "batch"), jnp.tanh(x)


@pytest.mark.parametrize(
    "step",
    [
        of_the_batch,
        of_arithmetic_with_other_readers,
        of_work,
        that_all_work_waits_for,
        without_other_work,
    ],
)
def test_other_exchanges_are_not_carried(step: Any) -> None:
    program = cut_of(step, state_of(1), jnp.ones((4, WIDTH)))
    assert not program.order.carried and "carried" not in str(program)


def test_it_comes_before_all_other_exchanges() -> None:
    """Exchanges thus have one order, even on a rank whose other work lets none be carried."""

    def step(state: Any, x: Any) -> Any:
        def doubled(found: tuple[Any, Any]) -> tuple[Any, Any]:
            return found[0] + 1, lax.psum(found[1], "batch")

        _, far = lax.while_loop(lambda found: found[0] < 2, doubled, (0, state[1]["a"]))
        return lax.psum(jax.grad(loss_of)(state[0], x), "batch"), far

    program = cut_of(step, state_of(1), jnp.ones((4, WIDTH)))
    assert len(program.collectives) == 2
    loop = program.collectives[1].index
    assert not any(
        program.order.after[loop] >> s.index & 1 for s in program.segments if s.kind == "compute"
    )
    assert not program.order.carried


def test_its_host_operations_leave_the_computation_alone() -> None:
    """A value cast for the exchange and read by the computation is cast in both places."""

    def step(state: Any, x: Any) -> Any:
        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state[0])
        grads = jax.grad(loss_of)(narrow, x.astype(jnp.bfloat16))
        return grads, lax.psum(narrow, "batch")

    program = cut_of(step, state_of(1), jnp.ones((4, WIDTH)))
    (carried,) = program.order.carried
    assert all(carried not in needs for needs in program.order.needs)
    casts = [
        sum(e.primitive.name == "convert_element_type" for e in s.jaxpr.jaxpr.eqns)
        for s in program.segments
    ]
    assert casts[carried] == 2 and casts[0] >= 2
    # Values that only the exchange reads are cast there alone, and its sums are cast back
    # afterwards.
    program = cut_of(step_of(in_sixteen_bits), state_of(1), jnp.ones((4, WIDTH)))
    casts = [
        sum(e.primitive.name == "convert_element_type" for e in s.jaxpr.jaxpr.eqns)
        for s in program.segments
    ]
    assert casts == [0, 2, 2]


def test_gradients_are_whole_before_the_commit():
    """Gradients' transposes and batch sums are computed before the commit too.

    The optimizer's next state comes after the commit.
    """

    def step(state: Any, x: Any) -> Any:
        params, pending, m = state
        grads = jax.grad(lambda p: (jnp.tanh(x @ p["a"] + p["b"]) ** 2).mean())(params)
        m = jax.tree.map(lambda old, grad: 0.9 * old + grad, m, grads)
        params = jax.tree.map(
            lambda p, step, due: p - 0.1 * step - due, params, m, leaf_by_leaf(pending)
        )
        return params, grads, m

    tree = {"a": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}
    program = cut_of(step, (tree, tree, tree), jnp.ones((64, WIDTH)))
    early, late = set[str](), set[str]()
    for segment in program.segments:
        names = late if segment.index in program.order.after_commit else early
        names.update(e.primitive.name for e in segment.jaxpr.jaxpr.eqns)
    assert {"dot_general", "transpose", "reduce_sum"} <= early
    assert late.isdisjoint({"dot_general", "transpose", "reduce_sum", "tanh"})
    assert {"mul", "sub"} <= late
