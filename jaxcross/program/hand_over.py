"""Copies arrays between the accelerator and the host's CPU device.

Compute segments run on the accelerator, but collective segments run on the CPU device. So every
value that one kind of segment passes to the other has to be copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxcross.program.ir import Aval

_PINNED = "pinned_host"


def on_accelerator() -> bool:
    """Whether compute segments run on an accelerator, so that arrays have to be copied."""
    return jax.default_backend() != "cpu"


def pinned_memory(places: Collection[Sharding], host: Any) -> Sharding | None:
    """Returns the pinned host memory of the accelerator that a program uses.

    An accelerator's copy engine can only access pinned host memory, which the CPU device can then
    read in place. On an H100, such a copy runs at 41 GB/s, compared to 2 GB/s for copies to the CPU
    device's own memory (`benchmarks/results/gpu_transfers.json`). Returns None if there's no pinned
    memory, or if the program uses several accelerators.

    Args:
        places: Where the arguments of a segment are; empty if JAX is free to place them.
        host: The CPU device.
    """
    devices = {device for place in places for device in place.device_set} or {
        jax.local_devices()[0]
    }
    (device, *others) = devices
    if (
        others
        or device == host
        or not any(memory.kind == _PINNED for memory in device.addressable_memories())
    ):
        return None
    mesh = next((place.mesh for place in places if isinstance(place, NamedSharding)), None)
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=_PINNED)
    return SingleDeviceSharding(device, memory_kind=_PINNED)


def on_device(memory: Sharding) -> Sharding:
    """Returns where arrays in pinned memory come from: the default memory of their device."""
    (device,) = memory.device_set
    return memory.with_memory_kind(device.default_memory().kind)


def can_be_pinned(aval: Aval) -> bool:
    """Whether an array can go to the host through pinned memory.

    Random keys, scalars and empty arrays can't.
    """
    return aval.shape != () and aval.nbytes > 0 and not aval.dtype.startswith("key<")


def to_host(values: Sequence[Any], host: Any, through: Sequence[Sharding | None]) -> list[Any]:
    """Returns a replica of each value on the host's CPU device.

    Values that are already there aren't copied.

    Args:
        values: Arrays on any devices.
        host: The CPU device.
        through: The pinned memory through which each value is copied, or None for a direct copy.
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
    _put(moved, [n for n in away if through[n] is not None], through)
    _put(moved, away, [host] * len(moved))
    return moved


def from_host(values: Sequence[Any], shardings: Sequence[Sharding | None]) -> list[Any]:
    """Returns values with the shardings that later segments expect; None leaves a value in place.

    Doesn't wait for the copies.
    """
    moved = list(values)
    # If a sharding just names a device, pass the device itself. JAX took twice as long with the
    # sharding.
    places = [
        next(iter(s.device_set)) if isinstance(s, SingleDeviceSharding) else s for s in shardings
    ]
    _put(moved, [n for n, place in enumerate(places) if place is not None], places)
    return moved


def _put(values: list[Any], which: Sequence[int], places: Sequence[Any]) -> None:
    if which:
        found = jax.device_put([values[n] for n in which], [places[n] for n in which])
        for n, value in zip(which, found, strict=True):
            values[n] = value
