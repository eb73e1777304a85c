"""A decoder-only Transformer over a mesh: attention, MLP, block, and the whole model.

The model computes the same function on every mesh. As in GPT-2, a normalisation comes before each
attention layer and each MLP; unlike GPT-2, there's no dropout. Only the dense layers, the
normalisations and the embedding exchange data between ranks.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcross.tensor.layers import Dense, Embedding, LayerNorm
from jaxcross.tensor.mesh import Mesh


class Attention(nn.Module):
    """Self-attention, `[batch, length, hidden]` to the same. Each rank computes its own heads.

    A rank computes its heads for whole sequences, so scores, softmax and context need no exchange.
    For this, a rank's columns of the matrix for query, key and value must belong to whole heads.
    So we order the columns by head first, as `[heads, 3, width]`. With any other order, cutting the
    matrix would give a different model. Source: Vaswani et al., arXiv 1706.03762.

    Attributes:
        heads: Number of heads on all ranks together.
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
    """Two dense layers with a GELU in between, `[..., hidden]` to the same.

    Attributes:
        width: Number of units between the layers, on all ranks together.
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

    Each of the two has a normalisation before it and a residual connection around it.

    The following formulas say how much a rank receives, where b is the number of sequences, s the
    number of tokens per sequence, and h the number of features. They count float32 elements, and
    don't include normalisations and biases.

    - In 1-D on p ranks, a rank receives 4(p-1)/p bsh elements in the forward pass, and as many in
      the backward pass.
    - On a mesh [q, q, d], a rank receives (q-1)/q (7bsh/(dq) + 12h^2/q) elements in the forward
      pass, and twice as many in the backward pass. Summing the weights' gradients over the d layers
      adds 2(d-1)/d 12h^2/q^2.

    If the block computes in a 16-bit type, a rank receives half as many bytes. The exception is
    sums that are smaller than 64 KiB on all ranks together, because these are sent in a different
    way.

    Attributes:
        heads: Number of attention heads on all ranks together.
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

    The logits are cut over `mesh.inner`, so each rank has only some of a token's logits.
    `cross_entropy` computes the loss from logits that are cut in this way.

    Attributes:
        vocabulary: Number of tokens. Pad it to a multiple of the number of ranks over which it's
            cut.
        features: Global number of features.
        layers: Number of blocks.
        heads: Number of attention heads on all ranks together.
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
