"""Ranks may differ in batches, stages or results without their exchanges counting as swapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxcross.program.ir import Program
from tests.support.exchange_table import SHAPES, TABLE, start
from tests.support.label_ranks import ORDERS, TREE, X, both, program_of, verdict
from tests.support.zoo import ZOO

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def averaged(order: Any, tree: Any) -> Any:
    return {k: lax.pmean(tree[k], "x") for k in order}


def test_ranks_that_do_not_exchange_may_differ() -> None:
    """Each stage averages over its own replicas. A different order within one stage is detected."""
    axes = {"stage": 2, "x": 2}

    def programs(orders: Sequence[Any]) -> list[Program]:
        return [program_of(lambda t, o=order: averaged(o, t), TREE, axes=axes) for order in orders]

    one, other = ORDERS
    assert verdict(programs([one, one, other, other])) == ""
    assert verdict(programs([one, one, one, other])).startswith("ranks 2 and 3 make")
    assert verdict(programs([one, other, one, other])).startswith("ranks 0 and 1 make")


def test_order_of_a_dict_does_not_matter() -> None:
    def step(order: Any, tree: Any) -> Any:
        return lax.pmean({k: tree[k] for k in order}, "x")

    assert both(step, TREE) == ""


CUT_IN_THREE = ("linen pmap-style", "already jitted", "scan", "cond by data", "two axes")
CUT_ROWS = [
    *(pytest.param("whole", row, id=f"whole-{row.name}") for row in ZOO),
    *(
        pytest.param(
            3,
            row,
            id=f"3-{row.name}",
            marks=[] if row.name in CUT_IN_THREE else pytest.mark.exhaustive,
        )
        for row in ZOO
    ),
]


@pytest.mark.mostly_integration(
    "whole-scan", "whole-while", "3-linen pmap-style", "3-already jitted"
)
@pytest.mark.parametrize(("cut", "row"), CUT_ROWS)
def test_batch_size_is_no_error(row: Any, cut: Any) -> None:
    step, state = row.build(4)
    batch = row.batch(0, 0)
    sizes = (
        (4, 1, 3, 4) if isinstance(batch, dict) else (12,) * 4
    )  # others are matrices as large as the state
    batches = [jax.tree.map(lambda x, n=n: x[:n], batch) for n in sizes]
    programs = [program_of(step, state, b, axes=row.axes(4), cut=cut) for b in batches]
    assert verdict(programs) == ""


@pytest.mark.mostly_integration("mean, hierarchical", "local_sgd", "gossip, ring")
@pytest.mark.parametrize("row", [row for row in TABLE if row.worlds(4)], ids=lambda row: row.name)
def test_batch_size_is_no_error_for_strategies(row: Any) -> None:
    tx = row.made(4)

    def loss(params: Any, x: Any) -> Any:
        y = jnp.tanh(x @ params["kernel"]) * params["scale"]
        others = sum(jnp.sum(params[k] ** 2) for k in ("conv", "tiny"))
        return jnp.mean(y) + others * jnp.mean(x) + jnp.mean(y[:, :5] * params["bias"])

    def step(carry: Any, x: Any) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return (jax.tree.map(jnp.add, params, updates), state), lax.pmean(
            loss(params, x), tuple(row.axes(4))
        )

    rows = SHAPES["kernel"][0]
    programs = [
        program_of(step, start(tx), jnp.ones((n, rows)), axes=row.axes(4)) for n in (8, 1, 3, 8)
    ]
    assert verdict(programs) == ""


def test_parts_of_a_batch_in_any_order() -> None:
    """The parts' results are summed, so it doesn't matter which parts of the ranks are combined."""

    def step(order: Any, tree: Any) -> Any:
        n = {k: n for n, k in enumerate(sorted(order))}
        return sum(lax.psum(jnp.tanh(tree["a"][n[k]] * 2), "x") for k in order)

    assert both(step, TREE) == ""


def test_microbatches_of_a_list_in_any_order() -> None:
    """Values that go through products have no parts, so any micro-batch may come first."""

    def step(order: Any, tree: Any) -> Any:
        n = {k: n for n, k in enumerate(sorted(order))}
        return [lax.pmean(jnp.mean(jnp.tanh(tree["a"][n[k]] @ X.T)), "x") for k in order]

    assert both(step, TREE) == ""


def test_ranks_may_choose_their_own_rows_by_data() -> None:
    """The step reads the index from an array, so no exchange of one rank matches another rank's."""

    def step(order: Any, tree: Any) -> Any:
        rows = tree["a"][jnp.array([sorted(order).index(k) for k in order])]
        return [lax.psum(row, "x") for row in rows]

    assert both(step, TREE) == ""


@pytest.mark.parametrize("nothing", [jnp.zeros_like, lambda x: x * False], ids=["zeros", "product"])
def test_all_gather_by_sums(nothing: Any) -> None:
    """Ranks have their own values, and results needed from neighbours, at different places."""

    def step(rank: Any, x: Any) -> Any:
        every = [lax.psum(x if n == rank else nothing(x), "x") for n in range(3)]
        return {
            "every": every,
            "mine": every[rank],
            "left": every[rank - 1],
            "right": every[(rank + 1) % 3],
        }

    assert both(step, X, orders=range(3), axes={"x": 3}) == ""


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_all_gather_by_maxima(dtype: Any) -> None:
    """A rank without a value for a place contributes the smallest number of its type there."""
    x = X.astype(dtype)
    least = (jnp.iinfo if dtype == jnp.int32 else jnp.finfo)(dtype).min

    def step(rank: Any, x: Any) -> Any:
        return [lax.pmax(x if n == rank else jnp.full_like(x, least), "x") for n in range(3)]

    assert both(step, x, orders=range(3), axes={"x": 3}) == ""


def test_parts_of_a_batch_that_is_short_on_one_rank() -> None:
    """Row 2 starts the second of three micro-batches on one rank, and is the third on another."""

    def step(x: Any) -> Any:
        size, total = len(x) // 3, jnp.zeros(3)
        for n in range(3):
            total = total.at[n].add(lax.psum(x[n * size : (n + 1) * size].sum(), "x"))
        return total

    assert (
        verdict([program_of(step, jnp.ones((rows, 3)), axes={"x": 3}) for rows in (6, 6, 3)]) == ""
    )


def test_loop_unrolled_by_batch_size() -> None:
    """Micro-batch and equation counts differ by rank, yet their exchanges are recognised."""

    def step(order: Any, tree: Any, batch: Any) -> Any:
        def loss(t: Any, x: Any) -> Any:
            for k in sorted(t):
                x = jnp.tanh(x @ t[k])
            return jnp.mean(x)

        total, grads = jnp.float32(0), jax.tree.map(jnp.zeros_like, tree)
        for n in range(0, len(batch), 2):
            value, more = jax.value_and_grad(loss)(tree, batch[n : n + 2])
            total, grads = total + value, jax.tree.map(jnp.add, grads, more)
        mean = {k: lax.pmean(grads[k], "x") for k in order}
        return {k: tree[k] - 0.1 * mean[k] for k in mean}, lax.pmean(total / len(batch), "x")

    def programs(orders: Sequence[Any], cut: Any = "whole") -> list[Program]:
        tree, sizes, axes = {k: jnp.eye(3) for k in "abc"}, (2, 8, 5), {"x": 3}
        pairs = zip(orders, sizes, strict=True)
        return [
            program_of(lambda t, b, o=o: step(o, t, b), tree, jnp.ones((n, 3)), cut=cut, axes=axes)
            for o, n in pairs
        ]

    assert verdict(programs([ORDERS[0]] * 3)) == verdict(programs([ORDERS[0]] * 3, cut=2)) == ""
    assert verdict(programs([ORDERS[0], ORDERS[0], ORDERS[1]])).startswith("ranks 0 and 2 make")


def dense(w: Any, h: Any) -> Any:
    return jnp.tanh(h @ w)


def gated(w: Any, h: Any) -> Any:
    return h * jax.nn.sigmoid(h @ w)


def normed(w: Any, h: Any) -> Any:
    return (h - h.mean()) / h.std() @ w


@pytest.mark.parametrize(
    "layers", [[(dense, gated), (gated, dense)], [(dense, normed), (normed, dense)]]
)
def test_stages_of_a_pipeline_on_a_ring(layers: Any) -> None:
    """Each rank runs its own two layers in its own order, and passes its value on after each."""

    def step(mine: Any, params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x
            for layer in mine:
                h = lax.ppermute(layer(p[layer.__name__], h), "x", [(0, 1), (1, 0)])
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), lax.pmean(value, "x")

    params = {f.__name__: jnp.eye(3) for f in layers[0]}
    assert both(step, params, X, orders=layers) == ""
    assert both(step, params, X, orders=[layers[0]] * 2) == ""


def test_stages_of_a_pipeline_that_start_and_end_apart() -> None:
    """The first rank is idle in the last round, the last rank in the first: they send zeros."""

    def step(rank: Any, params: Any, x: Any) -> Any:
        layer, rounds, total = (dense, normed)[rank], 4, jnp.zeros((2, 3))
        for n in range(rounds):
            idle = n == (rounds - 1 if rank == 0 else 0)
            mine = jnp.zeros((2, 3)) if idle else layer(params["w"], x[n : n + 2])
            got = lax.psum(mine, "x")
            total = total + (layer(params["w"], got) if rank == 1 else 0.0 * got)
        return {"w": params["w"] - total.T @ total}

    assert both(step, {"w": jnp.eye(3)}, jnp.ones((8, 3)), orders=(0, 1)) == ""


def test_stages_of_a_pipeline_there_and_back() -> None:
    """The first rank has only zeros to send backward, the last only zeros to send forward."""

    def step(rank: Any, params: Any, x: Any) -> Any:
        zeros, mine = jnp.zeros((4, 3)), (dense, gated)[rank](params["w"], x)
        there = lax.psum(mine if rank == 0 else zeros, "x")
        back = lax.psum(mine if rank == 1 else zeros, "x")
        grad = x.T @ back if rank == 0 else there.T @ x
        return {"w": params["w"] - 0.1 * lax.pmean(grad, "x")}, jnp.mean(there), jnp.mean(back)

    assert both(step, {"w": jnp.eye(3)}, X, orders=(0, 1)) == ""


def test_ring_whose_ranks_start_with_their_own_block() -> None:
    """A hand-written all-reduce: rank r sends block r first."""

    def step(rank: Any, blocks: Any) -> Any:
        blocks, ring = list(blocks), [(i, (i + 1) % 3) for i in range(3)]
        for n in range(2):
            got = lax.ppermute(blocks[(rank - n) % 3], "x", ring)
            blocks[(rank - n - 1) % 3] += got
        for n in range(2):
            blocks[(rank - n) % 3] = lax.ppermute(blocks[(rank - n + 1) % 3], "x", ring)
        return blocks

    assert both(step, [X, X, X], orders=range(3), axes={"x": 3}) == ""


def test_more_results_on_one_rank() -> None:
    """Results of a shorter tuple aren't confused with those of a longer one at the same place."""

    def step(rank: Any, a: Any, b: Any) -> Any:
        loss, (ga, gb) = jax.value_and_grad(lambda a, b: jnp.sum(jnp.tanh(X @ a.T) @ b), (0, 1))(
            a, b
        )
        ga, gb = lax.pmean(ga, "x"), lax.pmean(gb, "x")
        return (loss, ga, gb) if rank == 0 else (ga, gb)

    assert both(step, X, X, orders=(0, 1)) == ""


@pytest.mark.parametrize(
    "made", [lambda x, w: x, lambda x, w: jnp.tanh(x @ w)], ids=["argument", "computed"]
)
@pytest.mark.parametrize(
    "used", [lambda y, w: w[0] * y, lambda y, w: y @ w], ids=["element-wise", "product"]
)
@pytest.mark.parametrize(
    ("exchange", "nothing"), [(lax.psum, 0.0), (lax.pmax, -jnp.inf)], ids=["psum", "pmax"]
)
def test_ranks_in_turns(made: Any, used: Any, exchange: Any, nothing: float) -> None:
    """One rank after another broadcasts its value, and the results are summed."""

    def step(rank: Any, x: Any, w: Any) -> Any:
        total = jnp.zeros((4, 3))
        for turn in range(3):
            mine = made(x, w) if turn == rank else jnp.full((4, 3), nothing)
            total += used(exchange(mine, "x"), w)
        return total

    assert both(step, X, jnp.eye(3), orders=range(3), axes={"x": 3}) == ""
