"""Flax layers over a mesh: dense, layer and RMS normalisation, token and position embedding.

Each layer is written once. On `Mesh()` it's the ordinary layer. On a larger mesh, each rank's
parameters are its own blocks of the same global parameters, drawn from the same key, and the layer
exchanges data with named-axis collectives in both passes. The features that a layer takes and
returns are cut over `mesh.hidden` between blocks, and over `mesh.inner` inside a block. If several
ranks hold the same parameter, its gradient is summed over them in the backward pass, so it's equal
on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcross.tensor import summa
from jaxcross.tensor.copy_reduce import copy_to, reduce_from
from jaxcross.tensor.mesh import Mesh, Role
from jaxcross.tensor.normalise import normalise

Initializer = Callable[..., Any]


def parameter(
    module: Any, name: str, init: Initializer, shape: Sequence[int], role: Role
) -> jax.Array:
    """Returns this rank's part of a parameter of `module`.

    The gradient is summed over the ranks that hold the same part and have different data. This
    takes one all-reduce in the backward pass and none in the forward pass, and the sum is the same
    on all these ranks. The global array is drawn from the key that the serial model would use, and
    then cut, so at its peak memory holds the whole array once.

    Args:
        module: A module with the fields `mesh` and `param_dtype`.
        name: The parameter's name.
        init: `(key, shape, dtype) -> array`.
        shape: The global shape.
        role: Determines how the parameter is cut.

    Raises:
        ValueError: A dimension can't be cut into equal parts, or the step's axes aren't the mesh's.
    """
    mesh: Mesh = module.mesh
    spec: Any = mesh.spec(role)
    mesh.block(shape, spec, f"`{'/'.join((*module.path, name))}`")
    mesh.check_bound()

    def draw(key: jax.Array) -> jax.Array:
        return mesh.here(init(key, tuple(shape), module.param_dtype), spec)

    value = module.param(name, nn.with_partitioning(draw, spec))
    return copy_to(value, mesh.summed(spec))


class Dense(nn.Module):
    """`y = x W + b`: column- or row-parallel on a line of ranks, SUMMA on a grid.

    A block's first layer is a `"column"` layer (`[..., hidden]` in, `[..., inner]` out), its last a
    `"row"` layer (the reverse). In 1-D (Megatron-LM, section 3) a column layer all-reduces its
    input's gradient in the backward pass, and a row layer its output in the forward pass. In 2-D
    and 2.5-D both are `summa.ab`, and the weights' gradients are summed over `depth`.

    Attributes:
        features: Global length of the output's last dimension.
        mesh: The ranks.
        cut: `"column"` or `"row"`.
        use_bias: Whether b is added.
        dtype: Type of the computation and of the data exchanged.
        param_dtype: Type of the parameters, and of the sums of their gradients.
        kernel_init, bias_init: `(key, shape, dtype) -> array`, called with global shapes.

    Raises:
        ValueError: The shape can't be cut into equal parts, or `cut` has another value.
    """

    features: int
    mesh: Mesh = Mesh()
    cut: Literal["column", "row"] = "column"
    use_bias: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.cut not in ("column", "row"):
            raise ValueError(
                f"`cut` of a dense layer is `{self.cut!r}`: choose `'column'` for a block's first "
                "layer, `'row'` for its last."
            )
        mesh = self.mesh
        column = self.cut == "column"
        y: Any
        width = x.shape[-1] * mesh.size(mesh.hidden if column else mesh.inner)
        kernel = parameter(
            self, "kernel", self.kernel_init, (width, self.features), self.cut
        ).astype(self.dtype)
        x = x.astype(self.dtype)
        if mesh.col:
            y = summa.ab(x, kernel, mesh.row, mesh.col)
        elif column:
            y = summa.ab(copy_to(x, mesh.inner), kernel, (), ())
        else:
            y = reduce_from(summa.ab(x, kernel, (), ()), mesh.inner)
        if self.use_bias:
            bias = parameter(
                self, "bias", self.bias_init, (self.features,), "inner" if column else "hidden"
            )
            y = y + bias.astype(self.dtype)
        return y


class LayerNorm(nn.Module):
    """Layer normalisation of `[..., hidden]`.

    In 2-D, the forward pass makes two all-reduces of one number per token, and the backward pass
    one all-reduce of two. In 1-D nothing is sent. The variance is computed in a second pass, and at
    least in float32.

    Attributes:
        mesh: The ranks.
        epsilon: Added to the variance.
        dtype: Type of the result.
        param_dtype: Type of `scale` and `bias`.
    """

    mesh: Mesh = Mesh()
    epsilon: float = 1e-5
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = _normalised(self, x, centred=True)
        bias = parameter(
            self, "bias", nn.initializers.zeros_init(), (_width(self.mesh, x),), "hidden"
        )
        return (y + bias).astype(self.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation of `[..., hidden]`.

    In 2-D, each pass makes one all-reduce of one number per token. In 1-D nothing is sent.

    Attributes:
        mesh: The ranks.
        epsilon: Added to the mean of squares.
        dtype: Type of the result.
        param_dtype: Type of `scale`.
    """

    mesh: Mesh = Mesh()
    epsilon: float = 1e-6
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return _normalised(self, x, centred=False).astype(self.dtype)


class Embedding(nn.Module):
    """Turns tokens `[batch, length]` into vectors `[batch, length, hidden]`, and back.

    A vector is the sum of the token's and the position's vectors. In 1-D the token table is cut
    over the vocabulary, and the result is all-reduced in the forward pass (Megatron-LM, section 3).
    In 2-D the table is cut into blocks: a rank gathers its column in the forward pass, and
    reduce-scatters the gradient in the backward pass.

    Attributes:
        vocabulary: Number of rows of the token table. A token outside 0 to `vocabulary - 1` gets a
            vector of NaN.
        features: Global width.
        positions: Number of rows of the position table, or 0 for none.
        mesh: The ranks.
        dtype: Type of the result.
        param_dtype: Type of the tables.
        table_init: `(key, shape, dtype) -> array`, called with global shapes.

    Raises:
        ValueError: A table can't be cut into equal parts, or `length` exceeds `positions`.
    """

    vocabulary: int
    features: int
    positions: int = 0
    mesh: Mesh = Mesh()
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    table_init: Initializer = nn.initializers.normal(0.02)

    def setup(self) -> None:
        self.table = parameter(
            self, "tokens", self.table_init, (self.vocabulary, self.features), "table"
        )
        if self.positions:
            self.places = parameter(
                self, "places", self.table_init, (self.positions, self.features), "positions"
            )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mesh = self.mesh
        table = self.table.astype(self.dtype)
        if mesh.col:
            x = jnp.take(_rows(table, mesh), tokens, axis=0)
        else:
            place, mine = owned(tokens, table.shape[0], mesh)
            x = reduce_from(
                jnp.where(mine[..., None], jnp.take(table, place, axis=0), 0), mesh.inner
            )
        x = jnp.where(in_vocabulary(tokens, self.vocabulary)[..., None], x, jnp.nan)
        if not self.positions:
            return x
        length = tokens.shape[1]
        if length > self.positions:
            raise ValueError(
                f"Sequences of {length} tokens are longer than the {self.positions} positions of "
                "the embedding. Cut them, or make `positions` larger."
            )
        return x + self.places[:length].astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns logits `[..., vocabulary]`, cut over `mesh.inner`, for `[..., hidden]`.

        This is a head that shares the token table. In 2-D it's `summa.abt`; in 1-D the input's
        gradient is all-reduced.
        """
        mesh = self.mesh
        table = self.table.astype(self.dtype)
        x = x.astype(self.dtype)
        return summa.abt(x if mesh.col else copy_to(x, mesh.inner), table, mesh.row, mesh.col)


def owned(labels: jax.Array, rows: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Returns each label's row among this rank's `rows`, and whether it's there. Sends nothing."""
    first = jax.lax.axis_index(mesh.inner[0]) * rows if mesh.inner else 0
    row = labels - first
    mine = (row >= 0) & (row < rows)
    return jnp.where(mine, row, 0), mine


def in_vocabulary(labels: jax.Array, vocabulary: int) -> jax.Array:
    """Returns whether each label is in the vocabulary. Sends nothing.

    The result is the same on every rank that holds the labels.
    """
    return (labels >= 0) & (labels < vocabulary)


def _rows(table: jax.Array, mesh: Mesh) -> jax.Array:
    # JAX's own transpose, a reduce-scatter, is right on every backend, and needs to keep only the
    # tokens for the backward pass.
    return jax.lax.all_gather(table, *mesh.row, axis=0, tiled=True)


def _width(mesh: Mesh, x: jax.Array) -> int:
    return x.shape[-1] * mesh.size(mesh.hidden)


def _normalised(module: Any, x: jax.Array, *, centred: bool) -> jax.Array:
    mesh: Mesh = module.mesh
    scale = parameter(module, "scale", nn.initializers.ones_init(), (_width(mesh, x),), "hidden")
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normal: Any = normalise(wide, _width(mesh, x), mesh.hidden, module.epsilon, centred)
    return normal * scale
