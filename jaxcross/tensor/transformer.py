"""A decoder-only Transformer over a mesh: attention, MLP, block, and the whole model.

The model computes the same function on every mesh. As in GPT-2, there's a normalisation in front of
each attention layer and each MLP, but unlike GPT-2, there's no dropout. Only the dense layers, the
normalisations and the embedding exchange any data between ranks.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcross.tensor.layers import Dense, Embedding, LayerNorm
from jaxcross.tensor.mesh import Mesh


class Attention(nn.Module):
    """Self-attention on `[batch, length, hidden]`, with each rank computing its own heads.

    A rank computes its heads for whole sequences, so scores, softmax and context don't involve any
    exchanges. For this to work, a rank's columns of the query-key-value matrix have to make up
    whole heads. So we order the columns by head first, as `[heads, 3, width]`; with any other
    order, cutting the matrix would give a different model. Source: Vaswani et al., arXiv
    1706.03762.

    Attributes:
        heads: Number of heads across all ranks.
        mesh: The ranks.
        causal: Whether tokens are prevented from attending to later tokens.
        dtype: Type of the products. The softmax is computed at least in float32.
        param_dtype: Type of the parameters.

    Raises:
        ValueError: The number of heads doesn't divide the features, or the ranks don't divide the
            heads.
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
                f"`heads` must divide the number of features, {features}, got {self.heads}."
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
    """Two dense layers on `[..., hidden]`, with a GELU in between.

    Attributes:
        width: Number of units between the layers, across all ranks.
        mesh: The ranks.
        dtype: Type of the computation.
        param_dtype: Type of the parameters.
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
    """Attention and an MLP with four times as many units as features.

    Each of them has a normalisation in front of it and a residual connection around it.

    Here's how much a rank receives for b sequences of s tokens with h features, in float32 elements
    and not counting normalisations and biases:

    - In 1-D on p ranks, it's 4(p-1)/p bsh elements in the forward pass, and the same again in the
      backward pass.
    - On a [q, q, d] mesh, it's (q-1)/q (7bsh/(dq) + 12h^2/q) elements in the forward pass, and
      twice as many in the backward pass. Summing the weights' gradients over the d layers adds
      another 2(d-1)/d 12h^2/q^2.

    If the block computes in a 16-bit type, a rank receives half as many bytes, except for sums that
    are smaller than 64 KiB on all ranks together, which are sent in a different way.

    Attributes:
        heads: Number of attention heads across all ranks.
        mesh: The ranks.
        dtype: Type of the computation.
        param_dtype: Type of the parameters.
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
    """Turns tokens `[batch, length]` into logits `[batch, length, vocabulary]`.

    The logits are split across `mesh.inner`, so each rank only has some of a token's logits. This
    is the form that `cross_entropy` expects.

    Attributes:
        vocabulary: Number of tokens. Pad it to a multiple of the number of ranks that it's cut
            over.
        features: Global number of features.
        layers: Number of blocks.
        heads: Number of attention heads across all ranks.
        positions: Length of the longest sequence.
        mesh: The ranks; `Mesh()` is the serial model.
        tied: Whether the head shares the token table.
        remat: Whether the backward pass recomputes a block's activations, including its exchanges.
        dtype: Type of the computation.
        param_dtype: Type of the parameters.
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
