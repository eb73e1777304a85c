"""Counts what each cache level has served, and how long training has waited for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

LEVELS = ("images", "memory", "disk", "origin")
"""The levels, fastest first.

Decoded images in memory, encoded records in memory, encoded records on the node's disk, and the
data set's own storage.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStatistics:
    """What one process has read from one level.

    Attributes:
        records: Number of records found in the level.
        nbytes: Number of bytes read from the level.
        seconds: Time spent reading from the level, summed over all reading threads.
        waited_s: Time that threads were blocked because their record hadn't been read from the
            level yet.
    """

    records: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0


@final
class Statistics:
    """Per-level counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Same order as the fields of `LevelStatistics`.
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
        """Records a read from `level`, or time spent waiting for it."""
        counts = self._counts[level]
        with self._lock:
            counts[0] += records
            counts[1] += nbytes
            counts[2] += seconds
            counts[3] += waited_s

    def levels(self) -> dict[str, LevelStatistics]:
        """Returns the current counters by level, fastest first."""
        with self._lock:
            counts = {name: tuple(each) for name, each in self._counts.items()}
        return {
            name: LevelStatistics(
                records=int(records), nbytes=int(nbytes), seconds=seconds, waited_s=waited_s
            )
            for name, (records, nbytes, seconds, waited_s) in counts.items()
        }


def total(parts: Iterable[LevelStatistics]) -> LevelStatistics:
    """Adds up counters from several processes or reads."""
    values = [asdict(part) for part in parts]
    return LevelStatistics(
        **{name: sum(each[name] for each in values) for name in asdict(LevelStatistics())}
    )


def from_json(levels: Mapping[str, Mapping[str, Any]]) -> dict[str, LevelStatistics]:
    """The inverse of `as_json`. Levels that are missing get zero counters."""
    return {name: LevelStatistics(**levels.get(name, {})) for name in LEVELS}


def as_json(levels: Mapping[str, LevelStatistics]) -> dict[str, dict[str, Any]]:
    """Converts the counters to JSON-compatible values."""
    return {name: asdict(level) for name, level in levels.items()}
