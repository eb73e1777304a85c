"""Vectors as integers of 4 or 8 bits: blocks of elements, each with a float32 unit of its own,
summed in float32.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcross.exchange import collectives

BLOCK = 128
"""Elements that share a unit."""


class Packed(NamedTuple):
    """Attributes: `codes`, two elements to a byte or one; `units`, float32, one a block, NaN where
    it is not finite.
    """

    codes: jax.Array
    units: jax.Array


def pack(x: jax.Array, bits: int) -> Packed:
    """Rounds a float32 vector, whose length is a multiple of `BLOCK`, to the nearest integers of
    its blocks' units.

    The largest element of a block is 7 or 127 units, so an element is off by at most half of that
    part of it.
    """
    levels = 2 ** (bits - 1) - 1
    blocks = x.reshape(x.size // BLOCK, BLOCK)
    unit = jnp.max(jnp.abs(blocks), axis=1, initial=0.0) / levels
    # NaN and infinity travel in the unit: no integer can hold them.
    units = jnp.where(jnp.isfinite(unit), unit, jnp.nan)
    share = jnp.where(units[:, None] > 0, blocks / units[:, None], 0)
    codes = jnp.clip(jnp.round(share), -levels, levels).astype(jnp.int8).reshape(-1)
    if bits == 4:
        low, high = (half.astype(jnp.uint8) & 15 for half in (codes[0::2], codes[1::2]))
        codes = low | high << 4
    return Packed(codes, units)


def unpack(packed: Packed, bits: int) -> jax.Array:
    """Returns the float32 vector that was rounded."""
    codes = packed.codes
    if bits == 4:
        halves = jnp.stack([codes & 15, codes >> 4], axis=1).reshape(-1)
        codes = jnp.where(halves > 7, halves.astype(jnp.int8) - 16, halves.astype(jnp.int8))
    blocks = codes.astype(jnp.float32).reshape(packed.units.size, BLOCK)
    return (blocks * packed.units[:, None]).reshape(-1)


def mean(packed: Packed, bits: int, names: tuple[Hashable, ...]) -> jax.Array:
    """Averages every rank's vector, in float32 and rank after rank: the same bits everywhere.
    Gathers.
    """
    every = Packed(*(collectives.gather(part, names) for part in packed))
    ranks = every.units.shape[0]

    def add(rank: jax.Array, total: jax.Array) -> jax.Array:
        return total + unpack(Packed(every.codes[rank], every.units[rank]), bits)

    # As in `sparse.sum_of_pairs`: zeros would count as the same on every rank.
    first = unpack(Packed(every.codes[0], every.units[0]), bits)
    return jax.lax.fori_loop(1, ranks, add, first) / ranks
