"""Page-aligned memory that exchanges receive into, recycled as soon as nothing refers to it.

The first write to a fresh page of memory causes a page fault. For a receive buffer of 100 MB, these
faults take up to 25 ms, whereas pages that were used before cost nothing. So we keep the memory of
receive buffers and use it again for later exchanges.

JAX turns an aligned NumPy array into a JAX array without copying it. So the result of an exchange,
which the user may keep, still lives in our buffer, and we must not reuse the buffer before the
result is gone. To find out when that is, each array that `take` returns is a new NumPy object over
the buffer's memory, its slot. All views of this object and all JAX arrays made from it keep it
alive, so once Python has collected it, the slot is free. If the user keeps a result forever, the
slot stays occupied.
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

# Below this size, NumPy's own allocator is at least as fast, and much of a page would be wasted.
SMALLEST_BYTES = 64 * 1024
# How long a slot, i.e. a piece of memory for a receive buffer, is kept while nobody uses it. A
# running job takes its slots again within seconds, even if it alternates with other jobs. So this
# only releases the slots of jobs that have finished.
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
                # No slot of this size is free, but some arrays may be gone already: after a JAX
                # array has been garbage-collected, JAX keeps the NumPy array under it until the
                # next call of JAX. We make such a call here, because it may free a slot.
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
        """Bytes of all slots, whether they're in use or free."""
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
    # This process may be forked. We make the mapping private, so that the child process keeps the
    # data that the memory contained at that time, even if this process uses the memory for another
    # exchange.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # raised by a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
