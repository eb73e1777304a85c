"""Layout of one job's checkpoints on one rank's file system. Does not communicate.

    <job>/<step>-<token>/rank-0000/part.json     what the part is; written last, so that a part
                                            without it is none
                                   state/        its arrays, by orbax
    <job>/left-0000, paused-0000, whole-0000     marks of a rank: the job is over, and how; it
                                   rests; a checkpoint of it was once complete on all ranks

The token tells two attempts at the same step apart: no rank ever writes into a folder that another
attempt began.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import quote

from jaxcross._files import sync, write_whole
from jaxcross.checkpoint.part import MAX_BYTES, AbsentError, Part, UnusableError, parse, to_text

SET_FILE = "jobs.json"  # next to the jobs' folders
Mark = Literal["left", "paused", "whole"]
# What is not there. Any other error is the disk's trouble, and says nothing about a checkpoint.
ABSENT = (FileNotFoundError, NotADirectoryError)
_NAME = re.compile(r"\d{12}-[0-9a-f]{16}")
_CHUNK_BYTES = 2**22


def folder_name(job: str) -> str:
    """A job's name as the name of a folder: no slash, no dot in front, not too long; another for
    each job, and never that of the set's own file.
    """
    name = quote(job, safe=" =,+")
    name = f"%{ord(name[0]):02X}{name[1:]}" if name.startswith((".", SET_FILE)) else name
    if len(name) <= 200:
        return name
    return f"{name[:160]}~{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def checkpoint_name(step: int, token: str) -> str:
    """Returns the name of a checkpoint's folder; the newest of a job comes last in alphabetical
    order.
    """
    return f"{step:012d}-{token}"


def step_of(name: str) -> int:
    """The step that a checkpoint's name speaks of."""
    return int(name.partition("-")[0])


class Folders:
    """One rank's view of one job's checkpoints.

    Args:
        path: The job's folder; need not exist.
        rank: Whose parts this rank writes and reads.
        ranks: Of how many, in this run.
    """

    def __init__(self, path: Path, *, rank: int, ranks: int) -> None:
        self.path = path
        self._rank = rank
        self._ranks = ranks

    def names(self) -> list[str]:
        """Checkpoints of which anything is there, oldest first.

        Raises:
            OSError: The folder is there and cannot be read.
        """
        try:
            with _named(self.path):
                return sorted(
                    e.name for e in os.scandir(self.path) if _NAME.fullmatch(e.name) and e.is_dir()
                )
        except ABSENT:
            return []

    def holders(self) -> dict[str, list[int]]:
        """Returns for each checkpoint the ranks of this run that have completed a part here."""
        return {
            name: [
                n
                for n in range(self._ranks)
                if (self.path / name / f"rank-{n:04d}" / "part.json").is_file()
            ]
            for name in self.names()
        }

    def mark(self, what: Mark, text: str | None) -> None:
        """Leaves this rank's mark, or takes it away (None); rank 0 takes away those of ranks that
        are no more. Waits for the disk.
        """
        file = self.path / f"{what}-{self._rank:04d}"
        if self._rank == 0:
            for other in self._of_lost_ranks(self.path, what):
                other.unlink(missing_ok=True)
        if text is None:
            file.unlink(missing_ok=True)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)

    def marked(self, what: Mark) -> str:
        """This rank's mark: its first characters, or nothing.

        Raises:
            OSError: It is there and cannot be read.
        """
        file = self.path / f"{what}-{self._rank:04d}"
        try:
            with _named(file), file.open("rb") as stream:
                return stream.read(40).decode(errors="replace")
        except (*ABSENT, IsADirectoryError):
            return ""

    def remove_marks(self) -> None:
        """Removes this rank's marks, and the folder if it is empty then. Waits for the disk."""
        for what in get_args(Mark):
            (self.path / f"{what}-{self._rank:04d}").unlink(missing_ok=True)
        with suppress(OSError):  # it was never made, or another rank's marks are in it
            self.path.rmdir()

    def part_path(self, name: str) -> Path:
        """The folder of this rank's part."""
        return self.path / name / f"rank-{self._rank:04d}"

    def arrays_path(self, name: str) -> Path:
        """The folder of the part's arrays."""
        return self.part_path(name) / "state"

    def read(self, name: str) -> Part:
        """Reads the description of this rank's part.

        Raises:
            UnusableError: It is incomplete or damaged; `AbsentError`, if it is not there.
            UnknownFormatError: It was written by another version.
            OSError: It is there and cannot be read.
        """
        file = self.part_path(name) / "part.json"
        try:
            with _named(file):
                about = file.lstat()
                if not stat.S_ISREG(about.st_mode):
                    raise UnusableError(f"`{file}` is not a file")
                if about.st_size > MAX_BYTES:
                    raise UnusableError(
                        f"`{file}` is {about.st_size} bytes long, more than any part"
                    )
                content = file.read_bytes()
        except ABSENT:
            raise AbsentError(f"`{file}` is missing: it was not written to its end") from None
        try:
            part = parse(content.decode())
        except (UnusableError, UnicodeDecodeError) as error:
            raise UnusableError(f"`{file}` {error}") from None
        if (part.rank, part.step) != (self._rank, step_of(name)):
            raise UnusableError(f"`{file}` speaks of rank {part.rank} and step {part.step}")
        return part

    def commit(self, name: str, part: Part) -> None:
        """Completes this rank's part, whose arrays have been written. Waits for the disk."""
        folder = self.part_path(name)
        for file in _files(self.arrays_path(name)):
            sync(file)
        write_whole(folder / "part.json", to_text(part))
        for path in (folder.parent, self.path):
            sync(path)

    def check_files(self, name: str, files: Mapping[str, tuple[int, str]]) -> None:
        """Makes sure that the part's files of arrays are those that were written, byte by byte.

        Raises:
            UnusableError: They are not.
            OSError: They are there and cannot be read.
        """
        folder = self.arrays_path(name)
        found = {str(file.relative_to(folder)): file for file in _files(folder)}
        for path in sorted({*files, *found}):
            file = found.get(path)
            if file is None:
                raise UnusableError(f"`{folder / path}` is missing")
            if path not in files:
                raise UnusableError(f"`{file}` is not a part of it")
            size = file.stat().st_size
            if size != files[path][0]:
                raise UnusableError(f"`{file}` has {size} bytes, not {files[path][0]}")
            if _digest(file) != files[path][1]:
                raise UnusableError(f"`{file}` has other bytes than were written")

    def describe_files(self, name: str) -> dict[str, tuple[int, str]]:
        """Size and digest of each of the part's files of arrays."""
        folder = self.arrays_path(name)
        return {
            str(file.relative_to(folder)): (file.stat().st_size, _digest(file))
            for file in _files(folder)
        }

    def delete(self, names: Iterable[str]) -> None:
        """Deletes this rank's parts; rank 0 also those of ranks that this run does not have.
        Others' remain, and what cannot be deleted.
        """
        for name in names:
            folder = self.path / name
            parts = [self.part_path(name)]
            if self._rank == 0:
                with suppress(OSError):
                    parts += self._of_lost_ranks(folder, "rank")
            for part in parts:
                try:
                    (part / "part.json").unlink(
                        missing_ok=True
                    )  # first: half a part must not look whole
                except OSError:
                    # no part: something else lies there; or the disk does not let go of it
                    continue
                shutil.rmtree(part, ignore_errors=True)
            try:
                folder.rmdir()
            except OSError:
                continue  # another rank's part is still there, or the folder is gone already

    def _of_lost_ranks(self, folder: Path, what: str) -> list[Path]:
        """Returns the entries `<what>-<rank>` of ranks that this run doesn't have.

        `Path.glob` would raise where another rank deletes the folder between its test and its
        listing.
        """
        try:
            found = [
                Path(entry.path)
                for entry in os.scandir(folder)
                if entry.name.startswith(f"{what}-")
            ]
        except ABSENT:
            return []
        return [path for path in found if _number(path) >= self._ranks]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the file's name to errors of the disk; Python leaves it out while a file is read."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _number(part: Path) -> int:
    digits = part.name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _files(folder: Path) -> Iterator[Path]:
    """All files, at any depth.

    Raises:
        UnusableError: Something is neither a file nor a folder: a link could lead anywhere.
    """
    if folder.is_symlink():
        return
    try:
        with _named(folder):
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except ABSENT:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)
        else:
            raise UnusableError(f"`{entry.path}` is neither a file nor a folder")


def _digest(file: Path) -> str:
    content = hashlib.sha256()
    with _named(file), file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            content.update(chunk)
    return content.hexdigest()
