"""Random delays in a runner's threads, for testing that results don't depend on timing."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

_LATE = 0.3  # the fraction of calls that are delayed
_MEAN_S = 0.001
_LONGEST_S = 0.02
VARIABLE = "JAXCROSS_CHAOS"


class Chaos:
    """Random delays. Each thread draws its own, based on its name, the seed and the rank.

    Delays are reproducible, so you can rerun a failed test: with the same seed, a thread's n-th
    call always gets the same delay. Delays must not affect results, so a run has to give bitwise
    identical results for every seed.

    Args:
        seed: An arbitrary number.
        rank: This rank. It's part of the seed, so the ranks are delayed at different times.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.seed = seed
        self.rank = rank
        self.delays = 0  # for tests; may be a little too low, because there's no lock
        self._own = threading.local()
        self._never = threading.Event()  # never set; for waiting without `time.sleep`

    def pause(self) -> None:
        """Waits for a few milliseconds, but only in some calls."""
        draw: random.Random | None = getattr(self._own, "draw", None)
        if draw is None:
            # `hash` differs between processes, because Python randomizes it for strings.
            name = f"{self.seed} {self.rank} {threading.current_thread().name}"
            draw = self._own.draw = random.Random(zlib.crc32(name.encode()))
        if draw.random() < _LATE:
            self.delays += 1
            self._never.wait(min(draw.expovariate(1 / _MEAN_S), _LONGEST_S))


class LateQueue(SimpleQueue[Any]):
    """A queue that delays its readers in some of their calls."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chaos = chaos

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Waits for the next item like `SimpleQueue`, and may delay before returning it."""
        item = super().get(block, timeout)
        self._chaos.pause()
        return item


def chaos_of(environ: Mapping[str, str], rank: int) -> Chaos | None:
    """Returns the delays that `JAXCROSS_CHAOS=SEED` requests, or None if it isn't set.

    Raises:
        ValueError: The seed is not a number.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        return Chaos(int(text), rank)
    except ValueError:
        raise ValueError(
            f"`{VARIABLE}` must be a whole number, the seed of the random delays, or empty for no "
            f"delays, got `{text}`."
        ) from None
