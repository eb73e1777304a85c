"""What do the kept results say? Writes their tables into the pages of docs/, so that no number is copied by hand.

    python benchmarks/tables.py [--check] [--root FOLDER]

A line `<!-- table NAME -->` in a page is followed by the table NAME, up to the next blank line; by nothing where its
result is not kept yet.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import Read, benchmarks, exchanges, race, reliability, tensor

MARK = re.compile(r"<!-- table (\S+)(?: (\S+))? -->\n(?:.+\n)*")
TABLES = benchmarks.TABLES | race.TABLES | exchanges.TABLES | tensor.TABLES | reliability.TABLES


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    head, *body = list(rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, tuple("---" for _ in head), *body))


def table(read: Read, name: str, argument: str) -> str:
    try:
        return markdown(TABLES[name](read, argument))
    except FileNotFoundError:
        return ""


def filled(page: str, read: Read) -> str:
    """The page with its tables made anew."""
    return MARK.sub(lambda m: f"{m[0].splitlines()[0]}\n{table(read, m[1], m[2] or '')}", page)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    options.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="of docs/ and benchmarks/results/ (default: here)"
    )
    args = options.parse_args()

    def read(name: str) -> dict[str, Any]:
        return json.loads((args.root / "benchmarks" / "results" / f"{name}.json").read_text())

    stale = 0
    for page in sorted((args.root / "docs").glob("*.md")):
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
