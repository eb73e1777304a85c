"""Handles arguments that share a buffer, such as `{"params": p, "ema": p}`.

XLA refuses to take the same buffer twice in one call if the call may overwrite it. So `copy_shared`
copies such arrays before a step, and `find_shared` names them for an error text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross._pytree import buffer_of


def copy_shared(leaves: list[Any], donated: Collection[int], *, new_types: bool) -> None:
    """Replaces donated arrays that occur more than once in `leaves` by copies.

    Each buffer is then donated once. If an argument that isn't donated shares the buffer, every
    donated array that uses it is copied.

    Args:
        leaves: Flat arguments; changed in place.
        donated: Positions in `leaves` of the arguments that the step may overwrite.
        new_types: Whether to compare buffers rather than Python objects. Different arrays can share
            a buffer, e.g. after `jax.device_put`. Comparing buffers takes 0.2 us per array, so
            callers do it on the first call with these types only.
    """
    if not donated or not (new_types or len(set(map(id, leaves))) < len(leaves)):
        return
    key: Callable[[Any], Hashable] = buffer_of if new_types else id
    seen = {
        key(x)
        for place, x in enumerate(leaves)
        if place not in donated and isinstance(x, jax.Array)
    }
    for place in sorted(donated):
        leaf = leaves[place]
        if not isinstance(leaf, jax.Array):
            continue
        if key(leaf) in seen:
            leaves[place] = jnp.array(leaf)
        seen.add(key(leaf))


def find_shared(arrays: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the names of the first two arrays found to share a buffer, or None if none do."""
    seen: dict[Hashable, str] = {}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            continue
        first = seen.setdefault(buffer_of(array), name)
        if first != name:
            return first, name
    return None
