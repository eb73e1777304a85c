"""The parts of the ImageNet example, without communication: models, train step, recipe, CLI."""

import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("compiled_quickly")

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield import_module("imagenet_resnet")
    finally:
        sys.path.remove(str(EXAMPLES))


# Parameter counts with 1000 classes, as published for ResNet v1.5.
@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet18", 11.690),
        ("resnet34", 21.798),
        ("resnet50", 25.557),
        ("resnet101", 44.549),
        ("resnet152", 60.193),
        ("resnet200", 64.674),
    ],
)
def test_number_of_parameters(example: ModuleType, name: str, millions: float) -> None:
    model = example.MODELS[name](num_classes=1000)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(variables["params"]))
    assert round(count / 1e6, 3) == millions


@pytest.mark.integration
def test_resnet_stride_and_last_norm_initial_scale(example: ModuleType) -> None:
    """The stride is in the 3x3 convolution, and the last norm's scale is initialised to zero."""
    model = example.MODELS["resnet50"](num_classes=10)
    image = jnp.zeros((1, 64, 64, 3))
    _, state = jax.eval_shape(
        partial(model.init_with_output, train=False, capture_intermediates=True),
        jax.random.key(0),
        image,
    )
    block = state["intermediates"]["BottleneckBlock_3"]
    assert block["Conv_0"]["__call__"][0].shape[1:3] == (16, 16)
    assert block["Conv_1"]["__call__"][0].shape[1:3] == (8, 8)
    tiny = example.MODELS["resnet8"](num_classes=10)
    params = jax.jit(tiny.init)(jax.random.key(0), image)["params"]
    assert not params["BasicBlock_1"]["BatchNorm_1"]["scale"].any()
    assert params["BasicBlock_1"]["BatchNorm_0"]["scale"].all()


@cache  # compile once for equal states and steps
def make(
    example: ModuleType, precision: str = "float32", steps: int = 4, **options: Any
) -> tuple[Any, Any]:
    """Returns a small state, and one batch for each of two ranks."""
    model = example.MODELS["resnet8"](
        num_classes=4, dtype=precision, stage_sizes=(1,), num_filters=4, **options
    )
    args = example.imagenet_options.parse("", ["--data-dir", "x", "--precision", precision])
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 16, 16, 3))))
    state = example.create_state(args, model, example.recipe(steps, 1, 1e-4), init, lr=0.1, seed=0)
    rng = np.random.default_rng(0)
    image = rng.normal(size=(2, 4, 16, 16, 3)).astype(np.float32)
    return state, {"image": image, "label": rng.integers(4, size=(2, 4)).astype(np.int32)}


@cache
def compiled(step: Any) -> Any:
    return jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name="batch"))


def on_two_ranks(step: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    return compiled(step)(state, batch)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("precision", "options"),
    [("bfloat16", {}), ("float16", {}), ("float32", {"axis_name": "batch"})],
    ids=["bfloat16", "float16", "synchronised"],
)
def test_step_keeps_ranks_equal_and_params_float32(
    example: ModuleType, precision: str, options: dict
) -> None:
    state, batch = make(example, precision, **options)
    new, metrics = on_two_ranks(example.train_step, state, batch)
    for leaf in jax.tree.leaves((new, metrics)):
        assert np.array_equal(leaf[0], leaf[1])
    before, after = jax.tree.leaves(state.params), jax.tree.leaves(new.params)
    assert {leaf.dtype for leaf in after} == {jnp.dtype("float32")}
    assert any(not np.array_equal(a, b[0]) for a, b in zip(before, after, strict=True))
    assert np.isfinite(metrics["loss"]).all()


@pytest.mark.integration
def test_sync_norm_on_two_ranks_equals_joined_batch(example: ModuleType) -> None:
    state, batch = make(example, axis_name="batch")
    two, _ = on_two_ranks(example.train_step, state, batch)
    joined = {name: array.reshape(1, 8, *array.shape[2:]) for name, array in batch.items()}
    one, _ = on_two_ranks(example.train_step, state, joined)
    for a, b in zip(
        jax.tree.leaves((two.params, two.batch_stats)),
        jax.tree.leaves((one.params, one.batch_stats)),
        strict=True,
    ):
        np.testing.assert_allclose(a[0], b[0], rtol=1e-3, atol=1e-5)


@pytest.mark.integration
def test_float16_overflow_leaves_params_and_momentum(example: ModuleType) -> None:
    state, batch = make(example, "float16")
    new, _ = on_two_ranks(example.train_step, state, batch | {"image": batch["image"] * 1e6})
    for name in ("params", "opt_state"):
        for a, b in zip(
            jax.tree.leaves(getattr(state, name)), jax.tree.leaves(getattr(new, name)), strict=True
        ):
            assert np.array_equal(a, b[0])
    assert new.dynamic_scale.scale[0] < state.dynamic_scale.scale


@pytest.mark.integration
def test_learning_rates_share_one_program(example: ModuleType) -> None:
    state, batch = make(example, "bfloat16")
    trace = jax.make_jaxpr(example.train_step, axis_env=[("batch", 2)])
    rank = jax.tree.map(lambda array: array[0], batch)
    programs = []
    for rate in (0.1, 0.4):
        state.opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        programs.append(str(trace(state, rank)))
    assert programs[0] == programs[1]


@pytest.mark.integration
def test_weight_decay_leaves_norms_and_biases(example: ModuleType) -> None:
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    tx = example.recipe(10, 0, 0.5)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert updates["kernel"].all()
    assert not updates["bias"].any()


def test_schedule_warms_up_and_decays(example: ModuleType) -> None:
    params = {"bias": jnp.zeros(1)}
    tx = example.recipe(8, 2, 0.0)
    state, sizes = tx.init(params), []
    for _ in range(8):
        updates, state = tx.update({"bias": jnp.ones(1)}, state, params)
        trace = state.inner_state[1].trace["bias"]
        sizes.append(float(-updates["bias"][0] / (1 + 0.9 * trace[0]) / 0.1))
    np.testing.assert_allclose(sizes[:3], [1 / 3, 2 / 3, 1], rtol=1e-5)
    assert sizes[2:] == sorted(sizes[2:], reverse=True)
    assert 0 < sizes[-1] < 0.1


def parse(example: ModuleType, *arguments: str) -> Any:
    return example.imagenet_options.parse("", ["--data-dir", "x", *arguments])


def test_options(example: ModuleType) -> None:
    args = parse(example, "--job", "lr=0.4,seed=1", "--job", "lr=0.2")
    assert args.jobs == [
        ("lr=0.4,seed=1", {"lr": 0.4, "seed": 1}),
        ("lr=0.2", {"lr": 0.2, "seed": 0}),
    ]
    assert parse(example).jobs == [("lr=0.1,seed=0", {"lr": 0.1, "seed": 0})]
    assert str(parse(example, "--emulate-link", "500mbit").emulated) == "emulated link 500mbit"
    assert parse(example, "--emulate-link", "none").emulated is None
    assert parse(example).emulated is None
    assert parse(example, "--cut", "4").cut == 4


def test_checkpoints_are_for_one_run(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(example, "--checkpoints", "here").checkpoint_every == 1000
    with pytest.raises(SystemExit):
        parse(example, "--checkpoints", "here", "--policy", "compare")
    assert "would resume where the first one ended" in capsys.readouterr().err


def test_unknown_model_lists_the_models(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(example, "--model", "vgg")
    error = capsys.readouterr().err
    assert "argument --model: invalid choice: 'vgg'" in error
    assert all(name in error for name in example.MODELS)


@pytest.mark.parametrize("text", ["0.1", "rate=0.1", "lr=fast"])
def test_bad_job(example: ModuleType, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        parse(example, "--job", text)
    assert f"`{text}` is not of the form lr=0.1,seed=0" in capsys.readouterr().err


def test_bad_link(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(example, "--emulate-link", "fast")
    assert "argument --emulate-link: `fast` is not a link rate." in capsys.readouterr().err


@pytest.mark.integration
def test_a_pointwise_convolution_is_a_product(example: ModuleType) -> None:
    convolve = import_module("resnet").convolve
    x, kernel = (
        jax.random.normal(jax.random.key(0), (2, 7, 6, 5)),
        jax.random.normal(jax.random.key(1), (1, 1, 5, 3)),
    )
    for strides in ((1, 1), (2, 2)):
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        plain = jax.lax.conv_general_dilated(x, kernel, strides, "SAME", **options)
        np.testing.assert_allclose(
            convolve(x, kernel, strides, "SAME", **options), plain, rtol=1e-5, atol=1e-6
        )
