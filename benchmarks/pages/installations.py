"""The tables of installations in docs/reference/versions.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pages import Read, Table


def installations(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What each set of extras installs on each Python, with seconds and MB for pip and uv."""
    yield (
        "extras",
        "Python",
        "JAX",
        "packages",
        "MB by pip",
        "by uv",
        "s by pip",
        "by uv",
        "CPU s by pip",
        "by uv",
        "two ranks train",
    )
    cases: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in read("installations")["rows"]:
        cases.setdefault((row["extras"], row["python"]), {})[row["installer"]] = row
    for extras, python in sorted(cases, key=lambda case: (len(case[0]), case)):
        rows = cases[extras, python]
        alike = (
            ", ".join(dict.fromkeys(cell(row, key) for row in rows.values()))
            for key in ("jax", "packages")
        )
        each = (
            cell(rows.get(name, {}), key)
            for key in ("megabytes", "s", "cpu_s")
            for name in ("pip", "uv")
        )
        yield (
            f"`{extras}`",
            python,
            *alike,
            *each,
            ", ".join(dict.fromkeys(map(trains, rows.values()))),
        )


def others(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Installations with compilers on the path."""
    yield "what", "Python", "JAX", "packages", "MB", "s", "CPU s", "two ranks train"
    for row in read("installations")["others"]:
        shown = (cell(row, key) for key in ("jax", "packages", "megabytes", "s", "cpu_s"))
        yield row["what"], row["python"], *shown, trains(row)


def cell(row: Mapping[str, Any], key: str) -> str:
    if "s" not in row:
        return "-"
    if key in ("jax", "packages"):
        return row["versions"]["jax"] if key == "jax" else str(len(row["versions"]))
    return f"{row[key]:.0f}"


def trains(row: Mapping[str, Any]) -> str:
    return row.get("failed", "yes")


TABLES: dict[str, Table] = {"installations": installations, "installations-others": others}
