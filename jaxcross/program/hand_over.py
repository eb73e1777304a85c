"""Arrays between the accelerator, where compute segments run, and the host's CPU device, where collective ones do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxcross.program.ir import Aval

_PINNED = "pinned_host"


def pinned_memory(device: Any) -> Sharding | None:
    """Returns the host's pinned memory that belongs to a device; None where it has none.

    An accelerator's copy engine reaches only pinned memory of the host. The CPU device reads it in place.
    """
    if any(memory.kind == _PINNED for memory in device.addressable_memories()):
        return SingleDeviceSharding(device, memory_kind=_PINNED)
    return None


def goes_through(memory: Sharding | None, aval: Aval) -> Sharding | None:
    """Returns the pinned memory through which arrays of a type go to the host, None for those that go directly."""
    return None if aval.dtype.startswith("key<") or not aval.nbytes else memory


def to_host(values: Sequence[Any], host: Any, through: Sequence[Sharding | None]) -> list[Any]:
    """Returns one replica of each value on the host's CPU device. What is there already is not copied.

    Args:
        values: Arrays of any devices.
        host: The CPU device.
        through: The pinned memory through which each goes, if any.
    """
    moved = list(values)
    away = []
    for n, x in enumerate(moved):
        if not isinstance(x, jax.Array):
            continue
        if len(x.devices()) > 1 and x.sharding.is_fully_replicated:
            moved[n] = x = x.addressable_data(0)
        if x.devices() != {host}:
            away.append(n)
    # One call for all: a call for each costs a tenth of a millisecond, mostly in Python.
    _put(moved, [n for n in away if through[n] is not None], through)
    _put(moved, away, [SingleDeviceSharding(host)] * len(moved))
    return moved


def from_host(values: Sequence[Any], shardings: Sequence[Sharding | None]) -> list[Any]:
    """Returns values with the shardings that the next segments expect; None leaves a value where it is.

    Does not wait for the copies.
    """
    moved = list(values)
    _put(moved, [n for n, sharding in enumerate(shardings) if sharding is not None], shardings)
    return moved


def _put(values: list[Any], places: Sequence[int], shardings: Sequence[Any]) -> None:
    if places:
        found = jax.device_put([values[n] for n in places], [shardings[n] for n in places])
        for n, value in zip(places, found, strict=True):
            values[n] = value
