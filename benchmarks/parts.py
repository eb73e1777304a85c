"""Helpers for benchmarks that measure part after part at several rates. Measures nothing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def parse_options(
    line: argparse.ArgumentParser,
    parts: Sequence[str],
    rates: Sequence[int],
    *,
    minutes: float,
    png_help: str,
    only_help: str = "in this order",
    rates_help: str | None = None,
) -> argparse.Namespace:
    """Adds the options of such a benchmark to a command line, and parses it."""
    line.add_argument("--only", type=words, default=list(parts), metavar="PART,...", help=only_help)
    line.add_argument(
        "--rates", type=numbers, default=list(rates), metavar="MBIT,...", help=rates_help
    )
    line.add_argument("--repeats", type=int, default=3, help="default %(default)s")
    line.add_argument(
        "--minutes", type=float, default=minutes, help="no part begins later (default %(default)s)"
    )
    line.add_argument("--png", type=Path, metavar="FILE", help=png_help)
    line.add_argument("--draw", action="store_true", help="draw what --json has, and end")
    args = line.parse_args()
    if args.draw and not (args.png and args.json):
        line.error("`--draw` needs `--json` and `--png`.")
    if unknown := set(args.only) - set(parts):
        line.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(parts)}.")
    return args


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def is_too_late(part: str, rate: int, *, begin: float, minutes: float) -> bool:
    """Returns whether it's too late to start a part. If so, prints that the part is left out."""
    late = time.monotonic() - begin > 60 * minutes
    if late:
        print(f"{part} at {rate} Mbit/s is left out: {minutes:g} minutes have passed", flush=True)
    return late


def in_order(ways: Sequence[Any], repeat: int) -> list[Any]:
    """Returns the ways in the order of a repeat: each repeat starts with a different way."""
    first = repeat % len(ways)
    return [*ways[first:], *ways[:first]]
