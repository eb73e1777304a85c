"""A decoder-only Transformer over a mesh: attention, MLP, block, and the whole model. The mesh
changes, not the model.

Pre-normalised as GPT-2. No dropout. Exchanges are those of its dense layers, normalisations and
embedding.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcross.tensor.layers import Dense, Embedding, LayerNorm
from jaxcross.tensor.mesh import Mesh


class Attention(nn.Module):
    """Self-attention, `[batch, length, hidden]` to the same: each rank computes its own heads over
    whole sequences.

    Scores, softmax and context send nothing. Columns of the query-key-value layer are head-major,
    `[heads, 3, width]`, so that a rank's columns are whole heads on every mesh. Source: Vaswani et
    al., arXiv 1706.03762.

    Attributes:
        heads: Of all ranks together.
        mesh: The ranks.
        causal: Whether a token sees none after it.
        dtype: Of products; the softmax is computed in float32 at least.
        param_dtype: Of the parameters.

    Raises:
        ValueError: Heads do not divide the features, or the ranks do not divide the heads.
    """

    heads: int
    mesh: Mesh = Mesh()
    causal: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mesh = self.mesh
        features = x.shape[-1] * mesh.size(mesh.hidden)
        if features % self.heads:
            raise ValueError(
                f"{features} features cannot be shared by {self.heads} heads: choose a divisor."
            )
        (heads,) = mesh.block(
            (self.heads,), mesh.spec("inner"), "The heads of an attention layer, an array"
        )
        batch, length, _ = x.shape
        width = features // self.heads
        kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        qkv = Dense(3 * features, mesh, "column", name="qkv", **kinds)(x)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, heads, 3, width), 3, 0)
        wide = jnp.promote_types(self.dtype, jnp.float32)
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=wide) * width**-0.5
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, -1).astype(self.dtype)
        context = jnp.einsum("bnqk,bknd->bqnd", weights, v).reshape(batch, length, heads * width)
        return Dense(features, mesh, "row", name="out", **kinds)(context)


class MLP(nn.Module):
    """Two dense layers with a GELU between them, `[..., hidden]` to the same.

    Attributes:
        width: Units between the layers, of all ranks together.
        mesh: The ranks.
        dtype: Of the computation.
        param_dtype: Of the parameters.
    """

    width: int
    mesh: Mesh = Mesh()
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features = x.shape[-1] * self.mesh.size(self.mesh.hidden)
        kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        y = nn.gelu(Dense(self.width, self.mesh, "column", name="up", **kinds)(x))
        return Dense(features, self.mesh, "row", name="down", **kinds)(y)


class Block(nn.Module):
    """Attention and an MLP of four times the features, each after a layer normalisation and with a
    residual.

    For b sequences of s tokens and h features a rank receives, in elements of float32,
    normalisations and biases apart: 1-D on p ranks 4(p-1)/p bsh forward and as much backward; on
    [q, q, d] (q-1)/q (7bsh/(dq) + 12h^2/q) forward, twice that backward, and 2(d-1)/d 12h^2/q^2 for
    the weights' gradients. In 16 bits half the bytes, but for sums of less than 64 KiB on all ranks
    together.

    Attributes:
        heads: Attention heads of all ranks together.
        mesh: The ranks.
        dtype: Of the computation.
        param_dtype: Of the parameters.
    """

    heads: int
    mesh: Mesh = Mesh()
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mesh = self.mesh
        kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        features = x.shape[-1] * mesh.size(mesh.hidden)
        y = LayerNorm(mesh, name="before_attention", **kinds)(x)
        x = x + Attention(self.heads, mesh, name="attention", **kinds)(y)
        y = LayerNorm(mesh, name="before_mlp", **kinds)(x)
        return x + MLP(4 * features, mesh, name="mlp", **kinds)(y)


class Transformer(nn.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocabulary]`, cut over `mesh.inner`; see
    `cross_entropy`.

    Attributes:
        vocabulary: Tokens there are. Pad it to a multiple of the ranks that share it.
        features: Global width.
        layers: Blocks.
        heads: Attention heads of all ranks together.
        positions: Longest sequence.
        mesh: The ranks; `Mesh()` is the serial model.
        tied: Whether the head shares the token table.
        remat: Whether a block's activations are computed again in the backward pass, exchanges
            included.
        dtype: Of the computation.
        param_dtype: Of the parameters.
    """

    vocabulary: int
    features: int
    layers: int
    heads: int
    positions: int
    mesh: Mesh = Mesh()
    tied: bool = True
    remat: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        mesh = self.mesh
        kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        embedding = Embedding(
            self.vocabulary, self.features, self.positions, mesh, name="embedding", **kinds
        )
        x = embedding(tokens)
        block = nn.remat(Block) if self.remat else Block
        for n in range(self.layers):
            x = block(self.heads, mesh, name=f"block_{n}", **kinds)(x)
        x = LayerNorm(mesh, name="last", **kinds)(x)
        if self.tied:
            return embedding.attend(x)
        return Dense(self.vocabulary, mesh, "column", use_bias=False, name="head", **kinds)(x)
