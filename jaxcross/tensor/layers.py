"""Flax layers over a mesh: dense, layer and RMS normalisation, token and position embedding.

Each layer has a single implementation that works on every mesh. On `Mesh()`, i.e. a single rank,
it's the ordinary layer. On larger meshes, each rank holds some blocks of the parameters, and the
ranks exchange data in both passes, using named-axis collectives. The parameters' values don't
depend on the mesh, because all ranks draw them from the same key.

Features are split across the axis `mesh.hidden` between the blocks of a model, and across
`mesh.inner` inside a block. If several ranks hold copies of the same part of a parameter, the
backward pass sums its gradient over these ranks, which keeps the copies equal.
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

    Several ranks may hold the same part of the parameter while working on different parts of the
    batch. In that case, the backward pass sums the gradient over these ranks with a single
    all-reduce, so they all get the same gradient and their copies stay equal. The forward pass
    doesn't send anything.

    To initialise the parameter, every rank draws the whole array from the same key and keeps only
    its own part. That way, you get the serial model's initial values regardless of the mesh. The
    downside is that the whole array temporarily has to fit in memory.

    Args:
        module: A module with the fields `mesh` and `param_dtype`.
        name: The parameter's name.
        init: Function that takes a key, a shape and a type, and returns the initial array.
        shape: The parameter's global shape.
        role: Determines how the parameter is cut.

    Raises:
        ValueError: A dimension can't be divided equally, or the step's axes don't match the mesh.
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
    """Computes `y = x W + b`: column- or row-parallel on a line of ranks, with SUMMA on a grid.

    Start a block with a `"column"` layer, and end it with a `"row"` layer. The column layer
    switches from the way features are cut between blocks to the way they're cut inside a block,
    i.e. from `[..., hidden]` to `[..., inner]`. The row layer does the reverse.

    On a line of ranks (1-D; Megatron-LM, section 3), a column layer all-reduces its input's
    gradient in the backward pass, and a row layer all-reduces its output in the forward pass. On a
    grid (2-D and 2.5-D), both kinds multiply with `summa.ab`, and the weights' gradients are summed
    over the axis `depth`.

    Attributes:
        features: Global length of the output's last dimension.
        mesh: The ranks.
        cut: `"column"` or `"row"`.
        use_bias: Whether to add the bias b.
        dtype: Type in which the layer computes and exchanges data.
        param_dtype: Type of the parameters, in which their gradients are summed as well.
        kernel_init, bias_init: Functions that take a key, a global shape and a type, and return
            the initial array.

    Raises:
        ValueError: The shape can't be divided equally, or `cut` is something else.
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
                "`cut` of a dense layer must be 'column', for a block's first layer, or 'row', for "
                f"its last, got {self.cut!r}."
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

    In 2-D, a token's features are split across ranks, so summing over them requires communication.
    The forward pass performs two all-reduces of one number per token, for the mean and for the
    variance, and the backward pass performs a single all-reduce of two numbers per token. In 1-D,
    every rank holds all features, so nothing is sent. The variance is computed after subtracting
    the mean, at least in float32.

    Attributes:
        mesh: The ranks.
        epsilon: Constant added to the variance.
        dtype: Type of the result.
        param_dtype: Type of the parameters `scale` and `bias`.
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

    On a grid (2-D), a token's features are split across several ranks, so the forward and backward
    passes each need an all-reduce of one number per token. In 1-D, every rank has all features of
    its tokens, so nothing is sent.

    Attributes:
        mesh: The ranks.
        epsilon: Constant added to the mean of squares.
        dtype: Type of the result.
        param_dtype: Type of the parameter `scale`.
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

    Each token's vector is added to the vector of its position. In 1-D, each rank holds the vectors
    for part of the vocabulary and looks up the tokens that fall into its part; an all-reduce in the
    forward pass then combines the results (Megatron-LM, section 3). In 2-D, the token table is cut
    into blocks. Each rank gathers its column of blocks in the forward pass, and reduce-scatters the
    column's gradient in the backward pass.

    Attributes:
        vocabulary: Number of rows in the token table. Tokens outside of 0 to `vocabulary - 1` get a
            vector of NaN.
        features: Global number of features.
        positions: Number of rows in the position table, or 0 for no position table.
        mesh: The ranks.
        dtype: Type of the result.
        param_dtype: Type of the tables.
        table_init: Function that takes a key, a global shape and a type, and returns the initial
            table.

    Raises:
        ValueError: A table can't be divided equally, or `length` exceeds `positions`.
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
                "the embedding. Shorten them, or increase `positions`."
            )
        return x + self.places[:length].astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Turns `[..., hidden]` into logits `[..., vocabulary]`, split across `mesh.inner`.

        Use this as the last layer of a model that shares a token table between input and output. In
        2-D, it computes the product `summa.abt`. In 1-D, the backward pass all-reduces the gradient
        of the input.
        """
        mesh = self.mesh
        table = self.table.astype(self.dtype)
        x = x.astype(self.dtype)
        return summa.abt(x if mesh.col else copy_to(x, mesh.inner), table, mesh.row, mesh.col)


def owned(labels: jax.Array, rows: int, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Returns each label's row among this rank's `rows`, and whether this rank has that row.

    Sends nothing.
    """
    first = jax.lax.axis_index(mesh.inner[0]) * rows if mesh.inner else 0
    row = labels - first
    mine = (row >= 0) & (row < rows)
    return jnp.where(mine, row, 0), mine


def in_vocabulary(labels: jax.Array, vocabulary: int) -> jax.Array:
    """Whether each label is in the vocabulary.

    Sends nothing. The result is the same on every rank that has these labels.
    """
    return (labels >= 0) & (labels < vocabulary)


def _rows(table: jax.Array, mesh: Mesh) -> jax.Array:
    # There's no need to define a derivative for this all-gather. JAX transposes it to a
    # reduce-scatter, which is right on every backend, and only the tokens have to be kept in memory
    # for the backward pass.
    return jax.lax.all_gather(table, *mesh.row, axis=0, tiled=True)


def _width(mesh: Mesh, x: jax.Array) -> int:
    return x.shape[-1] * mesh.size(mesh.hidden)


def _normalised(module: Any, x: jax.Array, *, centred: bool) -> jax.Array:
    mesh: Mesh = module.mesh
    scale = parameter(module, "scale", nn.initializers.ones_init(), (_width(mesh, x),), "hidden")
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normal: Any = normalise(wide, _width(mesh, x), mesh.hidden, module.epsilon, centred)
    return normal * scale
