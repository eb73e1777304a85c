"""Reads a cache's contents and the statistics of its latest run, for `jaxcross data info`.

We only read the cache's files here, without registering as one of its users.
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
        budget_bytes: The level's budget; None for the origin and for levels that are turned off.
        used_bytes: Total size of the records in the level.
        records: Number of records in the level.
        given: What all processes of the run have read from the level.
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
    """Returns the cache's levels, fastest first, with the statistics of its latest run.

    During a run, the statistics can lag behind by a few seconds, because each process only writes
    its own to disk every few seconds.
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
