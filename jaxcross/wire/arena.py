"""Page-aligned memory for receiving exchanges, recycled as soon as nothing refers to it any more.

The first write to a fresh page of memory triggers a page fault. For a 100 MB receive buffer, these
can cost up to 25 ms in total, whereas writing to pages that have been used before costs nothing
extra. So we hold on to the memory of receive buffers and reuse it for later exchanges.

JAX can wrap an aligned NumPy array without copying it. This means that the result of an exchange,
which the user may keep, still lives in our buffer, and we can't reuse the buffer until the result
is gone. To find out when that is, `take` returns a new NumPy object over the buffer's memory (its
slot) each time. All views of this object and all JAX arrays made from it keep it alive, so once
it's been garbage-collected, the slot is free. If the user keeps a result forever, the slot remains
occupied.
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

# Below this size, NumPy's own allocator is just as fast, and we'd waste a large part of a page.
SMALLEST_BYTES = 64 * 1024
# How long to keep an unused slot, i.e. the memory of a receive buffer. Running jobs take their
# slots again within seconds, even if they alternate with other jobs, so this only affects jobs that
# have finished.
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
    """The slots of a wire. Thread-safe."""

    _slots: dict[int, list[_ArenaSlot]] = field(default_factory=dict)  # by size in bytes
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an uninitialised array that doesn't share memory with any reachable array."""
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
                # No slot of this size is free, but that may be because JAX hasn't cleaned up yet:
                # after a JAX array has been garbage-collected, JAX holds on to the underlying NumPy
                # array until the next time it's called. Make such a call now, in case it frees a
                # slot.
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
        """Total size of all slots in bytes, both used and free."""
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
    # Use a private mapping in case this process gets forked: the child then keeps the data as it
    # was at the time of the fork, even if we go on to reuse the memory for another exchange.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # raised if the kernel lacks huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
