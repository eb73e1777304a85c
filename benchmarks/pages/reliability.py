"""The tables of docs/explanation/faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pages import Read, Table


def reliability(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What was tried, how often, and with which outcome. There's a line per kept result."""
    yield "tried", "how often", "came of it", "script"
    for name, lines in (
        ("model_check", _orders),
        ("faults", _faults),
        ("kill_resume", _killed),
        ("endurance", _lasting),
        ("endurance_mpi4jax", _lasting),
        ("endurance_mpi4py", _lasting),
    ):
        with suppress(FileNotFoundError):
            for line in lines(read(name)):
                yield *line, f"{name.partition('_mpi')[0]}.py"


def _orders(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    rows = found["rows"]
    states, whole = sum(row["joint_states"] for row in rows), sum(row["explored"] for row in rows)
    often = f"{len(rows)} cases, {states:.2g} joint states"
    yield "orders of events", often, f"no rule broken; {whole} cases explored to their end"


def _faults(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    longest, notified = (
        max(s for s in found[key].values() if s is not None) for key in ("longest_s", "told_s")
    )
    came = (
        f"{found['as_expected']} ended as the table says, after {longest:.1f} s at the latest, and "
        f"went on when restarted; the other ranks knew after {notified:.1f} s"
    )
    yield "faults of one rank", f"{found['cases']}", came


def _killed(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    ways = [kill["at"] for row in found["rows"] for kill in row["kills"]]
    interrupts = ways.count("interrupt")
    often = f"{found['trials']} runs, {len(ways) - interrupts} kills, {interrupts} times Ctrl-C"
    yield "training killed and started again", often, f"{found['survived']} ended in the same bits"


def _lasting(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    record = found["raw"][0]
    over = f" over {record['wire']}" if "wire" in record else ""
    for part, what in (("joins", "jobs that join and leave"), ("steps", "steps of many jobs")):
        if part not in found["table"]:
            continue
        done, counts = found["raw"][0]["parts"][part]["total"], found["table"][part]
        grown = [
            n
            for n in ("threads", "files", "communicators")
            if counts[n]["last"] > counts[n]["first"]
        ]
        first, last = (counts["rss_bytes"][when] / 1e6 for when in ("first", "last"))
        kept = ", ".join(grown) or "no thread, file or communicator"
        yield (
            what + over,
            f"{done:,} on {found['ranks']} ranks",
            f"{kept} more; memory {first:.1f} MB, then {last:.1f} MB",
        )


TABLES: dict[str, Table] = {
    "reliability": reliability,
}
