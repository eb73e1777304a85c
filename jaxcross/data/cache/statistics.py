"""Counts what each cache level has delivered, and how long training has waited for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

LEVELS = ("images", "memory", "disk", "origin")
"""The levels, the fastest first.

These are decoded images in memory, encoded records in memory, encoded records on the node's disk,
and the data set's own storage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStatistics:
    """What one level has delivered to one process.

    Attributes:
        records: Number of records that were found in the level.
        nbytes: Number of bytes read from the level.
        seconds: Time spent reading from the level, summed over the threads that read.
        waited_s: Time for which threads had to wait because their record hadn't been read from the
            level yet.
    """

    records: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0


@final
class Statistics:
    """Counters by level. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order of `LevelStatistics`'s fields.
        self._counts = {name: [0, 0, 0.0, 0.0] for name in LEVELS}

    def add(
        self,
        level: str,
        *,
        records: int = 0,
        nbytes: int = 0,
        seconds: float = 0.0,
        waited_s: float = 0.0,
    ) -> None:
        """Adds a read from `level`, or the time spent waiting for it, to the counters."""
        counts = self._counts[level]
        with self._lock:
            counts[0] += records
            counts[1] += nbytes
            counts[2] += seconds
            counts[3] += waited_s

    def levels(self) -> dict[str, LevelStatistics]:
        """Returns the counters so far by level, the fastest first."""
        with self._lock:
            counts = {name: tuple(each) for name, each in self._counts.items()}
        return {
            name: LevelStatistics(
                records=int(records), nbytes=int(nbytes), seconds=seconds, waited_s=waited_s
            )
            for name, (records, nbytes, seconds, waited_s) in counts.items()
        }


def total(parts: Iterable[LevelStatistics]) -> LevelStatistics:
    """Returns the sum of the counters of several processes or reads."""
    values = [asdict(part) for part in parts]
    return LevelStatistics(
        **{name: sum(each[name] for each in values) for name in asdict(LevelStatistics())}
    )


def from_json(levels: Mapping[str, Mapping[str, Any]]) -> dict[str, LevelStatistics]:
    """Returns the counters that `as_json` converted. A level that's missing has counted nothing."""
    return {name: LevelStatistics(**levels.get(name, {})) for name in LEVELS}


def as_json(levels: Mapping[str, LevelStatistics]) -> dict[str, dict[str, Any]]:
    """Returns the counters as values that JSON can represent."""
    return {name: asdict(level) for name, level in levels.items()}
