"""Page-aligned memory that exchanges receive into, recycled as soon as nothing refers to it.

Writing to a fresh page for the first time costs a page fault, which adds up to 25 ms per 100 MB.
Reusing the same pages costs nothing. JAX also takes an aligned NumPy array without copying it, so a
JAX array that holds the result of an exchange is backed by a part of an arena.

We therefore have to find out when that memory is free, and we do it without analysing the program.
Each array that `take` returns is a new NumPy object over its slot. All views of this object and all
JAX arrays made from it keep it alive, and once the object has been collected, the slot is free. If
the user keeps a result forever, its slot simply stays occupied.
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

# Below this size, NumPy's own allocator is at least as fast, and most of the page would be wasted.
SMALLEST_BYTES = 64 * 1024
# How long an idle slot is kept. Jobs of one run alternate within seconds, so their slots survive,
# but the slots of a finished job should be released.
IDLE_S = 60.0


@dataclass(slots=True)
class _ArenaSlot:
    memory: mmap.mmap
    lease: ref[np.ndarray] | None = None
    used_s: float = 0.0

    @property
    def is_free(self) -> bool:
        return self.lease is None or self.lease() is None


@final
@dataclass(slots=True)
class Arena:
    """The slots of one wire. Thread-safe."""

    _slots: dict[int, list[_ArenaSlot]] = field(default_factory=dict)  # by size in bytes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an uninitialised array whose memory isn't shared with any reachable array."""
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
                # When a JAX array is collected, JAX only releases the underlying NumPy array on its
                # next call, so we trigger that here before we allocate a new slot.
                collect_garbage()
                slot = _free(slots)
            if slot is None:
                slot = _ArenaSlot(_memory(size))
                slots.append(slot)
            lease = np.frombuffer(slot.memory, np.uint8)
            slot.lease = ref(lease)
            slot.used_s = now
        return lease[:nbytes].view(dtype).reshape(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, whether in use or free."""
        with self._lock:
            return sum(size * len(slots) for size, slots in self._slots.items())

    def _drop_idle(self, now: float) -> None:
        for size, slots in list(self._slots.items()):
            kept = [slot for slot in slots if not (slot.is_free and now - slot.used_s > IDLE_S)]
            if len(kept) < len(slots):
                self._slots[size] = kept


def _free(slots: list[_ArenaSlot]) -> _ArenaSlot | None:
    return next((slot for slot in slots if slot.is_free), None)


def _memory(size: int) -> mmap.mmap:
    # The mapping is private, so that a forked process keeps its view of a slot even when this
    # process recycles the slot.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
