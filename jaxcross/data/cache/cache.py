"""The cache object: sets up the node's cache folder, its levels, users and statistics."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from jaxcross._arguments import is_whole
from jaxcross._files import write_whole
from jaxcross.data.cache.feed import Feeds
from jaxcross.data.cache.locks import Claims, FileLock, Users, has_users
from jaxcross.data.cache.origin import Origin
from jaxcross.data.cache.page_store import PageStore
from jaxcross.data.cache.split import CachedSplit, Levels
from jaxcross.data.cache.statistics import LevelStatistics, Statistics, as_json
from jaxcross.data.cache.streams import Streams

_log = logging.getLogger("jaxcross")

MARKER = "jaxcross-cache.json"
FORMAT = 1
SHARED_MEMORY = Path("/dev/shm")
REPORT_S = 5.0  # minimum interval between writes of the statistics


@final
class Cache:
    """Caches training data on a node, shared by all processes and runs there.

    There are three levels: decoded images in memory, encoded records in memory, and encoded records
    on the node's disk. Anything not found there is read from the data set's own storage, ahead of
    time. Since the seed determines the order of the records, each level knows which records the
    node's jobs will need soonest, and keeps those. The batches are bit for bit the same as without
    a cache.

    The data set is only ever read, never modified or deleted. The cache survives crashes of the
    processes using it. If the disk or the memory fills up, the affected level is turned off with a
    single warning and training continues without it. Linux only.

    Args:
        folder: A folder on a local disk. It may be missing, empty, or an existing cache. All
            processes on the node must use the same folder.
        disk_bytes: Budget for records on disk, shared by all processes; 0 turns the level off.
        memory_bytes: Budget for records in memory, shared by all processes; 0 turns the level off.
        images_bytes: Budget for decoded images in memory, shared by all processes; 0 turns the
            level off.
        ahead_records: How many records each stream of batches reads ahead. These are kept in the
            process's own memory, on top of the budgets.
        memory_folder: Where to put the in-memory levels: a folder on an in-memory file system.
            Defaults to `/dev/shm`, if that exists.
        storage_options: fsspec options for data sets at a URL.

    Raises:
        OSError: The folder can't be written.
        ValueError: An argument is out of range; or the folder contains something other than a
            cache, or is in use on another machine or with different budgets.

    Example:
        >>> cache = Cache(  # doctest: +SKIP
        ...     "/local/cache", disk_bytes=200 * 10**9, memory_bytes=8 * 10**9
        ... )
        >>> url = "s3://bucket/imagenet2012/5.1.0"
        >>> batches = train_batches(url, batch_size=64, cache=cache)  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        disk_bytes: int = 0,
        memory_bytes: int = 0,
        images_bytes: int = 0,
        ahead_records: int = 256,
        memory_folder: str | Path | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        budgets = {"disk": disk_bytes, "memory": memory_bytes, "images": images_bytes}
        for name, value in budgets.items():
            if not is_whole(value) or value < 0:
                raise ValueError(
                    f"`{name}_bytes` must be a whole number of bytes, 0 or more, got {value!r}."
                )
        if not is_whole(ahead_records) or ahead_records < 1:
            raise ValueError(
                f"`ahead_records` must be a whole number, at least 1, got {ahead_records!r}."
            )
        self.folder = Path(folder).expanduser().resolve()
        self.storage_options = dict(storage_options or {})
        self.ahead_records = ahead_records
        self.stop = threading.Event()
        self._statistics = Statistics()
        self._feeds = Feeds(self.stop)
        self._reported_s = time.monotonic()
        self._memory = _memory_folder(self.folder, memory_folder)
        _claim_folder(self.folder, self._memory)
        _remove_abandoned(self._memory)
        self._mutex = FileLock(self.folder / "open.lock")
        with self._mutex:
            self._users = Users(self.folder / "users")
            self._check_machine()
            if self._users.is_first:
                shutil.rmtree(self.folder / "runs", ignore_errors=True)
                shutil.rmtree(self.folder / "streams", ignore_errors=True)
            self._levels = self._open(budgets)
        self._report_path = self.folder / "runs" / f"{time.time_ns()}-{os.getpid()}.json"
        atexit.register(self.close)

    def _check_machine(self) -> None:
        """Raises ValueError if another machine is using the folder.

        Our file locks and memory mappings only work between processes on the same machine.
        """
        this = _machine()
        path = self.folder / "machine.json"
        if self._users.is_first:
            write_json(path, {"machine": this})
        elif read_json(path).get("machine") != this:
            self._users.leave()
            raise ValueError(
                f"The cache folder `{self.folder}` is in use by another machine. Name a folder on "
                "a disk of this node."
            )

    def _open(self, budgets: Mapping[str, int]) -> Levels:
        streams = Streams(self.folder / "streams")
        folders = {"disk": self.folder, "memory": self._memory, "images": self._memory}
        stores: dict[str, PageStore | None] = {}
        try:
            for name, budget in budgets.items():
                stores[name] = (
                    self._level(folders[name] / name, name, budget, streams) if budget else None
                )
        except BaseException:
            for store in stores.values():
                if store is not None:
                    store.close()
            self._users.leave()
            raise
        claims = Claims(self.folder / "claims")
        return Levels(**stores, claims=claims, streams=streams, statistics=self._statistics)

    def _level(self, folder: Path, name: str, budget: int, streams: Streams) -> PageStore | None:
        try:
            if folder.parent == self._memory:
                self._memory.mkdir(mode=0o700, exist_ok=True)
                # Anyone can create folders in `/dev/shm`, so this one might belong to another user.
                if self._memory.stat().st_uid != os.getuid():
                    raise PermissionError(f"`{self._memory}` belongs to another user")
                write_json(self._memory / MARKER, {"cache": str(self.folder)})
            return PageStore(
                folder,
                name=name,
                budget_bytes=budget,
                distances=streams.distances,
                several_streams=streams.are_several,
            )
        except OSError as error:
            _log.warning(
                f"The data cache's level `{name}` in `{folder}` stays off, since its files cannot "
                f"be created: {error}. Training continues, and reads more from slower levels. Make "
                "sure that the folder can be written and has enough space, and start again."
            )
            return None

    def split(self, origin: Origin, name: str, parse: Callable[[bytes], Any]) -> CachedSplit:
        """Returns a view of the origin's records that reads through this cache's levels.

        Args:
            origin: Where to read the records from on a miss.
            name: The split's name, for log messages.
            parse: Parses a record's bytes into an example.
        """
        levels = self._levels
        base = 0
        try:
            base = self._base(origin, name)
        except OSError as error:
            _log.warning(
                f"The data cache in `{self.folder}` keeps no records of `{name}`, since its files "
                f"cannot be updated: {error}. Training continues, and reads all of them from the "
                "data set. Make sure that the folder can be written and has enough space, and "
                "start again."
            )
            levels = replace(levels, images=None, memory=None, disk=None)
        return CachedSplit(
            levels,
            origin,
            parse=parse,
            base=base,
            salt=zlib.crc32(origin.fingerprint.encode()),
            ahead_records=self.ahead_records,
            feeds=self._feeds,
            on_group=self._report_now_and_then,
        )

    def _base(self, origin: Origin, name: str) -> int:
        """Returns the number of a split's first record within this cache.

        Every split ever opened in the cache gets its own range of consecutive record numbers.
        """
        path = self.folder / "data_sets.json"
        with self._mutex:
            known = {key: each for key, each in read_json(path).items() if _is_entry(each)}
            end = max((each["base"] + each["records"] for each in known.values()), default=0)
            if origin.fingerprint not in known:
                known[origin.fingerprint] = {"base": end, "records": len(origin), "name": name}
                write_json(path, known)
                end += len(origin)
            for store in (self._levels.disk, self._levels.memory, self._levels.images):
                if store is not None:
                    store.grow(end)
            return known[origin.fingerprint]["base"]

    def statistics(self) -> dict[str, LevelStatistics]:
        """Returns what this process has read from each level so far.

        The levels are called `images`, `memory`, `disk` and `origin`.
        """
        return self._statistics.levels()

    def usage(self) -> dict[str, tuple[int, int]]:
        """Returns the number of records and bytes in each active level.

        The levels are shared, so the answer is the same in every process on the node.
        """
        stores = {
            "images": self._levels.images,
            "memory": self._levels.memory,
            "disk": self._levels.disk,
        }
        return {name: store.usage() for name, store in stores.items() if store is not None}

    def _report_now_and_then(self) -> None:
        if time.monotonic() - self._reported_s > REPORT_S:
            self._report()

    def _report(self) -> None:
        """Writes the statistics to a file for `jaxcross data info`."""
        self._reported_s = time.monotonic()
        with suppress(OSError):  # the disk may be full
            self._report_path.parent.mkdir(exist_ok=True)
            write_json(
                self._report_path, {"pid": os.getpid(), "levels": as_json(self.statistics())}
            )

    def close(self) -> None:
        """Stops reading ahead and closes the levels in this process.

        The last process to close the cache also frees its memory. Records on disk are kept.
        """
        if not self._feeds.close():
            return
        atexit.unregister(self.close)
        self._report()
        with self._mutex:
            for store in (self._levels.disk, self._levels.memory, self._levels.images):
                if store is not None:
                    store.close()
            self._levels.claims.close()
            if self._users.leave():
                shutil.rmtree(self._memory, ignore_errors=True)
        self._mutex.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _memory_folder(folder: Path, wanted: str | Path | None) -> Path:
    parent = Path(wanted).expanduser().resolve() if wanted is not None else SHARED_MEMORY
    if not parent.is_dir():
        if wanted is not None:
            raise FileNotFoundError(
                f"`memory_folder` `{parent}` does not exist. Name an existing folder, or leave "
                "`memory_folder` out."
            )
        parent = Path(tempfile.gettempdir())
    return (
        parent
        / f"jaxcross-cache-{os.getuid()}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    )


def _claim_folder(folder: Path, memory: Path) -> None:
    """Marks the folder as a cache. Raises ValueError if it contains anything else.

    This makes sure that we never write to a folder that isn't ours.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(
            f"The cache folder `{folder}` cannot be created: {error}. Choose a different folder."
        ) from error
    found = read_json(folder / MARKER)
    if found and found.get("format") != FORMAT:
        raise ValueError(
            f"`{folder}` is a cache of another version of jaxcross. Remove it, or choose a "
            "different folder."
        )
    if not found and any(
        path.name != MARKER and not path.name.startswith(".") for path in folder.iterdir()
    ):
        raise ValueError(
            f"`{folder}` holds other files rather than a cache, so nothing was written to it. "
            "Choose an empty folder."
        )
    if found.get("memory") != str(memory):
        write_json(folder / MARKER, {"format": FORMAT, "memory": str(memory)})


def _remove_abandoned(own: Path) -> None:
    """Frees memory left behind by this user's other caches whose processes were all killed."""
    for other in own.parent.glob(f"jaxcross-cache-{os.getuid()}-*"):
        folder = Path(str(read_json(other / MARKER).get("cache", "")))
        if other == own or not folder.is_absolute():
            continue
        if not folder.is_dir():
            # The cache that this memory belongs to isn't there. Either somebody has deleted its
            # folder, or the folder is on the disk of a container that shares this memory with us.
            # In the latter case the cache may well be in use, so only free the memory if its levels
            # have no users.
            if not any(has_users(users) for users in other.glob("*/users")):
                shutil.rmtree(other, ignore_errors=True)
            continue
        with suppress(OSError):
            mutex = FileLock(folder / "open.lock")
            with mutex:
                if not has_users(folder / "users"):
                    shutil.rmtree(other, ignore_errors=True)
            mutex.close()


def _is_entry(found: Any) -> bool:
    return isinstance(found, dict) and all(
        is_whole(found.get(name)) and found[name] >= 0 for name in ("base", "records")
    )


def _machine() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, or returns `{}` if the file is missing or corrupt."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object atomically."""
    write_whole(path, json.dumps(value, indent=1).encode(), shared=True)
