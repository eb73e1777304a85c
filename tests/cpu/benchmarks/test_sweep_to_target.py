"""The sweep that JAX and PyTorch train alike: the same batches, and the same first weights."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import workloads  # noqa: F401  (makes the examples importable)
from resnet import MODELS
from rivals import digits, jax_work

SWEEP = digits.sweep_of(True)


def model_and_shapes():
    model = MODELS[SWEEP.model](num_classes=digits.CLASSES, num_filters=SWEEP.filters)
    image = jnp.zeros((1, SWEEP.image_size, SWEEP.image_size, 3))
    return model, jax.eval_shape(lambda: model.init(jax.random.key(0), image))


@pytest.mark.integration  # importing scikit-learn takes seconds
def test_ranks_share_each_batch():
    alone = digits.batches(SWEEP, 0, 1)
    whole = next(alone)["image"]
    halves = [next(digits.batches(SWEEP, rank, 2)) for rank in range(2)]
    assert {half["image"].shape for half in halves} == {(SWEEP.batch_size, 17, 17, 3)}
    for rank, half in enumerate(halves):
        np.testing.assert_array_equal(half["image"][: SWEEP.batch_size // 2], whole[rank::2])


@pytest.mark.integration  # importing scikit-learn takes seconds
def test_held_out_images_are_in_no_batch():
    shares = [digits.held_out(SWEEP, rank, 2) for rank in range(2)]
    assert [len(share["label"]) for share in shares] == [digits.HELD_OUT // 2] * 2
    held_out = {image.tobytes() for share in shares for image in share["image"]}
    data = digits.batches(SWEEP, 0, 1)
    trained = {image.tobytes() for _ in range(94) for image in next(data)["image"]}
    assert len(trained) > 1400 and not trained & held_out


@pytest.mark.mostly_integration("resnet8")
@pytest.mark.parametrize("name", ["resnet8", "resnet50"])
def test_first_params_have_the_kernels_in_the_order_of_layers(name):
    model = MODELS[name](num_classes=digits.CLASSES, num_filters=8)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 33, 33, 3))))
    given = []

    def numbered(asked):
        given.extend(asked)
        return [np.full(shape, number, np.float32) for number, shape in enumerate(asked)]

    params = jax_work.he_params(shapes["params"], numbered)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, shapes["params"])
    assert params["conv_init"]["kernel"].max() == 0
    assert params["Dense_0"]["kernel"].max() == len(given) - 1
    # With ten blocks or more, the order of the names isn't that of the numbers.
    block = "BasicBlock" if name == "resnet8" else "BottleneckBlock"
    blocks = [key for key in params if key.startswith(block)]
    firsts = [params[f"{block}_{n}"]["Conv_0"]["kernel"].max() for n in range(len(blocks))]
    assert len(blocks) > 2 and firsts == sorted(firsts)


def test_blocks_begin_as_the_identity():
    _, shapes = model_and_shapes()
    params = jax_work.he_params(shapes["params"], digits.kernels)
    block = params["BasicBlock_1"]
    scales = {
        name: set(np.unique(block[name]["scale"])) for name in block if "scale" in block[name]
    }
    assert scales == {"BatchNorm_0": {1.0}, "BatchNorm_1": {0.0}, "norm_proj": {1.0}}


@pytest.mark.integration
@pytest.mark.usefixtures("compiled_quickly")
def test_jax_and_torch_begin_alike():
    pytest.importorskip("torch")
    from rivals import swept_ddp

    model, shapes = model_and_shapes()
    params = jax_work.he_params(shapes["params"], digits.kernels)
    batch = next(digits.batches(SWEEP, 0, 2))
    stats = jax.tree.map_with_path(
        lambda path, leaf: jnp.full(leaf.shape, path[-1].key == "var", leaf.dtype),
        shapes["batch_stats"],
    )
    images, labels = swept_ddp.tensors(batch)
    assert labels.tolist() == batch["label"].tolist()
    variables = {"params": params, "batch_stats": stats}
    for train in (True, False):
        ours, _ = model.apply(variables, batch["image"], train=train, mutable=["batch_stats"])
        theirs = swept_ddp.network(SWEEP).train(train)(images)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-4)
