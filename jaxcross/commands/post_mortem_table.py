"""`jaxcross doctor --post-mortem DIR`: what each rank did last, and which one ended first."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from jaxcross.report import RankRecord


def run(folder: Path) -> int:
    """Prints the post-mortem of a folder. Returns 1 if there's nothing to read, otherwise 0."""
    from jaxcross.report import read_event_files

    skipped: dict[int, str] = {}
    try:
        records = read_event_files(folder, skipped=skipped)
    except (OSError, ValueError) as error:
        print(f"jaxcross doctor: {error}", file=sys.stderr)
        return 1
    show(records, sys.stdout, skipped)
    return 0


def show(records: Sequence[RankRecord], stream: TextIO, skipped: Mapping[int, str]) -> None:
    """Prints the table and the verdict. `skipped` says why some ranks' files weren't read."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from jaxcross.report import first_to_end, ranks_without_file

    end_s = max(record.last_s for record in records)
    table = Table(
        title=(
            f"post-mortem, times in seconds before {time.strftime('%F %T', time.localtime(end_s))}"
        )
    )
    for column in ("rank", "process", "last sign", "was in", "since", "last record"):
        table.add_column(column, overflow="fold")
    for record in records:
        where = record.where
        last_record = f"{record.exit_kind}: {record.text}" if record.exit_kind else "none"
        since = "" if where is None else f"{end_s - where.at_s:.1f}"
        process = escape(f"{record.host} {record.pid}")
        last = f"{end_s - record.last_s:.1f}"
        table.add_row(
            str(record.rank), process, last, escape(record.place), since, escape(last_record)
        )
    console = Console(file=stream, soft_wrap=False)
    console.print(table)
    for rank, reason in skipped.items():
        console.print(f"The events of rank {rank} are skipped. {escape(reason)}", soft_wrap=True)
    absent = [rank for rank in ranks_without_file(records) if rank not in skipped]
    if absent:
        console.print(
            f"No file of ranks {', '.join(map(str, absent))}: they never joined, or wrote "
            "to another folder."
        )
    unread = sum(record.unread for record in records)
    if unread:
        console.print(f"{unread} lines could not be read.")
    console.print(escape(first_to_end(records)))
