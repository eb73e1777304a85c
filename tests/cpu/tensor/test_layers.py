"""Single layers on every mesh against NumPy and Flax: errors a whole model could hide."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross import tensor
from jaxcross.tensor import Mesh
from tests.support.tensor_case import (
    GRIDS,
    HEADS,
    LENGTH,
    LINES,
    MESHES,
    VOCABULARY,
    close,
    on_ranks,
    over,
    serial_params,
    transformer,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")

EVERY = over(MESHES)
ROWS, FEATURES = 12, 24


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def hidden(mesh: Mesh) -> Any:
    return (mesh.batch or None, None, "col" if mesh.col else None)


def inner(mesh: Mesh) -> Any:
    return (mesh.batch or None, None, mesh.inner or None)


def drawn(params: Any) -> Any:
    """Returns random parameters, as zeros and ones would hide a missing bias or scale."""
    return jax.tree.map(lambda p: p + 0.1 * normal(*p.shape, seed=5), params)


def held_against(
    layer: Any, serial: Any, mesh: Mesh, x: np.ndarray, *, takes: Any = hidden, gives: Any = hidden
) -> None:
    """Checks that `layer(mesh)` equals `serial`, a plain Flax layer with the same tree.

    Compares the result and the gradients of all inputs.
    """
    params = drawn(serial.init(jax.random.key(0), x)["params"])
    want, pull = jax.vjp(lambda p, x: serial.apply({"params": p}, x), params, x)
    g = normal(*want.shape, seed=9)
    want_params, want_x = pull(g)
    model = layer(mesh)
    specs = tensor.partition(model, jnp.asarray(x))

    def call(params: Any, x: Any, g: Any) -> Any:
        y, pull = jax.vjp(lambda p, x: model.apply({"params": p}, x), params, x)
        return y, *pull(g)

    results = on_ranks(
        call,
        mesh,
        lambda r: (
            tensor.shard(params, specs, mesh, r),
            mesh.part(x, takes(mesh), r),
            mesh.part(g, gives(mesh), r),
        ),
    )
    for rank, (y, got_params, got_x) in enumerate(results):
        expected = (
            mesh.part(np.asarray(want), gives(mesh), rank),
            tensor.shard(want_params, specs, mesh, rank),
            mesh.part(np.asarray(want_x), takes(mesh), rank),
        )
        for a, b in zip(
            jax.tree.leaves((y, got_params, got_x)), jax.tree.leaves(expected), strict=True
        ):
            scale = float(np.max(np.abs(b)))
            np.testing.assert_allclose(
                a, b, rtol=2e-5, atol=2e-5 * max(scale, 1.0), err_msg=f"rank {rank}"
            )


@pytest.mark.mostly_integration("column-1-D on 4", "row-[2,2,2]", "row-1-D on 4")
@over(GRIDS | LINES)
@pytest.mark.parametrize("cut", ["column", "row"])
def test_dense_alone_with_its_bias(mesh: Mesh, cut: Any) -> None:
    takes, gives = (hidden, inner) if cut == "column" else (inner, hidden)
    x = normal(ROWS, LENGTH, FEATURES)
    held_against(
        lambda m: tensor.Dense(36, m, cut), nn.Dense(36), mesh, x, takes=takes, gives=gives
    )


def test_vector_gradient_without_row_sum_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a column hold equal vectors, but each has the gradient of its own rows only."""
    monkeypatch.setattr(Mesh, "summed", lambda self, spec: ())
    mesh, x, g = (
        Mesh(side=2),
        normal(ROWS, LENGTH, FEATURES),
        normal(ROWS, LENGTH, FEATURES, seed=9),
    )
    params = drawn({"scale": np.ones(FEATURES, np.float32), "bias": np.zeros(FEATURES, np.float32)})

    def call(params: Any, x: Any, g: Any) -> Any:
        return jax.vjp(lambda p: tensor.LayerNorm(mesh).apply({"params": p}, x), params)[1](g)[0]

    plain = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)
    (want,) = jax.vjp(lambda p: plain.apply({"params": p}, x), params)[1](g)
    specs = {"scale": ("col",), "bias": ("col",)}
    cut, rows = (
        [{k: mesh.part(v, specs[k], r) for k, v in params.items()} for r in range(4)],
        hidden(mesh),
    )
    results = on_ranks(call, mesh, lambda r: (cut[r], mesh.part(x, rows, r), mesh.part(g, rows, r)))
    for name in specs:
        got, right = (
            [t[name] for t in results],
            [mesh.part(np.asarray(want[name]), ("col",), r) for r in range(4)],
        )
        assert not any(
            np.allclose(a, b, rtol=0.1, atol=0.1) for a, b in zip(got, right, strict=True)
        ), name
        for col in range(2):
            np.testing.assert_allclose(got[col] + got[2 + col], right[col], rtol=1e-4, atol=1e-4)


@pytest.mark.mostly_integration("1-D on 4", "data 2 x 1-D on 2")
@EVERY
def test_layer_norm(mesh: Mesh) -> None:
    x = normal(ROWS, LENGTH, FEATURES)
    held_against(tensor.LayerNorm, nn.LayerNorm(epsilon=1e-5, use_fast_variance=False), mesh, x)


@EVERY
def test_rms_norm(mesh: Mesh) -> None:
    x = normal(ROWS, LENGTH, FEATURES)
    held_against(tensor.RMSNorm, nn.RMSNorm(use_fast_variance=False), mesh, x)


@over(GRIDS)
def test_layer_norm_of_a_large_mean(mesh: Mesh) -> None:
    """With mean 1e4 and deviation 1, a difference of squares in float32 loses the variance."""
    x = normal(ROWS, LENGTH, FEATURES) + np.float32(1e4)
    layer = tensor.LayerNorm(mesh)
    specs = tensor.partition(layer, x)
    params = {"scale": np.ones(FEATURES, np.float32), "bias": np.zeros(FEATURES, np.float32)}
    results = on_ranks(
        lambda p, x: layer.apply({"params": p}, x),
        mesh,
        lambda r: (tensor.shard(params, specs, mesh, r), mesh.part(x, hidden(mesh), r)),
    )
    wide = x.astype(np.float64)
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    for rank, got in enumerate(results):
        np.testing.assert_allclose(got, mesh.part(want, hidden(mesh), rank), atol=2e-2)
    one_pass = (x**2).mean(-1) - x.mean(-1) ** 2
    assert not np.allclose(one_pass, wide.var(-1), rtol=0.5), (
        "this test could not tell the two formulas apart"
    )


class PlainAttention(nn.Module):
    """Head-major attention without a mesh, with our parameter tree."""

    heads: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        b, s, h = x.shape
        q, k, v = jnp.moveaxis(
            nn.Dense(3 * h, name="qkv")(x).reshape(b, s, self.heads, 3, -1), 3, 0
        )
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / np.sqrt(h // self.heads)
        scores = jnp.where(np.tril(np.ones((s, s), bool)), scores, -np.inf)
        y = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)
        return nn.Dense(h, name="out")(y.reshape(b, s, h))


@pytest.mark.integration
@EVERY
@pytest.mark.parametrize("each", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_attention(mesh: Mesh, each: int) -> None:
    heads = each * mesh.side * mesh.tensor
    x = normal(ROWS, LENGTH, FEATURES)
    held_against(lambda m: tensor.Attention(heads, m), PlainAttention(heads), mesh, x)


@pytest.mark.mostly_integration("1-D on 4")
@EVERY
def test_mlp(mesh: Mesh) -> None:
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(FEATURES, name="down")(nn.gelu(nn.Dense(48, name="up")(x)))

    held_against(lambda m: tensor.MLP(48, m), Plain(), mesh, normal(ROWS, LENGTH, FEATURES))


class PlainTransformer(nn.Module):
    """The whole model in Flax's own layers, without a mesh."""

    tied: bool
    layers: int

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(VOCABULARY, FEATURES, name="tokens")
        x = table(tokens) + nn.Embed(LENGTH, FEATURES, name="places")(jnp.arange(tokens.shape[1]))
        norm = functools.partial(nn.LayerNorm, epsilon=1e-5, use_fast_variance=False)
        for n in range(self.layers):
            x = x + PlainAttention(HEADS, name=f"attention_{n}")(
                norm(name=f"before_attention_{n}")(x)
            )
            y = nn.Dense(4 * FEATURES, name=f"up_{n}")(norm(name=f"before_mlp_{n}")(x))
            x = x + nn.Dense(FEATURES, name=f"down_{n}")(nn.gelu(y))
        x = norm(name="last")(x)
        return (
            table.attend(x) if self.tied else nn.Dense(VOCABULARY, use_bias=False, name="head")(x)
        )


def in_plain_names(params: Any) -> Any:
    """Renames the tree of `Transformer` to the names in `PlainTransformer`."""
    renamed = {name: {"embedding": table} for name, table in params["embedding"].items()}
    for name, part in params.items():
        if name.startswith("block_"):
            block = {**part, **part["mlp"]}
            del block["mlp"]
            renamed |= {
                f"{layer}{name.removeprefix('block')}": value for layer, value in block.items()
            }
        elif name != "embedding":
            renamed[name] = part
    return renamed


@pytest.mark.integration
@pytest.mark.parametrize(
    ("tied", "layers"),
    [(True, 1), pytest.param(False, 2, marks=pytest.mark.exhaustive)],
    ids=["tied", "untied"],
)
def test_the_serial_transformer_is_that_of_plain_flax(tied: bool, layers: int) -> None:
    ours, plain = transformer(Mesh(), tied=tied, layers=layers), PlainTransformer(tied, layers)
    tokens, labels = (
        np.random.default_rng(0).integers(0, VOCABULARY, (2, ROWS, LENGTH)).astype(np.int32)
    )
    params = drawn(jax.tree.map(np.asarray, serial_params(tied=tied, layers=layers)))
    assert jax.tree.map(jnp.shape, in_plain_names(params)) == jax.tree.map(
        jnp.shape, jax.eval_shape(plain.init, jax.random.key(0), tokens)["params"]
    )

    def our_loss(params: Any) -> Any:
        return tensor.cross_entropy(ours.apply({"params": params}, tokens), labels, Mesh())

    def plain_loss(params: Any) -> Any:
        logits = plain.apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.jit(jax.value_and_grad(our_loss))(params)
    want_loss, want = jax.jit(jax.value_and_grad(plain_loss))(in_plain_names(params))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    gradients = in_plain_names(gradients)
    assert jax.tree.structure(gradients) == jax.tree.structure(want)
    close(gradients, want, 2e-5)


@pytest.mark.mostly_integration("True-1-D on 4", "True-data 2 x 1-D on 2")
@EVERY
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(mesh: Mesh, weighted: bool) -> None:
    logits = 30 * normal(ROWS, LENGTH, FEATURES)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, FEATURES, (ROWS, LENGTH)).astype(np.int32)
    weights = (rng.random((ROWS, LENGTH)) < 0.7).astype(np.float32)

    def serial(x: Any) -> Any:
        losses = -jnp.take_along_axis(jax.nn.log_softmax(x), labels[..., None], -1)[..., 0]
        return jnp.sum(losses * weights) / weights.sum() if weighted else losses.mean()

    want, want_gradient = jax.value_and_grad(serial)(jnp.asarray(logits))
    cut, rows = (mesh.batch or None, None, mesh.inner or None), (mesh.batch or None,)

    def call(x: Any, labels: Any, weights: Any) -> Any:
        return jax.value_and_grad(tensor.cross_entropy)(
            x, labels, mesh, weights if weighted else None
        )

    results = on_ranks(
        call,
        mesh,
        lambda r: (
            mesh.part(logits, cut, r),
            mesh.part(labels, rows, r),
            mesh.part(weights, rows, r),
        ),
    )
    for rank, (loss, gradient) in enumerate(results):
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        np.testing.assert_allclose(
            gradient, mesh.part(np.asarray(want_gradient), cut, rank), rtol=1e-4, atol=1e-7
        )
    assert len({float(loss) for loss, _ in results}) == 1, "the same bits on every rank"


@pytest.mark.mostly_integration("1-D on 4-nan", "1-D on 4-inf")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@EVERY
def test_cross_entropy_ignores_tokens_of_weight_zero(mesh: Mesh, bad: float) -> None:
    """Whatever their logits and labels are, in loss and gradient; others aren't affected."""
    logits, labels = normal(ROWS, LENGTH, FEATURES), np.full((ROWS, LENGTH), 3, np.int32)
    weights = (np.arange(ROWS * LENGTH) % 3 != 1).astype(np.float32).reshape(ROWS, LENGTH)
    weights[0, 1], left_out = 0, weights == 0
    clean = np.where(left_out[..., None], 0, logits)
    logits[left_out, 2] = bad
    logits[0, 1], labels[0, 1] = bad, -1  # all logits non-finite, and an invalid label

    def serial(x: Any) -> Any:
        return jnp.sum(-jax.nn.log_softmax(x)[..., 3] * weights) / weights.sum()

    want, want_gradient = jax.value_and_grad(serial)(clean)
    cut, rows = (mesh.batch or None, None, mesh.inner or None), (mesh.batch or None,)
    results = on_ranks(
        lambda x, labels, weights: jax.value_and_grad(tensor.cross_entropy)(
            x, labels, mesh, weights
        ),
        mesh,
        lambda r: (
            mesh.part(logits, cut, r),
            mesh.part(labels, rows, r),
            mesh.part(weights, rows, r),
        ),
    )
    for rank, (loss, gradient) in enumerate(results):
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        np.testing.assert_allclose(
            gradient, mesh.part(np.asarray(want_gradient), cut, rank), rtol=1e-4, atol=1e-7
        )
        assert not gradient[mesh.part(left_out, rows, rank)].any()


@pytest.mark.integration
def test_cross_entropy_of_the_tokens_that_count() -> None:
    logits = jnp.array([[1, 2, 3, 4], [3, 1, jnp.nan, 4], [0, 0, 1, 1]], jnp.float32)
    call = jax.value_and_grad(tensor.cross_entropy, argnums=(0, 3))
    loss, (gradient, of_weights) = call(
        logits, jnp.array([0, 0, 1]), Mesh(), jnp.array([1.0, 0, 1])
    )
    assert float(loss) == pytest.approx(2.7233, abs=1e-4)
    assert not gradient[1].any() and np.isfinite(of_weights).all()
    # The second token has weight 0, so it doesn't affect the loss. The derivative with respect to
    # its weight still exists if its logits are finite, and mustn't be replaced by zero.
    loss, (_, of_weights) = call(
        logits.at[1, 2].set(0), jnp.array([0, 0, 1]), Mesh(), jnp.array([1.0, 0, 1])
    )
    left_out = -jax.nn.log_softmax(jnp.array([3.0, 1, 0, 4]))[0]
    assert float(of_weights[1]) == pytest.approx(float(left_out - loss) / 2, rel=1e-5)


@pytest.mark.mostly_integration("-1-data 2 x 1-D on 2", "24-1-D on 4", "24-data 2 x 1-D on 2")
@EVERY
@pytest.mark.parametrize("label", [-1, FEATURES])
def test_cross_entropy_of_a_label_out_of_range_is_nan(mesh: Mesh, label: int) -> None:
    """On every rank, and in the gradient too: such a token used to get the loss of a logit of 0."""
    logits, labels = normal(ROWS, LENGTH, FEATURES), np.zeros((ROWS, LENGTH), np.int32)
    labels[:, 2] = label
    cut, rows = (mesh.batch or None, None, mesh.inner or None), (mesh.batch or None,)
    results = on_ranks(
        lambda x, labels: jax.value_and_grad(tensor.cross_entropy)(x, labels, mesh),
        mesh,
        lambda r: (mesh.part(logits, cut, r), mesh.part(labels, rows, r)),
    )
    for loss, gradient in results:
        assert (
            np.isnan(loss) and np.isnan(gradient[:, 2]).all() and np.isfinite(gradient[:, :2]).all()
        )


@pytest.mark.mostly_integration("-1-1-D on 4", "24-[2,2,2]", "24-1-D on 4")
@EVERY
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_embedding_of_a_token_out_of_range_is_nan(mesh: Mesh, token: int) -> None:
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    tokens[:, 1] = token
    layer = tensor.Embedding(VOCABULARY, FEATURES, LENGTH, mesh=mesh)
    serial = tensor.Embedding(VOCABULARY, FEATURES, LENGTH)
    params = jax.tree.map(np.asarray, tensor.init(serial, jax.random.key(0), jnp.asarray(tokens)))
    specs = tensor.partition(layer, jnp.asarray(tokens))
    results = on_ranks(
        lambda params, tokens: layer.apply({"params": params}, tokens),
        mesh,
        lambda r: (
            tensor.shard(params, specs, mesh, r),
            mesh.part(tokens, (mesh.batch or None,), r),
        ),
    )
    for x in results:
        assert np.isnan(x[:, 1]).all() and np.isfinite(x[:, [0, *range(2, LENGTH)]]).all()
