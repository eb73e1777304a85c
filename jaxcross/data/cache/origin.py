"""Where a data set lives: a local folder, or a URL from which fsspec reads byte ranges.

Nothing here ever modifies or deletes any part of the data set.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from fsspec.asyn import AsyncFileSystem

from jaxcross._files import write_whole
from jaxcross.data.cache.array_record import BLOCK_BYTES, Footer, footer_start, read_records

CONNECTIONS = 32
"""Number of byte ranges to read concurrently.

With fsspec's default of 128, some requests starved: reading over an 8 Mbit/s link took 19 s instead
of 12 s, and 200 s on one occasion.
"""
TRIES = 7
# How long to wait before retrying a failed request. The wait doubles with each retry, which is what
# rate-limited stores ask their clients to do; altogether it adds up to 31.5 s.
WAIT_S = 0.5
FOOTER_HEAD = struct.Struct("<QQQI")  # size of the shard, offset and size of the footer, checksum


class Fetched(NamedTuple):
    """The requested records, in order, and how many bytes the origin sent for them."""

    records: list[bytes]
    nbytes: int


class Shard(NamedTuple):
    """One file of a split.

    Attributes:
        path: The file.
        skip: Number of records at its start that don't belong to the split.
        take: Number of records after that which do.
    """

    path: str
    skip: int
    take: int


class Origin(ABC):
    """The records of a split, by number. Thread-safe."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A string identifying the records. It changes whenever the records may have changed."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, records: Sequence[int]) -> Fetched:
        """Reads records. Waits for the storage.

        Raises:
            OSError: The storage can't be read.
            ValueError: The storage sent bytes that aren't a record.
        """


@final
class LocalOrigin(Origin):
    """A folder on this machine's file system, possibly a network mount.

    Args:
        shards: The files of the split.
        source: The records in these files, read by ArrayRecord.
        identity: Distinguishes between data sets with the same files.
    """

    def __init__(self, shards: Sequence[Shard], source: Any, identity: str) -> None:
        self._source = source
        files = [(shard, Path(shard.path).stat()) for shard in shards]
        found = [(*shard, stat.st_size, stat.st_mtime_ns) for shard, stat in files]
        self._fingerprint = _digest(identity, found)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, records: Sequence[int]) -> Fetched:
        found = list(self._source.__getitems__(list(records)))
        return Fetched(found, sum(map(len, found)))


@final
class FooterFiles:
    """Footers of remote shards, saved in a folder on the node. Corrupt files are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, shard: str) -> Footer | None:
        """Returns the footer saved for this shard, or None."""
        with suppress(OSError, struct.error):
            content = self._path(shard).read_bytes()
            nbytes, start, index_bytes, crc = FOOTER_HEAD.unpack_from(content)
            found = content[FOOTER_HEAD.size :]
            if (
                zlib.crc32(found, zlib.crc32(FOOTER_HEAD.pack(nbytes, start, index_bytes, 0)))
                == crc
            ):
                return Footer(nbytes, start, found[:index_bytes], found[index_bytes:])
        return None

    def save(self, shard: str, footer: Footer) -> None:
        """Saves a footer, best effort. If the disk is full, it's fetched again next time."""
        content = footer.index + footer.postscript
        head = (footer.nbytes, footer.start, len(footer.index))
        crc = zlib.crc32(content, zlib.crc32(FOOTER_HEAD.pack(*head, 0)))
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(shard), FOOTER_HEAD.pack(*head, crc) + content, shared=True)

    def _path(self, shard: str) -> Path:
        return self._folder / f"{hashlib.sha256(shard.encode()).hexdigest()[:32]}.footer"


@final
class RemoteOrigin(Origin):
    """A split's shards on one of fsspec's file systems. Keeps their footers on the node.

    Args:
        fs: The file system.
        shards: The files of the split.
        identity: Distinguishes between data sets with the same file names.
        footers: Where to save the footers.
        stop: Once set, we give up instead of waiting to retry.
    """

    def __init__(
        self,
        fs: Any,
        shards: Sequence[Shard],
        identity: str,
        footers: FooterFiles,
        stop: threading.Event,
    ) -> None:
        self._fs = fs
        self._shards = shards
        self._footers = footers
        self._stop = stop
        self._fingerprint = _digest(identity, [tuple(shard) for shard in shards])
        # The number of each shard's first record in the split.
        self._firsts = np.cumsum([0] + [shard.take for shard in shards])
        self._known: dict[int, Footer] = {}

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def read(self, records: Sequence[int]) -> Fetched:
        wanted: dict[int, list[int]] = defaultdict(list)  # maps shards to indices into `records`
        for place, record in enumerate(records):
            wanted[self._place(record)[0]].append(place)
        nbytes = self._load_footers(list(wanted))
        ranges: dict[tuple[int, int], int] = {}  # maps (shard, start of range) to end of range
        for shard, places in wanted.items():
            for place in places:
                start, end = self._known[shard].range_of(self._place(records[place])[1])
                ranges[shard, start] = end
        contents = self._ranges([(shard, start, end) for (shard, start), end in ranges.items()])
        fetched: dict[int, dict[int, bytes]] = defaultdict(dict)
        for (shard, start), content in zip(ranges, contents, strict=True):
            fetched[shard][start] = content
        found = [b""] * len(records)
        for shard, places in wanted.items():
            indices = [self._place(records[place])[1] for place in places]
            try:
                blobs = read_records(self._known[shard], fetched[shard], indices)
            except ValueError as error:
                raise ValueError(
                    f"Records {indices} of the shard `{self._shards[shard].path}` cannot be "
                    f"decoded: {error}. The file is damaged, or it changed since the cache read "
                    "its index. Prepare it again under a different name, or use an empty cache "
                    "folder."
                ) from error
            for place, blob in zip(places, blobs, strict=True):
                found[place] = blob
        return Fetched(found, nbytes + sum(map(len, contents)))

    def read_bytes(self, record: int) -> int:
        """Returns how many bytes the origin sends for a record. May need to read a footer."""
        shard, index = self._place(record)
        self._load_footers([shard])
        start, end = self._known[shard].range_of(index)
        return end - start

    def _place(self, record: int) -> tuple[int, int]:
        """Returns a record's shard and its number within the shard's file."""
        shard = int(np.searchsorted(self._firsts, record, "right")) - 1
        return shard, record - int(self._firsts[shard]) + self._shards[shard].skip

    def _load_footers(self, shards: list[int]) -> int:
        """Loads the shards' footers. Returns the number of bytes read from the origin."""
        for shard in shards:
            if shard in self._known:
                continue
            footer = self._footers.load(self._shards[shard].path)
            if footer:
                self._known[shard] = footer
        new = [shard for shard in shards if shard not in self._known]
        if not new:
            return 0
        paths = [self._shards[shard].path for shard in new]
        sizes = self._retried(lambda: self._fs.sizes(paths), paths)
        missing = [path for path, size in zip(paths, sizes, strict=True) if not size]
        if missing:
            raise FileNotFoundError(
                f"The shard `{missing[0]}` is missing or empty, or its server does not report "
                "its size. Copy the data set again, or use a different server."
            )
        blocks = self._ranges(
            [(s, max(0, size - BLOCK_BYTES), size) for s, size in zip(new, sizes, strict=True)]
        )
        starts = [
            self._checked(s, footer_start, b, size)
            for s, b, size in zip(new, blocks, sizes, strict=True)
        ]
        ends = [size - BLOCK_BYTES for size in sizes]
        indices = self._ranges(list(zip(new, starts, ends, strict=True)))
        for shard, start, size, index, block in zip(
            new, starts, sizes, indices, blocks, strict=True
        ):
            footer = Footer(size, start, index.rstrip(b"\0"), block.rstrip(b"\0"))
            found = self._checked(shard, lambda footer=footer: footer.n_records)
            needed = self._shards[shard].skip + self._shards[shard].take
            if found < needed:
                raise ValueError(
                    f"The shard `{self._shards[shard].path}` holds {found} records; "
                    f"`dataset_info.json` promises {needed}. Copy the data set again."
                )
            self._footers.save(self._shards[shard].path, footer)
            self._known[shard] = footer
        return sum(map(len, blocks)) + sum(map(len, indices))

    def _checked(self, shard: int, read: Callable[..., int], *arguments: Any) -> int:
        try:
            return read(*arguments)
        except ValueError as error:
            raise ValueError(
                f"The shard `{self._shards[shard].path}` cannot be read by byte ranges: {error}. "
                "It must be an ArrayRecord file, as `tfds` and `jaxcross data synth` write it. If "
                "it is one, copy it again."
            ) from error

    def _ranges(self, wanted: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Reads several byte ranges concurrently, each given as (shard, start, end)."""
        paths = [self._shards[shard].path for shard, _, _ in wanted]
        starts = [start for _, start, _ in wanted]
        ends = [end for _, _, end in wanted]
        if not wanted:
            return []
        # Limit the number of concurrent reads. Only asynchronous file systems have an option for
        # this. Others, such as fsspec's caches, read the ranges sequentially anyway.
        several = isinstance(self._fs, AsyncFileSystem)
        options = {"batch_size": self._fs.batch_size or CONNECTIONS} if several else {}
        contents = self._retried(
            lambda: self._fs.cat_ranges(paths, starts, ends, on_error="raise", **options), paths
        )
        for path, start, end, content in zip(paths, starts, ends, contents, strict=True):
            if len(content) != end - start:
                raise ValueError(
                    f"`{path}`: the storage sent {len(content)} bytes where {end - start} were "
                    f"asked for, from byte {start}. A server must support range requests (Python's "
                    "`http.server` does not)."
                )
        return contents

    def _retried(self, call: Callable[[], Any], paths: Sequence[str]) -> Any:
        for attempt in range(1, TRIES + 1):
            try:
                return call()
            except Exception as error:  # fsspec's file systems all raise different errors
                # We even retry on `FileNotFoundError`, because over HTTP, that's what fsspec raises
                # when the server is down.
                again = attempt < TRIES and not isinstance(error, PermissionError)
                if again and not self._stop.wait(WAIT_S * 2 ** (attempt - 1)):
                    continue
                kind = OSError
                if isinstance(error, FileNotFoundError | PermissionError):
                    kind = type(error)
                raise kind(
                    f"Reading {_named(paths)} failed{f' {attempt} times' if attempt > 1 else ''}: "
                    f"{type(error).__name__}: {error}. Start "
                    "again once the storage answers: training resumes from its data position."
                ) from error
        return None


def _named(paths: Sequence[str]) -> str:
    others = len(set(paths)) - 1
    return f"`{paths[0]}`" + (f" and {others} other files" if others else "")


def _digest(identity: str, files: Sequence[tuple[Any, ...]]) -> str:
    return hashlib.sha256(repr((identity, list(files))).encode()).hexdigest()[:32]
