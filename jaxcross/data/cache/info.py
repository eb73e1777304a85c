"""Reads what a cache contains and what its latest run has read, for `jaxcross data info`.

This only reads the cache's files, and doesn't become one of the cache's users.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxcross.data.cache.cache import MARKER, read_json
from jaxcross.data.cache.next_use import PAGE_BYTES
from jaxcross.data.cache.page_store import FIRST, FREE, HEADER
from jaxcross.data.cache.statistics import LEVELS, LevelStatistics, from_json, total


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelInfo:
    """One level of a cache.

    Attributes:
        name: `images`, `memory`, `disk` or `origin`.
        budget_bytes: The level's budget; None for the origin, and if the level is off.
        used_bytes: Size of the records in the level.
        records: Number of records in the level.
        given: What the level has delivered to all processes of the run.
    """

    name: str
    budget_bytes: int | None
    used_bytes: int
    records: int
    given: LevelStatistics


def is_cache(folder: Path) -> bool:
    """Whether `folder` is a cache."""
    return bool(read_json(folder / MARKER))


def cache_info(folder: Path) -> list[LevelInfo]:
    """Returns the cache's levels, the fastest first, with the statistics of its latest run.

    If a run is in progress, the statistics may be a few seconds old, because each process writes
    its own to a file only every few seconds.
    """
    memory = Path(str(read_json(folder / MARKER).get("memory", folder)))
    runs = [
        from_json(read_json(path).get("levels", {})) for path in sorted(folder.glob("runs/*.json"))
    ]
    return [
        _level(
            (folder if name == "disk" else memory) / name, name, total(run[name] for run in runs)
        )
        for name in LEVELS
    ]


def _level(folder: Path, name: str, given: LevelStatistics) -> LevelInfo:
    try:
        header = np.fromfile(folder / "pages", np.int64, HEADER)
        n_pages = ((folder / "pages").stat().st_size - 8 * HEADER) // 8
        rows = np.fromfile(folder / "rows", np.uint32).reshape(-1, 4)
        records = int(np.count_nonzero(rows[:, FIRST]))
        used = (n_pages - int(header[FREE])) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return LevelInfo(name=name, budget_bytes=None, used_bytes=0, records=0, given=given)
    budget = n_pages * PAGE_BYTES
    return LevelInfo(name=name, budget_bytes=budget, used_bytes=used, records=records, given=given)
