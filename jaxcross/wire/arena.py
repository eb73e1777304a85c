"""Page-aligned memory that exchanges receive into, used again as soon as nothing refers to it any
more.

A page of fresh memory costs a fault when it is first written, 25 ms per 100 MB; the same pages
again cost nothing. And JAX takes an aligned NumPy array as it is, without a copy, so whoever holds
a result of an exchange holds a part of an arena. No analysis of the program decides when that
memory is free. Instead, each array that `take` returns is a new NumPy object over its slot. All
views of it and all JAX arrays made from it keep the object alive, and the slot is free once the
object is gone. A result that the user keeps forever just keeps its slot.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from dataclasses import dataclass, field
from typing import Any, final
from weakref import ref

import numpy as np

from jaxcross._jax_compat import collect_garbage

# Below this size, NumPy's own allocator is at least as fast, and a page would be mostly empty.
SMALLEST_BYTES = 64 * 1024
# Idle slots are kept so long: jobs of one run alternate within seconds, and a slot of a finished
# job is to go.
IDLE_S = 60.0


@dataclass(slots=True)
class _Slot:
    memory: mmap.mmap
    lease: ref[np.ndarray] | None = None
    used_s: float = 0.0

    @property
    def is_free(self) -> bool:
        return self.lease is None or self.lease() is None


@final
@dataclass(slots=True)
class Arena:
    """The slots of one wire. Safe to use from several threads."""

    _slots: dict[int, list[_Slot]] = field(default_factory=dict)  # by size in bytes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an array with undefined content that shares memory with nothing that anyone can
        still reach.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_BYTES:
            return np.empty(shape, dtype)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            now = time.monotonic()
            self._drop_idle(now)
            slots = self._slots.setdefault(size, [])
            slot = _free(slots)
            if slot is None:
                # A JAX array that is gone leaves the NumPy array it was made from to JAX's next
                # call.
                collect_garbage()
                slot = _free(slots)
            if slot is None:
                slot = _Slot(_memory(size))
                slots.append(slot)
            lease = np.frombuffer(slot.memory, np.uint8)
            slot.lease = ref(lease)
            slot.used_s = now
        return lease[:nbytes].view(dtype).reshape(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not."""
        with self._lock:
            return sum(size * len(slots) for size, slots in self._slots.items())

    def _drop_idle(self, now: float) -> None:
        for size, slots in list(self._slots.items()):
            kept = [slot for slot in slots if not (slot.is_free and now - slot.used_s > IDLE_S)]
            if len(kept) < len(slots):
                self._slots[size] = kept


def _free(slots: list[_Slot]) -> _Slot | None:
    return next((slot for slot in slots if slot.is_free), None)


def _memory(size: int) -> mmap.mmap:
    # Private, so that a forked process keeps what it had of a slot when this process uses the slot
    # again.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
