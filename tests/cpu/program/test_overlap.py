"""A step cut where gradients become ready: exchanges wait for computation, not each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jaxcross import exchange
from jaxcross.program import stages
from jaxcross.program.ir import Program
from jaxcross.program.trace import Traced, trace
from jaxcross.testing import LocalRanks, decide

LAYERS, WIDTH = 8, 64
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.chain(
        optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "adamw": optax.adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "adafactor": optax.adafactor(1e-3),
}


def flat(
    step: Any, *args: Any, axes: dict[str, int] | None = None, donate: tuple[int, ...] = ()
) -> Traced:
    traced = trace(step, args, axes=axes or {"batch": 2}, wire=LocalRanks(), donate_argnums=donate)
    return decide(traced, jax.tree.leaves(args))


def layers() -> Any:
    return [{"kernel": jnp.ones((WIDTH, WIDTH)), "bias": jnp.ones(WIDTH)} for _ in range(LAYERS)]


def loss_of(params: Any, x: Any) -> Any:
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return (x**2).mean()


gradients = jax.grad(loss_of)


def program(tx: optax.GradientTransformation, pieces: int, wire: str | None = None) -> Program:
    mean = exchange.mean("batch", wire_dtype=None if wire is None else jnp.dtype(wire))

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        grads = mean.update(grads, optax.EmptyState())[0]
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": lax.pmean(loss, "batch"), "norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = layers()
    return stages.cut(
        flat(step, (params, tx.init(params)), jnp.ones((4, WIDTH)), donate=(0,)),
        pieces,
        bucket_bytes=0,
    )


@pytest.mark.mostly_integration("sgd-bfloat16", "nesterov-None", "adamw-None", "adamw-bfloat16")
@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_travel_during_the_backward_pass(optimizer: str, wire: str | None) -> None:
    cut = program(OPTIMIZERS[optimizer], pieces=4, wire=wire)
    collectives = [s.index for s in cut.collectives]
    assert len(collectives) >= 4
    after = cut.order.after
    for index in collectives:
        assert [n for n in collectives if after[index] >> n & 1] == [], cut.text()
    assert cut.segments[-1].kind == "compute"
    assert all(after[-1] >> n & 1 for n in collectives)
    # This holds even if the code that uses each gradient comes after the whole backward pass.
    products = [
        sum(eqn.primitive.name == "dot_general" for eqn in segment.jaxpr.jaxpr.eqns)
        for segment in cut.segments
        if segment.kind == "compute"
    ]
    assert sum(products) == 3 * LAYERS - 1
    assert max(products[1:4]) - min(products[1:4]) <= 2, products
    assert products[0] <= LAYERS + 5, products


def test_dependents_of_an_exchange_run_before_the_next() -> None:
    """Between two exchanges in a row, small results of the first are computed before the second."""

    def step(x: Any) -> Any:
        first = lax.pmean(x, "batch")
        second = lax.pmean(jnp.tanh(first @ first), "batch")
        return second, (first @ first.T).sum()

    cut = stages.cut(flat(step, jnp.ones((WIDTH, WIDTH))), "whole", bucket_bytes=0)
    middle = cut.segments[cut.collectives[0].index + 1]
    assert any(eqn.primitive.name == "reduce_sum" for eqn in middle.jaxpr.jaxpr.eqns)


def test_what_reads_two_chains_makes_neither_wait() -> None:
    """The common reader of two chains of exchanges and products waits for all.

    It would fit before the last exchange.
    """

    def step(a: Any, b: Any) -> Any:
        a, b = (jnp.tanh(lax.pmean(x @ x, "batch") @ x) for x in (a, b))
        return lax.pmean(a, "batch"), lax.pmean(b, "batch"), jnp.vdot(a, b)

    cut = stages.cut(
        flat(step, jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH))), 4, bucket_bytes=0
    )
    first, second, *later = (s.index for s in cut.collectives)
    assert [[cut.order.after[n] >> before & 1 for before in (first, second)] for n in later] == [
        [1, 0],
        [0, 1],
    ]


def test_light_work_joins_a_segment_that_waits_for_as_much() -> None:
    """Between two exchanges with nothing in between, it would be a separate segment."""

    def step(a: Any, b: Any) -> Any:
        a, b = lax.psum(a, "batch"), lax.psum(b, "batch")
        return lax.psum(jnp.tanh(a @ b), "batch"), a.sum()

    cut = stages.cut(
        flat(step, jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH))), 3, bucket_bytes=0
    )
    kinds = [s.kind for s in cut.segments]
    assert kinds == ["collective", "collective", "compute", "collective"], cut.text()


def test_second_exchange_does_not_delay_gradients() -> None:
    """Averages a metric of averaged gradients: light work on the exchanges' side (cut rule 4)."""

    def step(params: Any, x: Any) -> Any:
        grads = lax.pmean(gradients(params, x), "batch")
        return grads, lax.pmean(optax.tree.norm(grads), "batch")

    cut = stages.cut(flat(step, layers(), jnp.ones((4, WIDTH))), 4, bucket_bytes=0)
    collectives = [s.index for s in cut.collectives]
    assert len(collectives) == 4, "the norm travels with the last gradients"
    assert all(3 <= len(s.exchanges) <= 6 for s in cut.collectives)
    assert cut.collectives[-1].exchanges[-1].shape == ()
    assert not any(
        cut.order.after[index] >> n & 1 for index in collectives[:3] for n in collectives
    )


def test_hierarchical_mean_exchanges_are_separate_chains() -> None:
    def mean(g: Any) -> Any:
        part = lax.psum_scatter(g.reshape(-1), "local", tiled=True)
        return lax.all_gather(lax.psum(part, "node") / 4, "local", tiled=True).reshape(g.shape)

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(mean, gradients(params, x))

    cut = stages.cut(
        flat(step, layers(), jnp.ones((4, WIDTH)), axes={"node": 2, "local": 2}), 4, bucket_bytes=0
    )
    collectives = [s.index for s in cut.collectives]
    assert len(collectives) == 4
    for segment in cut.collectives:
        assert len({x.op for x in segment.exchanges}) == 3, (
            "reduce-scatter, sum and gather of its gradients"
        )
        assert not any(cut.order.after[segment.index] >> n & 1 for n in collectives)


@pytest.mark.mostly_integration("1-1048576", "2-0", "2-1048576", "4-0", "4-1048576")
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_the_order_does_not_depend_on_the_batch(pieces: int, bucket_bytes: int) -> None:
    """JAX omits work that a single row doesn't need.

    A rank with a short last batch still exchanges what the others do.
    """
    step = lambda params, x: lax.pmean(gradients(params, x), "batch")  # noqa: E731
    cuts = [
        stages.cut(flat(step, layers(), jnp.ones((rows, WIDTH))), pieces, bucket_bytes=bucket_bytes)
        for rows in (1, 4)
    ]
    assert cuts[0].exchange_signature() == cuts[1].exchange_signature()


@pytest.mark.parametrize("rows", [1, 2, 32])
def test_segment_boundaries_do_not_depend_on_the_batch(rows: int) -> None:
    """The batch size enters the work in between, and ranks may have different batch sizes."""

    def moments(x: Any) -> Any:
        mean = lax.pmean(x.sum(0), "batch")
        return mean, lax.pmean(((x - mean) ** 2).sum(0), "batch")

    def of_the_mean_alone(x: Any) -> Any:
        mean = lax.pmean(x.sum(0), "batch")
        return mean, lax.pmean((jnp.broadcast_to(mean, x.shape) ** 2).sum(0), "batch")

    for step in (moments, of_the_mean_alone):
        cut = stages.cut(flat(step, jnp.ones((rows, 8))), "whole")
        assert [len(s.exchanges) for s in cut.collectives] == [1, 1]


def test_what_only_exchanges_make_stays_between_them() -> None:
    def again(x: Any) -> Any:
        return lax.psum(2 * lax.pmean(x, "batch") - x, "batch")

    assert [
        len(s.exchanges) for s in stages.cut(flat(again, jnp.ones(8)), "whole").collectives
    ] == [2]


def test_empty_leaf_is_cut_like_the_others() -> None:
    step = lambda *leaves: lax.pmean(leaves, "batch")  # noqa: E731
    cut = stages.cut(flat(step, jnp.zeros((0, 3)), jnp.ones(3), jnp.zeros(0)), "whole")
    assert [x.shape for x in cut.exchanges] == [(3,)]


def test_a_shared_buffer_has_at_most_bucket_bytes() -> None:
    traced = flat(lambda *leaves: lax.psum(leaves, "batch"), *[jnp.ones(1)] * 4)
    shapes = [
        [x.shape for x in stages.cut(traced, "whole", bucket_bytes=n).exchanges] for n in (7, 8)
    ]
    assert shapes == [[(1,)] * 4, [(2,)] * 2]


def test_ranks_compare_buffer_layout_and_boundaries() -> None:
    step = lambda params, x: lax.pmean(gradients(params, x), "batch")  # noqa: E731
    swapped = lambda params, x: lax.pmean(  # noqa: E731
        [(layer["kernel"], layer["bias"]) for layer in gradients(params, x)], "batch"
    )
    one, other = (flat(each, layers(), jnp.ones((4, WIDTH))) for each in (step, swapped))
    first, second = stages.cut(one, "whole"), stages.cut(other, "whole")
    assert [x.shape for x in first.exchanges] == [x.shape for x in second.exchanges]
    assert first.exchange_signature() != second.exchange_signature()
    halves, quarters = (
        stages.cut(one, pieces, bucket_bytes=0).exchange_signature().splitlines()
        for pieces in (2, 4)
    )
    assert halves[-1].startswith("exchanges of each segment: ")
    assert halves[-1].count(",") == 1
    assert quarters[-1].count(",") == 3
