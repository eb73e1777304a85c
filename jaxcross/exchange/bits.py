"""Signs as bits, eight to a byte."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pack(positive: jax.Array) -> jax.Array:
    """Booleans to bytes along the last axis, whose length is a multiple of 8: bit b of byte i is element 8 i + b."""
    grouped = positive.reshape(*positive.shape[:-1], -1, 8).astype(jnp.uint8)
    return jnp.sum(grouped << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


def unpack(packed: jax.Array) -> jax.Array:
    """Bytes to booleans along the last axis: the inverse of `pack`."""
    bits = (packed[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return bits.astype(bool).reshape(*packed.shape[:-1], -1)


def signs(positive: jax.Array) -> jax.Array:
    """+1 where true, -1 where false, in float32."""
    return jnp.where(positive, jnp.float32(1), jnp.float32(-1))
