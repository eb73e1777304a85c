"""Finds and decodes individual records of an ArrayRecord shard without the rest of the file.

ArrayRecord packs many records into one file, called a shard. For a data set at a URL, we'd like to
download only the bytes of the records we need instead of whole shards. That raises two questions.

**Where is a record?** ArrayRecord's own reader doesn't expose the byte offsets of its records.
They're in an index at the end of the shard, the footer, which we download and parse ourselves. It's
stored in Riegeli's format (https://github.com/google/riegeli/blob/master/doc).

**How do we decode it?** We'd rather leave decoding and verification to ArrayRecord's reader, but it
can only open a path. So we create a sparse in-memory file, write the footer and the fetched bytes
to it at their original offsets, and point the reader at that. Everything it looks at is where it
expects it to be, and the gaps don't use any memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from jaxcross.errors import require_extra

BLOCK_BYTES = 1 << 16
BLOCK_HEADER_BYTES = 24
# A chunk header is five 8-byte integers: a hash of the header, the data's size, the data's hash,
# the chunk type packed together with the number of records, and the decoded size.
CHUNK_HEADER = struct.Struct("<QQQQQ")
SIMPLE = ord("r")
PLAIN = 0
ZSTD = ord("z")


@dataclass(frozen=True)
class Footer:
    """The index at the end of a shard.

    Attributes:
        nbytes: Size of the shard.
        start: Offset where the records end and the footer starts.
        index: The shard's bytes from `start` on, without the trailing zeros.
        postscript: The shard's last 64 KiB, without the trailing zeros.
    """

    nbytes: int
    start: int
    index: bytes
    postscript: bytes

    @cached_property
    def chunks(self) -> tuple[np.ndarray, np.ndarray]:
        """The offset of each chunk and the number of its first record.

        Both arrays have one extra element at the end: the end of the last chunk and the shard's
        total number of records.

        Raises:
            ValueError: The footer is damaged, or compressed with something other than zstd.
        """
        records = _records(self.index, self.start)
        fields = [_fields(record) for record in records[1:]]
        offsets = np.array([field.get(1, 0) for field in fields] + [self.start], np.int64)
        counts = np.array([0] + [field.get(3, 0) for field in fields], np.int64)
        return offsets, np.cumsum(counts)

    @property
    def n_records(self) -> int:
        """Number of records in the shard."""
        return int(self.chunks[1][-1])

    def range_of(self, record: int) -> tuple[int, int]:
        """Returns the byte range (start, end) of the chunk containing a record."""
        offsets, firsts = self.chunks
        chunk = int(np.searchsorted(firsts, record, "right")) - 1
        return int(offsets[chunk]), int(offsets[chunk + 1])


def footer_start(last_block: bytes, nbytes: int) -> int:
    """Reads the footer's offset from the last 64 KiB of a shard of size `nbytes`.

    Raises:
        ValueError: The shard isn't an ArrayRecord file.
    """
    if len(last_block) != BLOCK_BYTES:
        raise ValueError("it is shorter than 64 KiB")
    start = _fields(_records(last_block, nbytes - BLOCK_BYTES)[0]).get(1, -1)
    if not 0 <= start < nbytes - BLOCK_BYTES:
        raise ValueError("its postscript names no footer")
    return start


def read_records(
    footer: Footer, ranges: Mapping[int, bytes], records: Sequence[int]
) -> list[bytes]:
    """Decodes records of a shard, given the bytes of their chunks.

    Args:
        footer: The shard's footer.
        ranges: Maps the offset of each chunk containing one of the records to the chunk's bytes.
        records: Record numbers within the shard.

    Raises:
        ValueError: The bytes are corrupt, i.e. they fail ArrayRecord's hash check.
    """
    fd = os.memfd_create("jaxcross-shard", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, footer.nbytes)
        ends = {footer.start: footer.index, footer.nbytes - BLOCK_BYTES: footer.postscript}
        for offset, content in {**ranges, **ends}.items():
            os.pwrite(fd, content, offset)
        try:
            options = "readahead_buffer_size:0,max_parallelism:0,index_storage_option:in_memory"
            reader = ArrayRecordReader(
                f"/proc/self/fd/{fd}", options, file_reader_buffer_size=32768
            )
            found = reader.read(list(records))
            reader.close()
        except (RuntimeError, IndexError) as error:
            raise ValueError(str(error)) from error
        return found
    finally:
        os.close(fd)


def _records(content: bytes, offset: int) -> list[bytes]:
    """Decodes the records of the first chunk in `content`, found at `offset` in the file."""
    try:
        data = _without_block_headers(content, offset)
        *_, nbytes, _, kind, _ = CHUNK_HEADER.unpack_from(data)
        return _decoded(data[CHUNK_HEADER.size :][:nbytes], kind)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the index at its end is damaged ({error})") from error


def _decoded(data: bytes, kind: int) -> list[bytes]:
    if kind & 0xFF != SIMPLE:
        raise ValueError(f"the index at its end is a chunk of type {kind & 0xFF}, not a simple one")
    nbytes, place = _varint(data, 1)
    sizes = _decompressed(data[0], data[place : place + nbytes])
    values = _decompressed(data[0], data[place + nbytes :])
    records = []
    place = 0
    start = 0
    for _ in range(kind >> 8):
        size, place = _varint(sizes, place)
        records.append(values[start : start + size])
        start += size
    return records


def _without_block_headers(content: bytes, offset: int) -> bytes:
    parts = []
    place = 0
    while place < len(content):
        within = (offset + place) % BLOCK_BYTES
        if within < BLOCK_HEADER_BYTES:
            place += BLOCK_HEADER_BYTES - within
            within = BLOCK_HEADER_BYTES
        parts.append(content[place : place + BLOCK_BYTES - within])
        place += BLOCK_BYTES - within
    return b"".join(parts)


def _decompressed(compression: int, data: bytes) -> bytes:
    if compression == PLAIN:
        return data
    nbytes, place = _varint(data, 0)
    if compression != ZSTD:
        raise ValueError(
            f"the index at its end is compressed as `{chr(compression)}`; only zstd can be read "
            "remotely"
        )
    require_extra("remote", "a data set at a URL", "zstandard")
    import zstandard

    try:
        return zstandard.ZstdDecompressor().decompress(data[place:], max_output_size=nbytes)
    except zstandard.ZstdError as error:
        raise ValueError(f"the index at its end is damaged ({error})") from error


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Decodes a varint (7 bits per byte). Returns its value and the position after it."""
    value = 0
    shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        shift += 7
        if byte < 0x80:
            return value, place


def _fields(message: bytes) -> dict[int, int]:
    """Returns the integer fields of a protocol buffer message, by field number.

    For length-delimited fields, such as strings, returns the length instead.
    """
    found = {}
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        found[tag >> 3], place = _varint(message, place)
        if tag & 7 == 2:
            place += found[tag >> 3]
        elif tag & 7:
            raise ValueError(f"the index at its end has a field of type {tag & 7}")
    return found
