"""Meshes and trees: where ranks are, what they hold, and what's rejected before the first step."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxcross import tensor
from jaxcross.program.trace import trace
from jaxcross.tensor import Mesh
from jaxcross.testing import LocalRanks, over_ranks
from jaxcross.wire.rank_grid import make_rank_grid
from tests.support.tensor_case import BATCH, LENGTH, MESHES, Training, batch, on_ranks, transformer

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_ranks_stand_where_crossover_puts_them(mesh: Mesh) -> None:
    for rank in range(mesh.ranks):
        world = make_rank_grid(mesh.axes, rank=rank, size=mesh.ranks)
        assert {a: mesh.coords(rank)[a] for a in mesh.axes} == dict(
            zip(world.names, world.coords, strict=True)
        )
    if mesh.data == 1 and mesh.tensor == 1:
        for rank in range(mesh.ranks):
            at = mesh.coords(rank)
            assert rank == at["depth"] * mesh.side**2 + at["row"] * mesh.side + at["col"]


def test_axes() -> None:
    assert Mesh().axes == {"data": 1}
    assert Mesh(tensor=4).axes == {"tensor": 4}
    assert Mesh(side=2, data=3).axes == {"data": 3, "row": 2, "col": 2}
    assert Mesh(side=2, depth=2).axes == {"depth": 2, "row": 2, "col": 2}
    assert Mesh(side=2, depth=2).batch == ("depth", "row") and Mesh(data=2, tensor=2).batch == (
        "data",
    )


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_every_batch_row_is_computed_once(mesh: Mesh) -> None:
    rows = np.arange(BATCH)
    seen = np.concatenate(
        [
            mesh.local_batch(rows, r)
            for r in range(mesh.ranks)
            if not mesh.coords(r)["col"] and not mesh.coords(r)["tensor"]
        ]
    )
    np.testing.assert_array_equal(seen, rows)


@pytest.mark.mostly_integration("[1,1,4]", "1-D on 1", "1-D on 2")
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_cutting_and_joining_are_inverse(mesh: Mesh) -> None:
    """Covers parameters and an optimizer state with counters, in 2- and 4-byte types."""
    training = Training(mesh)
    params = jax.tree.map(np.asarray, Training(Mesh()).params())
    params["block_0"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["block_0"])
    tx = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
    state = jax.tree.map(np.asarray, tx.init(params))
    specs = {"params": training.specs, "state": tensor.state_specs(tx, params, training.specs)}
    tree = {"params": params, "state": state}
    parts = [tensor.shard(tree, specs, mesh, rank) for rank in range(mesh.ranks)]
    back = tensor.unshard(parts, specs, mesh)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_specs_are_those_of_the_layout() -> None:
    specs = Training(Mesh(side=2, depth=2)).specs
    assert specs["block_0"]["attention"]["qkv"]["kernel"] == PartitionSpec("row", "col")
    assert specs["block_0"]["before_mlp"]["scale"] == PartitionSpec("col")
    specs = Training(Mesh(tensor=2)).specs
    assert specs["block_0"]["attention"]["qkv"]["kernel"] == PartitionSpec(None, "tensor")
    assert specs["block_0"]["attention"]["out"]["kernel"] == PartitionSpec("tensor", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"side": 0}, "^`side` of the mesh must be .*, got `0`"),
        ({"depth": 1.5}, "^`depth` of the mesh must be .*, got `1.5`"),
        ({"tensor": True}, "^`tensor` of the mesh must be .*, got `True`"),
        (
            {"tensor": 2, "side": 2},
            "^The mesh has both 2 ranks along `tensor` and a grid of side 2 and depth 1.",
        ),
        (
            {"tensor": 2, "depth": 2},
            "^The mesh has both 2 ranks along `tensor` and a grid of side 1 and depth 2.",
        ),
    ],
)
def test_meshes_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(**options)


def test_a_wrong_number_of_ranks() -> None:
    with pytest.raises(ValueError, match="needs 8 ranks, but there are 4. Start 8"):
        Mesh(side=2, depth=2).check_ranks(4)
    with pytest.raises(ValueError, match="^`rank` must be from 0 to 3 on the mesh .*, got 4"):
        Mesh(side=2).coords(4)
    with pytest.raises(ValueError, match="needs 4 ranks, but there are 2"):
        tensor.unshard([{}, {}], {}, Mesh(side=2))


def test_axes_of_another_length() -> None:
    model = tensor.Dense(8, Mesh(tensor=2))
    step = over_ranks(lambda x: model.init(jax.random.key(0), x), {"tensor": 4})
    with pytest.raises(
        ValueError, match="^The mesh has 2 ranks along `tensor`, but the step runs with 4."
    ):
        step([(np.ones((2, 8), np.float32),)] * 4)


def test_axes_in_another_order() -> None:
    """Axes determine the numbering of the ranks."""
    mesh = Mesh(side=2)
    model = tensor.Dense(4, mesh)

    def step(x: jax.Array) -> Any:
        return model.init(jax.random.key(0), x)

    trace(step, (jnp.ones((2, 2)),), axes=mesh.axes, wire=LocalRanks())
    with pytest.raises(
        ValueError,
        match="^The mesh has its axes in the order `row`, `col`, the step in .* `col`, `row`",
    ):
        trace(step, (jnp.ones((2, 2)),), axes={"col": 2, "row": 2}, wire=LocalRanks())


def test_specs_of_another_layout() -> None:
    line, grid = Mesh(tensor=2), Mesh(side=2)
    with pytest.raises(
        ValueError,
        match="^A tensor has a spec over `tensor`, but the mesh has the axes `row`, `col`",
    ):
        tensor.shard([np.ones(4)], [PartitionSpec("tensor")], grid, 0)
    with pytest.raises(
        ValueError, match="^A leaf has a spec over `row`, `col`, but the mesh has the axes `tensor`"
    ):
        tensor.global_norm([np.ones((2, 2))], [PartitionSpec("row", "col")], line)


def test_a_dimension_that_is_cut_over_two_axes() -> None:
    mesh = Mesh(side=2, depth=2)
    rows, whole = PartitionSpec(mesh.batch), np.arange(16, dtype=np.float32).reshape(8, 2)
    parts = [(tensor.shard(whole, rows, mesh, rank),) for rank in range(mesh.ranks)]
    for gathered in over_ranks(lambda part: tensor.gather(part, rows, mesh), mesh.axes)(parts):
        np.testing.assert_array_equal(gathered, whole)
    every = over_ranks(lambda x: mesh.here(x, tuple(rows)), mesh.axes)([(whole,)] * mesh.ranks)
    for (part,), gathered in zip(parts, every, strict=True):
        np.testing.assert_array_equal(gathered, part)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (
            Mesh(side=3),
            {"vocabulary": 25},
            r"`embedding/tokens` of shape \(25, 24\) cannot be sharded: .* 0 has length 25",
        ),
        (
            Mesh(side=3),
            {"features": 20, "heads": 10},
            r"of shape \(24, 20\) .* 1 has length 20, .* ranks along `col`",
        ),
        (
            Mesh(tensor=4),
            {"heads": 6},
            r"^The heads of an attention layer, an array of shape \(6,\) cannot be sharded",
        ),
        (Mesh(), {"heads": 7}, "^`heads` must divide the number of features, 24, got 7"),
    ],
)
def test_shapes_that_do_not_divide(mesh: Mesh, options: dict[str, Any], message: str) -> None:
    model = transformer(mesh).clone(**options)
    with pytest.raises(ValueError, match=message):
        tensor.partition(model, jax.ShapeDtypeStruct((1, LENGTH), jnp.int32))


def test_a_batch_that_does_not_divide() -> None:
    message = "dimension 0 has length 6, which is no multiple of the 4 ranks along `depth` x `row`"
    with pytest.raises(ValueError, match=message):
        Mesh(side=2, depth=2).local_batch(np.zeros((6, 5)), 0)


def test_a_batch_with_a_number_in_it() -> None:
    with pytest.raises(
        ValueError, match=r"^The batch's `\['step'\]` is a scalar, so it has no rows"
    ):
        Mesh(data=2).local_batch({"tokens": np.zeros((6, 5)), "step": 3}, 0)


def test_sequences_longer_than_positions() -> None:
    with pytest.raises(ValueError, match="^Sequences of 6 tokens are longer than the 5 positions"):
        tensor.partition(transformer(Mesh()), jax.ShapeDtypeStruct((1, LENGTH + 1), jnp.int32))


@pytest.mark.integration
def test_labels_that_are_not_cut_like_the_batch() -> None:
    """With 2-D libraries, users lose the loss this way."""
    training = Training(Mesh(side=2))

    def args(rank: int) -> Any:
        mine = {**training.mesh.local_batch(batch(0), rank), "labels": batch(0)["labels"]}
        return training.params(rank), mine

    message = r"^The labels have shape \(12, 5\), but this rank's logits are those of \(6, 5\)"
    with pytest.raises(ValueError, match=message):
        on_ranks(training.loss_and_gradients, training.mesh, args)


def spread(parts: list[Any], specs: Any, mesh: Mesh) -> Any:
    """Returns `replica_spread` of all ranks' parts, checked to be identical across ranks."""
    on_all = on_ranks(lambda p: tensor.replica_spread(p, specs, mesh), mesh, lambda r: (parts[r],))
    for other in on_all:
        jax.tree.map(np.testing.assert_array_equal, on_all[0], other)
    return on_all[0]


@pytest.mark.integration
def test_weights_that_differ_between_depth_layers() -> None:
    mesh = Mesh(side=2, depth=2)
    specs = {"mlp": {"kernel": PartitionSpec("row", "col"), "bias": PartitionSpec("col")}}
    whole = {
        "mlp": {
            "kernel": np.arange(96, dtype=np.float32).reshape(8, 12),
            "bias": np.ones(12, np.float32),
        }
    }
    states = [tensor.shard(whole, specs, mesh, rank) for rank in range(8)]
    tensor.check_replicas(spread(states, specs, mesh))
    kernel = states[5]["mlp"]["kernel"]
    for change, apart in ((0.25, "0.25"), (np.nan, "inf")):
        states[5] = {
            "mlp": {**states[5]["mlp"], "kernel": kernel + np.float32(change) * (np.arange(6) == 2)}
        }
        message = (
            r"^The copies of `\['mlp'\]\['kernel'\]` on different ranks are not equal: "
            f"rank 5 differs by up to {apart} from the first rank"
        )
        with pytest.raises(ValueError, match=message):
            tensor.check_replicas(spread(states, specs, mesh))
        with pytest.raises(ValueError, match="not equal: ranks 1 and 5 differ"):
            tensor.unshard(states, specs, mesh)
    alike, replicated = [states[0]["mlp"]["bias"] + rank % 2 for rank in range(8)], PartitionSpec()
    with pytest.raises(ValueError, match="ranks 1, 3, 5, 7 differ by up to 1 from"):
        tensor.check_replicas(spread(alike, replicated, mesh))


ROWS = {
    "tokens": np.arange(60, dtype=np.int32).reshape(12, 5),
    "weights": np.ones((12, 5), np.float32),
}


def first_batches(mesh: Mesh, **change: Any) -> tuple[list[Any], Any]:
    """Returns every rank's rows of a first batch, with `change` applied, and their specs."""
    rows = [mesh.local_batch(ROWS, rank) for rank in range(mesh.ranks)]
    for rank, own in change.items():
        rows[int(rank[4:])] = own
    return rows, {name: PartitionSpec(mesh.batch or None) for name in ROWS}


@pytest.mark.mostly_integration("[1,1,1]", "[1,1,4]", "1-D on 1", "1-D on 2", "1-D on 4")
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_correctly_sharded_batch_is_accepted(mesh: Mesh) -> None:
    tensor.check_replicas(spread(*first_batches(mesh), mesh), batch=True)


@pytest.mark.mostly_integration(
    "mesh0-2-rank 2 differs by up to 1 from",
    "mesh1-3-rank 3 differs by up to 1 from",
    "mesh4-0-rank 1 differs by up to 1 from",
)
@pytest.mark.parametrize(
    ("mesh", "rank", "numbers"),
    [
        (Mesh(tensor=4), 2, "rank 2 differs by up to 1 from"),
        (Mesh(data=2, tensor=2), 3, "rank 3 differs by up to 1 from"),
        (Mesh(side=2), 1, "rank 1 differs by up to 1 from"),
        (Mesh(side=2, depth=2), 7, "rank 7 differs by up to 1 from"),
        (Mesh(side=2), 0, "rank 1 differs by up to 1 from"),
    ],
)
def test_other_rows_along_tensor_or_col(mesh: Mesh, rank: int, numbers: str) -> None:
    """All ranks get the same wrong loss, so nothing else would detect it."""
    own = mesh.local_batch(ROWS, rank)
    rows, specs = first_batches(mesh, **{f"rank{rank}": {**own, "tokens": own["tokens"] + 1}})
    message = (
        r"^The copies of the batch's `\['tokens'\]` on different ranks are not equal"
        f".*: {numbers} .*local_batch"
    )
    with pytest.raises(ValueError, match=message):
        tensor.check_replicas(spread(rows, specs, mesh), batch=True)


def test_large_integers_are_compared_exactly() -> None:
    """Large integers that would round to the same float are treated as different."""
    mesh, large = Mesh(tensor=2), 2**30
    rows = [{"tokens": np.full((1, 1), large + rank, np.int32)} for rank in range(2)]
    with pytest.raises(ValueError, match="rank 1 differs by up to"):
        tensor.check_replicas(spread(rows, {"tokens": PartitionSpec()}, mesh), batch=True)


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(tensor=2), Mesh(side=2)], ids=["serial", "1-D", "2-D"]
)
@pytest.mark.parametrize("cut", ["rows", "table", None])
def test_a_dense_layer_that_is_cut_some_other_way(mesh: Mesh, cut: Any) -> None:
    with pytest.raises(ValueError, match="^`cut` of a dense layer must be 'column', .*, got "):
        tensor.partition(tensor.Dense(8, mesh, cut), jnp.ones((2, 8)))


def test_a_role_that_there_is_none_of() -> None:
    wrong: Any = "rows"
    with pytest.raises(
        ValueError, match="^The role of a parameter must be one of 'column', 'row', .*, got 'rows'"
    ):
        Mesh(side=2).spec(wrong)


def weights_alone(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


# Optimizers that skip part of a tree.
MASKED = {
    "decay of weights": optax.adamw(1e-2, mask=weights_alone),
    "weights alone": optax.masked(optax.adam(1e-2), weights_alone),
    "one for each": optax.multi_transform(
        {True: optax.adam(1e-2), False: optax.sgd(0.1, momentum=0.9)}, weights_alone
    ),
}


@pytest.mark.parametrize("tx", MASKED.values(), ids=MASKED)
def test_specs_of_masked_optimizers(tx: optax.GradientTransformation) -> None:
    mesh, specs = (
        Mesh(side=2),
        {"kernel": PartitionSpec("row", "col"), "bias": PartitionSpec("col")},
    )
    whole = {"kernel": np.arange(8, dtype=np.float32).reshape(2, 4), "bias": np.ones(4, np.float32)}
    states = [tx.init(tensor.shard(whole, specs, mesh, rank)) for rank in range(4)]
    state, layout = tx.init(whole), tensor.state_specs(tx, whole, specs)
    assert jax.tree.structure(layout) == jax.tree.structure(state)
    for rank, held in enumerate(states):
        got = tensor.shard(state, layout, mesh, rank)
        assert jax.tree.structure(got) == jax.tree.structure(held)
        jax.tree.map(np.testing.assert_array_equal, got, held)
    assert jax.tree.structure(tensor.unshard(states, layout, mesh)) == jax.tree.structure(state)


def test_other_bad_arguments() -> None:
    with pytest.raises(
        ValueError, match="^`max_norm` of `clip_by_global_norm` must be above 0, got 0"
    ):
        tensor.clip_by_global_norm(0, {}, Mesh())
    with pytest.raises(TypeError, match="^`Dense` must have a field `mesh`"):
        tensor.init(nn.Dense(3), jax.random.key(0), jnp.ones((1, 2)))
