"""Small files that are either whole or absent: JSON, and the footers of remote shards."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from jaxcross._files import write_whole
from jaxcross.data.cache.array_record import Footer

HEAD = struct.Struct("<QQQI")  # size of the shard, offset and size of the footer, checksum


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Returns an empty one if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object, completely or not at all."""
    write_whole(path, json.dumps(value, indent=1).encode(), shared=True)


@final
class FooterFiles:
    """Footers in a folder of the node, by their shard's path. Treats damaged files as missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, shard: str) -> Footer | None:
        """Returns a footer that was saved, or None."""
        with suppress(OSError, struct.error):
            content = self._path(shard).read_bytes()
            nbytes, start, index_bytes, crc = HEAD.unpack_from(content)
            found = content[HEAD.size :]
            if zlib.crc32(found, zlib.crc32(HEAD.pack(nbytes, start, index_bytes, 0))) == crc:
                return Footer(nbytes, start, found[:index_bytes], found[index_bytes:])
        return None

    def save(self, shard: str, footer: Footer) -> None:
        """Saves a footer. If the disk is full, it isn't saved, and will be fetched again."""
        content = footer.index + footer.postscript
        head = (footer.nbytes, footer.start, len(footer.index))
        crc = zlib.crc32(content, zlib.crc32(HEAD.pack(*head, 0)))
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(shard), HEAD.pack(*head, crc) + content, shared=True)

    def _path(self, shard: str) -> Path:
        return self._folder / f"{hashlib.sha256(shard.encode()).hexdigest()[:32]}.footer"
