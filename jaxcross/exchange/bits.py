"""Packs signs and small integers into bits, and quantises vectors to 4- or 8-bit integers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcross.exchange import collectives

BLOCK = 128
"""Number of elements in a quantised vector that share a float32 unit."""


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
    """Maps true to +1 and false to -1, in float32."""
    return jnp.where(positive, jnp.float32(1), jnp.float32(-1))


def pack_integers(numbers: jax.Array, width: int) -> jax.Array:
    """Packs `width`-bit integers into bytes along the last axis, lowest bit first.

    The integers must be in the range from 0 to `2**width - 1`. The last byte is padded with zero
    bits.
    """
    found = (numbers.astype(jnp.uint32)[..., None] >> jnp.arange(width, dtype=jnp.uint32)) & 1
    flat = found.astype(bool).reshape(*numbers.shape[:-1], -1)
    return pack(jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 8)]))


def unpack_integers(packed: jax.Array, width: int, count: int) -> jax.Array:
    """Unpacks the first `count` integers of `width` bits along the last axis, as int32."""
    found = unpack(packed)[..., : count * width].reshape(*packed.shape[:-1], count, width)
    return jnp.sum(
        found.astype(jnp.int32) << jnp.arange(width, dtype=jnp.int32), axis=-1, dtype=jnp.int32
    )


def packed_bytes(width: int, count: int) -> int:
    """Returns the size in bytes of `count` packed integers of `width` bits."""
    return -(-width * count // 8)


class Packed(NamedTuple):
    """A quantised vector.

    Attributes:
        codes: The integers: one per byte at 8 bits, two per byte at 4 bits.
        units: One float32 unit per block, or NaN if any element of the block isn't finite.
    """

    codes: jax.Array
    units: jax.Array


def quantise(x: jax.Array, bits: int) -> Packed:
    """Rounds each element of a float32 vector to an integer multiple of its block's unit.

    The vector is divided into blocks of `BLOCK` elements, so its length must be a multiple of that.
    Each block is scaled by a float32 unit of its own, chosen such that its largest magnitude is 127
    units at 8 bits, or 7 units at 4 bits. Rounding is off by at most half a unit, i.e. 1/254 or
    1/14 of the block's largest magnitude.
    """
    levels = 2 ** (bits - 1) - 1
    blocks = x.reshape(x.size // BLOCK, BLOCK)
    unit = jnp.max(jnp.abs(blocks), axis=1, initial=0.0) / levels
    # Integers can't represent NaN or infinity, so we mark such a block with a NaN unit.
    units = jnp.where(jnp.isfinite(unit), unit, jnp.nan)
    share = jnp.where(units[:, None] > 0, blocks / units[:, None], 0)
    codes = jnp.clip(jnp.round(share), -levels, levels).astype(jnp.int8).reshape(-1)
    if bits == 4:
        low, high = (half.astype(jnp.uint8) & 15 for half in (codes[0::2], codes[1::2]))
        codes = low | high << 4
    return Packed(codes, units)


def dequantise(packed: Packed, bits: int) -> jax.Array:
    """Returns the rounded values as a float32 vector."""
    codes = packed.codes
    if bits == 4:
        halves = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(-1)
        codes = jnp.where(halves > 7, halves.astype(jnp.int8) - 16, halves.astype(jnp.int8))
    blocks = codes.astype(jnp.float32).reshape(packed.units.size, BLOCK)
    return (blocks * packed.units[:, None]).reshape(-1)


def quantised_mean(packed: Packed, bits: int, names: tuple[Hashable, ...]) -> jax.Array:
    """Gathers every rank's vector and returns the mean of all vectors in float32.

    Vectors are added in rank order, so the result is bitwise identical on every rank.
    """
    every = Packed(*(collectives.gather(part, names) for part in packed))
    ranks = every.units.shape[0]

    def add(rank: jax.Array, total: jax.Array) -> jax.Array:
        return total + dequantise(Packed(every.codes[rank], every.units[rank]), bits)

    # We start from the first rank's vector rather than from zeros. Under
    # `shard_map(check_vma=True)`, JAX considers zeros to be identical on all ranks, and rejects a
    # loop whose sum starts out identical on all ranks but doesn't stay that way.
    first = dequantise(Packed(every.codes[0], every.units[0]), bits)
    return jax.lax.fori_loop(1, ranks, add, first) / ranks
