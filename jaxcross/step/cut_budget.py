"""Limits the search for the fastest cut to a fraction of the run, if its length is known.

To find out how many segments to cut a step into, we compile and time several cuts. In a short run,
that can take longer than even the best cut would save, so there's a time limit. All ranks apply the
same limit to the same measurements, which means that they end the search at the same point.
"""

from __future__ import annotations

import math
import time
from typing import final

import numpy as np

from jaxcross.world import RunOnAllRanks

SHARE = 0.25
"""Maximum share of the run that a search may take, assuming that all steps are uncut.

The best cuts we've measured save between a sixth and a third of the run. Most of a search goes into
compiling, which takes just as long for a short run, so there it can't pay off.
"""


@final
class Budget:
    """Keeps track of the time a search has left.

    Args:
        steps: Number of steps in the run, identical on all ranks. None if unknown, in which case
            there's no limit.
        run_on_all_ranks: Runs work that communicates.

    Attributes:
        limit_s: Time limit in seconds. Infinite until `set` is called.
    """

    def __init__(self, steps: int | None, run_on_all_ranks: RunOnAllRanks) -> None:
        self.steps = steps
        self._run_on_all_ranks = run_on_all_ranks
        self.limit_s = math.inf
        self._marked_s = time.perf_counter()
        self._spent_s: float | None = None  # excluding the uncut step, which runs anyway

    def set(self, uncut_s: float) -> None:
        """Sets the limit, given the duration of an uncut step."""
        if self.steps is not None:
            self.limit_s = SHARE * self.steps * uncut_s

    def allows_another(self) -> bool:
        """Whether there's time to try another cut.

        We assume that the next cut will take at least as long to compile and time as the previous
        cut, i.e. the time since the last call. The slowest rank's time counts, so that all ranks
        get the same answer. Waits for all ranks, unless there's no limit.
        """
        if math.isinf(self.limit_s):
            return True
        now_s = time.perf_counter()
        took_ns = np.array([-round((now_s - self._marked_s) * 1e9)], np.int64)
        took_s = (
            -float(
                self._run_on_all_ranks(
                    "cut budget", lambda control: control.allreduce_min(took_ns)
                ).item()
            )
            / 1e9
        )
        self._marked_s = now_s
        self._spent_s = 0.0 if self._spent_s is None else self._spent_s + took_s
        return self._spent_s + took_s <= self.limit_s
