"""Seeded disorder: every thread of a runner is late now and then, for tests of what must not depend on it."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

_LATE = 0.3  # of all times
_MEAN_S = 0.001
_LONGEST_S = 0.02
VARIABLE = "JAXCROSS_CHAOS"


class Chaos:
    """Delays of random length, drawn for each thread by its name from the seed and the rank: the same seed delays the
    same threads alike, in the order of what each does. Results must be the same to the bit under every seed.

    Args:
        seed: Any number.
        rank: This rank, so that ranks are late at different times.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.rank = seed, rank
        self.delays = 0  # how many there were, for tests; may miss a few
        self._own = threading.local()
        self._never = threading.Event()

    def pause(self) -> None:
        """Waits, sometimes, for a few milliseconds."""
        draw: random.Random | None = getattr(self._own, "draw", None)
        if draw is None:
            # A number of a string that is the same in every process.
            name = f"{self.seed} {self.rank} {threading.current_thread().name}"
            draw = self._own.draw = random.Random(zlib.crc32(name.encode()))
        if draw.random() < _LATE:
            self.delays += 1
            self._never.wait(min(draw.expovariate(1 / _MEAN_S), _LONGEST_S))


class LateQueue(SimpleQueue[Any]):
    """A queue whose readers are late now and then."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chaos = chaos

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item, which it keeps to itself for a while. Waits for one as `SimpleQueue` does."""
        item = super().get(block, timeout)
        self._chaos.pause()
        return item


def chaos_of(environ: Mapping[str, str], rank: int) -> Chaos | None:
    """What `JAXCROSS_CHAOS=SEED` asks for; None without it.

    Raises:
        ValueError: It is no number.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        return Chaos(int(text), rank)
    except ValueError:
        raise ValueError(f"`{VARIABLE}` is `{text}`: it takes the number of a seed, or nothing for no chaos.") from None
