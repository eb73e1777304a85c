"""One split of a data set, read through the cache's levels: images, memory, disk, origin."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jaxcross.data.cache.feed import Feed, Feeds, Passes
from jaxcross.data.cache.locks import Claims
from jaxcross.data.cache.origin import Origin
from jaxcross.data.cache.page_store import PageStore
from jaxcross.data.cache.statistics import Statistics
from jaxcross.data.cache.streams import OwnStream, Streams

IMAGE = struct.Struct("<IIq")  # height, width and label, before the pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The levels of a cache, and the state they share.

    Attributes:
        images: Decoded images in memory. Like the other levels, None if turned off.
        memory: Encoded records in memory.
        disk: Encoded records on the node's disk.
        claims: Claims on records being fetched.
        streams: All streams on the node.
        statistics: What this process has read from each level.
    """

    images: PageStore | None
    memory: PageStore | None
    disk: PageStore | None
    claims: Claims
    streams: Streams
    statistics: Statistics


@final
class CachedSplit:
    """The records of a split, by number, read through the cache. Thread-safe.

    Args:
        levels: The cache's levels.
        origin: Where to read the records from on a miss.
        parse: Parses a record's bytes into an example.
        base: Number of the split's first record among all records of the cache.
        salt: Seed of the split's checksums, different for each split; see `PageStore.put`.
        ahead_records: Maximum number of records that a stream buffers.
        feeds: Registry of feeds, which lets the cache close them.
        on_group: Called each time a group of records has been fetched.
    """

    def __init__(
        self,
        levels: Levels,
        origin: Origin,
        *,
        parse: Callable[[bytes], Any],
        base: int,
        salt: int,
        ahead_records: int,
        feeds: Feeds,
        on_group: Callable[[], None],
    ) -> None:
        self.statistics = levels.statistics
        self._levels = levels
        self._origin = origin
        self._parse = parse
        self._base = base
        self._salt = salt
        self._ahead_records = ahead_records
        self._feeds = feeds
        self._on_group = on_group

    def __len__(self) -> int:
        return len(self._origin)

    def __getitem__(self, record: int) -> Any:
        """Returns an example, read from the fastest level that has its record."""
        return self._parse(self.read(record)[0])

    def feed(self, record_at: Callable[[int], int], *, length: int, start: int, stop: int) -> Feed:
        """Starts reading ahead for a stream.

        Args:
            record_at: Maps a position to a record number.
            length: Number of positions per pass.
            start: The first position.
            stop: The position after the last one.

        Raises:
            RuntimeError: The cache was closed.
        """
        passes = Passes(record_at, length)
        return self._feeds.add(
            lambda: Feed(
                self,
                passes,
                length=length,
                start=start,
                stop=stop,
                ahead_records=self._ahead_records,
            )
        )

    def announce(self, passes: Passes, *, length: int, start: int, stop: int) -> OwnStream:
        """Announces a stream and when it will need each record, so that the levels can plan ahead.

        Other processes on the node see this too.
        """
        records = len(self)
        record_at = passes.record_at
        return self._levels.streams.add(
            base=self._base,
            records=records,
            order=passes,
            record_at=record_at,
            length=length,
            start=start,
            stop=stop,
        )

    def has_image(self, record: int) -> bool:
        """Whether the record's decoded image is in memory."""
        return self._levels.images is not None and self._base + record in self._levels.images

    def image(
        self, record: int, raw: bytes | None, decode: Callable[[Any], tuple[np.ndarray, int]]
    ) -> tuple[np.ndarray, int]:
        """Returns a record's image, uint8 `[height, width, 3]`, and its label.

        The image is read-only if it was already decoded in memory.

        Args:
            record: The record's number.
            raw: The record's bytes, if they've already been read.
            decode: Decodes an example into an image and a label.
        """
        images = self._levels.images
        number = self._base + record
        if raw is None and images is not None:
            began = time.perf_counter()
            blob = images.get(number, self._salt)
            if blob is not None:
                height, width, label = IMAGE.unpack_from(blob)
                pixels = np.frombuffer(blob, np.uint8, offset=IMAGE.size).reshape(height, width, 3)
                self._count("images", len(blob), began)
                return pixels, label
        image, label = decode(self._parse(self.read(record)[0] if raw is None else raw))
        if images is not None:
            head = IMAGE.pack(image.shape[0], image.shape[1], label)
            images.put(number, head + image.tobytes(), self._salt)
        return image, label

    def read(self, record: int) -> tuple[bytes, str]:
        """Reads a record. Returns its bytes and the level it was found in.

        Waits for memory, disk or the data set's storage, wherever the record is.
        """
        found = self.find(record)
        return found or next((raw, level) for _, raw, level in self._from_origin([record]))

    def find(self, record: int) -> tuple[bytes, str] | None:
        """Looks up a record in memory and on disk. Returns its bytes and the level, or None.

        A record found on disk is offered to the memory level.
        """
        number = self._base + record
        for name, level in (("memory", self._levels.memory), ("disk", self._levels.disk)):
            began = time.perf_counter()
            raw = level.get(number, self._salt) if level is not None else None
            if raw is not None:
                self._count(name, len(raw), began)
                if name == "disk" and self._levels.memory is not None:
                    self._levels.memory.put_copy(number, raw, self._salt)
                return raw, name
        return None

    def fetch(
        self, records: Sequence[int], stream: OwnStream, stop: threading.Event
    ) -> Iterator[tuple[int, bytes, str]]:
        """Reads records that weren't found in any level, and offers them to the levels as it goes.

        Several streams on the node may need the same record at the same time, but it should only be
        read from the origin once. So a stream first claims every record that's still unclaimed,
        reads those, and releases its claims. Only then does it wait for the records claimed by
        others to show up in a level. Waiting while still holding its own claims could deadlock two
        streams.

        Args:
            records: Numbers of the records. `stream` must have taken all of them.
            stream: The stream that needs the records.
            stop: Once set, we stop waiting for other streams.

        Yields:
            Each record's number, its bytes, and where it was found. That can be a level of the
            cache after all, if another process has added the record since we looked.
        """
        numbers = [self._base + record for record in records]
        claims = self._levels.claims
        mine = claims.take(numbers)
        try:
            late = [
                record
                for record, number in zip(records, numbers, strict=True)
                if number not in mine
            ]
            # Other streams are already fetching some of the records we need, and will add them to
            # the cache. Mark these as needed right now; otherwise they might be evicted again
            # before we get to read them.
            stream.lacks(late)
            absent = []
            for record in records:
                if self._base + record not in mine:
                    continue
                found = self.find(record)
                if found:  # another stream added it between our lookup and our claim
                    yield record, *found
                else:
                    absent.append(record)
            yield from self._from_origin(absent)
        finally:
            claims.release(mine)
        for record in late:
            claims.wait(self._base + record, stop)
            found = self.read(record)
            stream.has(record)
            yield record, *found
        self._on_group()

    def _from_origin(self, records: Sequence[int]) -> Iterator[tuple[int, bytes, str]]:
        if not records:
            return
        began = time.perf_counter()
        fetched = self._origin.read(records)
        seconds = time.perf_counter() - began
        self.statistics.add("origin", records=len(records), nbytes=fetched.nbytes, seconds=seconds)
        for record, raw in zip(records, fetched.records, strict=True):
            for level in (self._levels.disk, self._levels.memory):
                if level is not None:
                    level.put(self._base + record, raw, self._salt)
            yield record, raw, "origin"

    def _count(self, level: str, nbytes: int, began: float) -> None:
        self.statistics.add(level, records=1, nbytes=nbytes, seconds=time.perf_counter() - began)
