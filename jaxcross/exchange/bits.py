"""Signs as bits, eight to a byte, and packed integers of a few bits each."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pack(positive: jax.Array) -> jax.Array:
    """Packs booleans into bytes along the last axis, whose length must be a multiple of 8.

    Bit b of byte i is element 8 i + b.
    """
    grouped = positive.reshape(*positive.shape[:-1], -1, 8).astype(jnp.uint8)
    return jnp.sum(grouped << jnp.arange(8, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


def unpack(packed: jax.Array) -> jax.Array:
    """Unpacks bytes to booleans along the last axis; the inverse of `pack`."""
    bits = (packed[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return bits.astype(bool).reshape(*packed.shape[:-1], -1)


def signs(positive: jax.Array) -> jax.Array:
    """Returns +1 where true, -1 where false, in float32."""
    return jnp.where(positive, jnp.float32(1), jnp.float32(-1))


def pack_integers(numbers: jax.Array, width: int) -> jax.Array:
    """Packs integers along the last axis into bytes, `width` bits each, the lowest bit first.

    The integers must be from 0 to `2**width - 1`. The bytes are padded with zero bits at the end.
    """
    found = (numbers.astype(jnp.uint32)[..., None] >> jnp.arange(width, dtype=jnp.uint32)) & 1
    flat = found.astype(bool).reshape(*numbers.shape[:-1], -1)
    return pack(jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 8)]))


def unpack_integers(packed: jax.Array, width: int, count: int) -> jax.Array:
    """Unpacks the first `count` integers of `width` bits each along the last axis, as int32."""
    found = unpack(packed)[..., : count * width].reshape(*packed.shape[:-1], count, width)
    return jnp.sum(
        found.astype(jnp.int32) << jnp.arange(width, dtype=jnp.int32), axis=-1, dtype=jnp.int32
    )


def packed_bytes(width: int, count: int) -> int:
    """Returns how many bytes `count` integers of `width` bits take."""
    return -(-width * count // 8)
