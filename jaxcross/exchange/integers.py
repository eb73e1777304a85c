"""Vectors as 4- or 8-bit integers: blocks of elements share a float32 unit each.

Sums are computed in float32.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcross.exchange import collectives

BLOCK = 128
"""Number of elements that share a unit."""


class Packed(NamedTuple):
    """A vector as integers.

    Attributes:
        codes: The integers: at 8 bits one element per byte, at 4 bits two.
        units: One float32 unit per block, NaN if the block isn't finite.
    """

    codes: jax.Array
    units: jax.Array


def pack(x: jax.Array, bits: int) -> Packed:
    """Rounds a float32 vector to integer multiples of its blocks' units.

    The vector's length must be a multiple of `BLOCK`. The largest element of a block is 7 or 127
    units, so an element is off by at most half a unit, 1/14 or 1/254 of the largest.
    """
    levels = 2 ** (bits - 1) - 1
    blocks = x.reshape(x.size // BLOCK, BLOCK)
    unit = jnp.max(jnp.abs(blocks), axis=1, initial=0.0) / levels
    # NaN and infinity travel in the unit, since no integer can hold them.
    units = jnp.where(jnp.isfinite(unit), unit, jnp.nan)
    share = jnp.where(units[:, None] > 0, blocks / units[:, None], 0)
    codes = jnp.clip(jnp.round(share), -levels, levels).astype(jnp.int8).reshape(-1)
    if bits == 4:
        low, high = (half.astype(jnp.uint8) & 15 for half in (codes[0::2], codes[1::2]))
        codes = low | high << 4
    return Packed(codes, units)


def unpack(packed: Packed, bits: int) -> jax.Array:
    """Returns the rounded values as a float32 vector."""
    codes = packed.codes
    if bits == 4:
        halves = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(-1)
        codes = jnp.where(halves > 7, halves.astype(jnp.int8) - 16, halves.astype(jnp.int8))
    blocks = codes.astype(jnp.float32).reshape(packed.units.size, BLOCK)
    return (blocks * packed.units[:, None]).reshape(-1)


def mean(packed: Packed, bits: int, names: tuple[Hashable, ...]) -> jax.Array:
    """Gathers every rank's vector and returns their mean, float32.

    Adds rank after rank, so the result is bitwise identical everywhere.
    """
    every = Packed(*(collectives.gather(part, names) for part in packed))
    ranks = every.units.shape[0]

    def add(rank: jax.Array, total: jax.Array) -> jax.Array:
        return total + unpack(Packed(every.codes[rank], every.units[rank]), bits)

    # Start with a sum, as in `sparse.sum_of_pairs`: `shard_map(check_vma=True)` would take zeros
    # for a value that is identical on every rank.
    first = unpack(Packed(every.codes[0], every.units[0]), bits)
    return jax.lax.fori_loop(1, ranks, add, first) / ranks
