"""What do the kept results say? Writes their tables into docs/ and benchmarks/results/, and lines
into the README: no number is copied by hand.

    python benchmarks/tables.py [--check] [--root FOLDER]

If a page has a line `<!-- table NAME -->`, the script writes the table NAME after it, in place of
everything up to the next blank line. Between the lines `<!-- line NAME -->` and `<!-- end -->`, it
writes the item NAME of a list. If the result for that table or item hasn't been stored yet, it
writes nothing there.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pages import (
    Read,
    benchmarks,
    carried,
    exchanges,
    fine_tuning,
    installations,
    plan,
    race,
    reliability,
    sweep,
    tensor,
)

RENAMED = {"parameter_server": "sharded_optimizer", "auto": "choose_compression"}
"""Maps the names that exchanges have in older results to their present names."""
MARK = re.compile(r"<!-- table (\S+)(?: (\S+))? -->\n(?:.+\n)*")
LINE_MARK = re.compile(r"<!-- line (\S+) -->\n(?:.+\n)*?<!-- end -->\n")
WIDTH = 130
"""Columns of a line's text."""
TABLES = (
    benchmarks.TABLES
    | race.TABLES
    | exchanges.TABLES
    | tensor.TABLES
    | reliability.TABLES
    | plan.TABLES
    | carried.TABLES
    | fine_tuning.TABLES
    | installations.TABLES
    | sweep.TABLES
)


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    head, *body = list(rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, tuple("---" for _ in head), *body))


def table(read: Read, name: str, argument: str) -> str:
    try:
        return markdown(TABLES[name](read, argument))
    except FileNotFoundError:
        return ""


def line(read: Read, name: str) -> str:
    try:
        text = sweep.LINES[name](read)
    except FileNotFoundError:
        return ""
    wrapped = textwrap.wrap(
        f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{each}\n" for each in wrapped)


@cache
def kept_result(path: Path) -> dict[str, Any]:
    """Returns a kept result with the present names of exchanges."""
    return present_names(json.loads(path.read_text()))


def present_names(kept: Any) -> Any:
    """Renames exchanges in a kept result, as keys and as the values of `strategy` and
    `exchange`.
    """
    if isinstance(kept, list):
        return [present_names(item) for item in kept]
    if not isinstance(kept, dict):
        return kept
    out = {}
    for key, value in kept.items():
        named = key in ("strategy", "exchange") and isinstance(value, str)
        out[RENAMED.get(key, key)] = RENAMED.get(value, value) if named else present_names(value)
    return out


def filled(page: str, read: Read) -> str:
    """Returns the page with all of its tables and lines regenerated."""
    page = MARK.sub(lambda m: f"{m[0].splitlines()[0]}\n{table(read, m[1], m[2] or '')}", page)
    return LINE_MARK.sub(lambda m: f"<!-- line {m[1]} -->\n{line(read, m[1])}<!-- end -->\n", page)


def pages_of(root: Path) -> list[Path]:
    """Returns the pages that may have tables or lines: all of docs/, those alongside the results,
    and the README.
    """
    return sorted(
        [
            *root.glob("README.md"),
            *(root / "docs").glob("**/*.md"),
            *(root / "benchmarks" / "results").glob("*.md"),
        ]
    )


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--check", action="store_true", help="only say whether the pages are up to date"
    )
    options.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).parents[1],
        help="of docs/ and benchmarks/results/ (default: here)",
    )
    args = options.parse_args()

    def read(name: str) -> dict[str, Any]:
        return kept_result(args.root / "benchmarks" / "results" / f"{name}.json")

    stale = 0
    for page in pages_of(args.root):
        old = page.read_text()
        new = filled(old, read)
        if old != new and args.check:
            print(f"{page.name} is not what the results say: run `python benchmarks/tables.py`.")
            stale = 1
        elif old != new:
            page.write_text(new)
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
