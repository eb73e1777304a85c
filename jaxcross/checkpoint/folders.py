"""Layout of one job's checkpoints on one rank's file system. Does not communicate.

Each rank writes its part of a checkpoint into a folder of its own, e.g. rank 0 into
`<job>/<step>-<token>/rank-0000`. The arrays go into the subfolder `state`, in orbax's format, and
`part.json` describes them. Since `part.json` is written last, a folder without it belongs to an
incomplete part, which we ignore.

If a run is killed in the middle of writing a checkpoint, its restart will write a checkpoint for
the same step again. The token in the folder's name, which is different for each attempt, keeps
their files apart.

Besides checkpoints, a job's folder may contain up to three small files per rank, called marks,
which tell a restart what has happened to the job:

- `left-0000` says how the job ended;
- `paused-0000` says that the job is paused;
- `whole-0000` says that the job has had a checkpoint that was complete on all ranks.
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

SET_FILE = "jobs.json"  # beside the jobs' folders
Mark = Literal["left", "paused", "whole"]
# Errors which mean that a file doesn't exist. Any other error just means that the disk can't be
# read right now, and the checkpoint may be intact.
ABSENT = (FileNotFoundError, NotADirectoryError)
_NAME = re.compile(r"\d{12}-[0-9a-f]{16}")
_CHUNK_BYTES = 2**22


def folder_name(job: str) -> str:
    """Returns a folder name for a job. Different jobs get different folder names.

    Characters that aren't allowed in file names, e.g. slashes, are escaped. The result never starts
    with a dot, has a limited length, and doesn't clash with the file that lists the jobs.
    """
    name = quote(job, safe=" =,+")
    name = f"%{ord(name[0]):02X}{name[1:]}" if name.startswith((".", SET_FILE)) else name
    if len(name) <= 200:
        return name
    return f"{name[:160]}~{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def checkpoint_name(step: int, token: str) -> str:
    """Returns the name of a checkpoint's folder. Names sort by age, oldest first."""
    return f"{step:012d}-{token}"


def step_of(name: str) -> int:
    """Extracts a checkpoint's step from its folder's name."""
    return int(name.partition("-")[0])


class Folders:
    """One rank's view of one job's checkpoints.

    Args:
        path: The job's folder, which doesn't have to exist.
        rank: The rank whose parts are read and written.
        ranks: The number of ranks in this run.
    """

    def __init__(self, path: Path, *, rank: int, ranks: int) -> None:
        self.path = path
        self._rank = rank
        self._ranks = ranks

    def names(self) -> list[str]:
        """Returns the names of all checkpoints on disk, even incomplete ones, oldest first.

        Raises:
            OSError: The folder exists but can't be read.
        """
        try:
            with _named(self.path):
                return sorted(
                    e.name for e in os.scandir(self.path) if _NAME.fullmatch(e.name) and e.is_dir()
                )
        except ABSENT:
            return []

    def holders(self) -> dict[str, list[int]]:
        """Returns, for each checkpoint, which ranks of this run have complete parts here."""
        return {
            name: [
                n
                for n in range(self._ranks)
                if (self.path / name / f"rank-{n:04d}" / "part.json").is_file()
            ]
            for name in self.names()
        }

    def mark(self, what: Mark, text: str | None) -> None:
        """Writes this rank's mark, or removes it if `text` is None. Waits for the disk.

        Rank 0 also removes marks left behind by extra ranks, in case an earlier run had more ranks
        than this one.
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
        """Returns the beginning of this rank's mark, or an empty string if there isn't one.

        Raises:
            OSError: The mark exists but can't be read.
        """
        file = self.path / f"{what}-{self._rank:04d}"
        try:
            with _named(file), file.open("rb") as stream:
                return stream.read(40).decode(errors="replace")
        except (*ABSENT, IsADirectoryError):
            return ""

    def remove_marks(self) -> None:
        """Removes this rank's marks, then the folder if it's empty. Waits for the disk."""
        for what in get_args(Mark):
            (self.path / f"{what}-{self._rank:04d}").unlink(missing_ok=True)
        with suppress(OSError):  # it doesn't exist, or it contains another rank's marks
            self.path.rmdir()

    def part_path(self, name: str) -> Path:
        """Returns the folder of this rank's part."""
        return self.path / name / f"rank-{self._rank:04d}"

    def arrays_path(self, name: str) -> Path:
        """Returns the folder of this part's arrays."""
        return self.part_path(name) / "state"

    def read(self, name: str) -> Part:
        """Reads the description of this rank's part.

        Raises:
            UnusableError: The part is incomplete or damaged; `AbsentError` if it's missing.
            UnknownFormatError: The part was written by a different version.
            OSError: The part exists but can't be read.
        """
        file = self.part_path(name) / "part.json"
        try:
            with _named(file):
                about = file.lstat()
                if not stat.S_ISREG(about.st_mode):
                    raise UnusableError(f"`{file}` is not a file")
                if about.st_size > MAX_BYTES:
                    raise UnusableError(
                        f"`{file}` has {about.st_size} bytes, but no part has more than {MAX_BYTES}"
                    )
                content = file.read_bytes()
        except ABSENT:
            raise AbsentError(f"`{file}` is missing: it was not written completely") from None
        try:
            part = parse(content.decode())
        except (UnusableError, UnicodeDecodeError) as error:
            raise UnusableError(f"`{file}` {error}") from None
        if (part.rank, part.step) != (self._rank, step_of(name)):
            raise UnusableError(
                f"`{file}` is about rank {part.rank} and step {part.step}, not about rank "
                f"{self._rank} and step {step_of(name)}"
            )
        return part

    def commit(self, name: str, part: Part) -> None:
        """Completes this rank's part, whose arrays must have been written. Waits for the disk."""
        folder = self.part_path(name)
        for file in _files(self.arrays_path(name)):
            sync(file)
        write_whole(folder / "part.json", to_text(part))
        for path in (folder.parent, self.path):
            sync(path)

    def check_files(self, name: str, files: Mapping[str, tuple[int, str]]) -> None:
        """Checks that the part's array files are unchanged since they were written, byte for byte.

        Raises:
            UnusableError: A file is missing, was added, or has changed.
            OSError: A file exists but can't be read.
        """
        folder = self.arrays_path(name)
        found = {str(file.relative_to(folder)): file for file in _files(folder)}
        for path in sorted({*files, *found}):
            file = found.get(path)
            if file is None:
                raise UnusableError(f"`{folder / path}` is missing")
            if path not in files:
                raise UnusableError(f"`{file}` does not belong to the checkpoint")
            size = file.stat().st_size
            if size != files[path][0]:
                raise UnusableError(f"`{file}` has {size} bytes, not {files[path][0]}")
            if _digest(file) != files[path][1]:
                raise UnusableError(f"`{file}` has changed since it was written")

    def describe_files(self, name: str) -> dict[str, tuple[int, str]]:
        """Returns the size in bytes and the digest of each of the part's array files."""
        folder = self.arrays_path(name)
        return {
            str(file.relative_to(folder)): (file.stat().st_size, _digest(file))
            for file in _files(folder)
        }

    def delete(self, names: Iterable[str]) -> None:
        """Deletes this rank's parts of these checkpoints.

        Other ranks delete their own parts. If an earlier run had more ranks than this one, though,
        there's nobody to delete the parts of the extra ranks, so rank 0 takes care of them. Files
        that can't be deleted are ignored.
        """
        for name in names:
            folder = self.path / name
            parts = [self.part_path(name)]
            if self._rank == 0:
                with suppress(OSError):
                    parts += self._of_lost_ranks(folder, "rank")
            for part in parts:
                try:
                    # Delete the description first. That way, if the process is killed halfway
                    # through, the part doesn't look complete.
                    (part / "part.json").unlink(missing_ok=True)
                except OSError:
                    # It isn't a part, or it can't be deleted.
                    continue
                shutil.rmtree(part, ignore_errors=True)
            try:
                folder.rmdir()
            except OSError:
                continue  # contains another rank's part, or is already gone

    def _of_lost_ranks(self, folder: Path, what: str) -> list[Path]:
        """Returns the entries `<what>-<rank>` of ranks that don't exist in this run.

        Other ranks may delete the folder at any time, so be prepared for it to vanish. We can't use
        `Path.glob`, which raises an error if the folder disappears between its check that the
        folder exists and the listing of its files.
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
    """Adds a path to disk errors, since Python doesn't include it when a read fails."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _number(part: Path) -> int:
    digits = part.name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _files(folder: Path) -> Iterator[Path]:
    """Yields all files in a folder, at any depth.

    Raises:
        UnusableError: The folder contains something other than files and folders, e.g. a link,
            which could point to any file on the system.
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
