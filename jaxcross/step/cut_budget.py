"""Limits how long a search for the fastest cut may take, if the length of the run is known.

To find out into how many segments a step should be cut, we compile and time several cuts. In a
short run, that would take longer than the best cut can save, so we limit the time. All ranks use
the same limit and the same measured times, so they end the search at the same point.
"""

from __future__ import annotations

import math
import time
from typing import final

import numpy as np

from jaxcross.world import RunOnAllRanks

SHARE = 0.25
"""The largest fraction of the run's time, at the speed of uncut steps, that a search may take.

The best cuts that we've measured save a sixth to a third of the run's time. A search spends most of
its time compiling, which takes as long for a short run as for a long one, so in a short run it
can't pay off.
"""


@final
class Budget:
    """Keeps track of the time that a search has left.

    Args:
        steps: The run's number of steps, identical on all ranks. None if it isn't known, in which
            case there's no limit.
        run_on_all_ranks: Runs work that communicates.

    Attributes:
        limit_s: Seconds that the search may take. Infinite until `set` is called.
    """

    def __init__(self, steps: int | None, run_on_all_ranks: RunOnAllRanks) -> None:
        self.steps = steps
        self._run_on_all_ranks = run_on_all_ranks
        self.limit_s = math.inf
        self._marked_s = time.perf_counter()
        self._spent_s: float | None = None  # on cuts, without the uncut step, which runs anyway

    def set(self, uncut_s: float) -> None:
        """Sets the limit from the time of an uncut step, `uncut_s`."""
        if self.steps is not None:
            self.limit_s = SHARE * self.steps * uncut_s

    def allows_another(self) -> bool:
        """Whether there's time to try another cut.

        We assume that compiling and timing the next cut takes at least as long as it took for the
        previous one, i.e. the time since the previous call. The slowest rank's time counts, so that
        all ranks get the same answer. Waits for all ranks, unless there's no limit.
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
