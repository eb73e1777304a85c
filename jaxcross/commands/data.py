"""`jaxcross data`: writes and inspects data sets on disk."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jaxcross.errors import MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console


def _size(text: str) -> tuple[int, int]:
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"`{text}` is not WIDTHxHEIGHT, for example 500x375")
    return int(width), int(height)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `data` and its sub-commands to the command line."""
    parser = subparsers.add_parser("data", help="write or inspect data sets", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    synth = actions.add_parser(
        "synth",
        help="write a small data set in ImageNet's format",
        description=(
            "Writes a TFDS ArrayRecord data set of JPEG images that tell their class, without "
            "TensorFlow."
        ),
    )
    synth.add_argument("dir", metavar="DIR", help="the data set becomes DIR/imagenet2012/5.1.0")
    synth.add_argument(
        "--images", type=int, default=256, metavar="N", help="training images (default %(default)s)"
    )
    synth.add_argument(
        "--classes", type=int, default=8, metavar="C", help="labels (default %(default)s)"
    )
    synth.add_argument(
        "--size", type=_size, default=(500, 375), metavar="WxH", help="pixels (default 500x375)"
    )
    synth.add_argument("--seed", type=int, default=0, help="of the images (default %(default)s)")
    info = actions.add_parser(
        "info",
        help="show what a data folder or a cache holds",
        description=(
            "Shows the splits of a data folder, or the levels of a cache and what its run has read "
            "from each."
        ),
    )
    info.add_argument(
        "dir", metavar="DIR", help="the folder that `--data-dir` would name, or that of a cache"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command and returns the exit status."""
    from rich.console import Console

    console = Console()
    try:
        if args.action == "synth":
            _synth(args, console)
        else:
            _info(args, console)
    except (ValueError, OSError, MissingExtraError) as error:
        Console(stderr=True).print(
            f"jaxcross data {args.action}: {error}", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    return 0


def _synth(args: argparse.Namespace, console: Console) -> None:
    from rich.progress import Progress

    from jaxcross.data import synthesise

    width, height = args.size
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"writing images of {width}x{height}", total=None)
        folder = synthesise(
            args.dir,
            images=args.images,
            classes=args.classes,
            width=width,
            height=height,
            seed=args.seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(
        f"{folder}: {args.images} training images, {args.classes} classes",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"use it with --data-dir {args.dir}", highlight=False, soft_wrap=True)


def _info(args: argparse.Namespace, console: Console) -> None:
    # Import this first, since its error says which extra is missing.
    from jaxcross.data import find_folder, is_cache, open_records

    import tensorflow_datasets as tfds  # isort: skip

    if is_cache(Path(args.dir).expanduser()):
        _cache_info(Path(args.dir).expanduser())
        return
    folder = find_folder(args.dir)
    for split in sorted(tfds.builder_from_directory(folder).info.splits):
        records = open_records(folder, split)
        line = f"{folder}: {split}, {len(records)} records, {records.num_classes} classes"
        console.print(line, highlight=False, soft_wrap=True)


def _cache_info(folder: Path) -> None:
    from rich.console import Group
    from rich.table import Table

    from jaxcross.data import cache_info
    from jaxcross.report import printed_text

    table = Table("level", box=None, pad_edge=False)
    for column in (
        "budget MB",
        "used MB",
        "holds",
        "hits",
        "share",
        "read MB",
        "read s",
        "waited s",
    ):
        table.add_column(column, justify="right")
    levels = cache_info(folder)
    every = max(1, sum(level.given.records for level in levels))
    for level in levels:
        given = level.given
        budget = level.budget_bytes
        sizes = ("-", "-", "-")
        if budget is not None:
            sizes = (_mb(budget), _mb(level.used_bytes), str(level.records))
        times = (f"{given.seconds:.1f}", f"{given.waited_s:.1f}")
        hits = (str(given.records), f"{given.records / every:.1%}")
        table.add_row(level.name, *sizes, *hits, _mb(given.nbytes), *times)
    print(printed_text(Group(table)))


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"
