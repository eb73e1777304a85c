"""Renders the table of a plan. Uses only the plan's fields, because `Plan` imports this module."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross.program.ir import human_bytes
from jaxcross.report.units import plural, seconds

MOST_GROUPS = 50
"""Most groups that the table shows. The file has all of them."""


def render(plan: Any) -> Group:
    """Returns a title, the table, and remarks about the numbers.

    The table has one row per job, and its group's facts are in the group's first row. The columns
    for group and job come first, because a table that is too wide is split into several, each of
    which starts with them.
    """
    table = Table()
    table.add_column("group")
    table.add_column("job", overflow="fold")
    for name in ("ranks", "memory", "turns", "pieces", "speed", "gain", "step alone", "here"):
        table.add_column(name, justify="right")
    for number, group in enumerate(plan.groups[:MOST_GROUPS]):
        for row in _rows(number, group):
            table.add_row(*row)
        table.add_section()
    return Group(Text(_title(plan), style="bold"), table, Text("\n".join(_footnotes(plan))))


def _rows(number: int, group: Any) -> list[list[Text]]:
    several = len(group.jobs) > 1
    memory = "-" if group.memory_bytes is None else human_bytes(group.memory_bytes)
    facts = [str(group.ranks), memory]
    gain = f"{group.progress:.2f}" if several else "-"
    rows = []
    for job in group.jobs:
        pieces = "whole" if job.pieces == 1 else f"{'~' * job.estimated}{job.pieces}"
        turns = "in turn" if several else "alone"
        if group.turns == "weighted":
            turns = f"share {job.share:.2f}"
        times = [seconds(job.alone_s), seconds(job.step_s)]
        row = [str(number), job.name, *facts, turns, pieces, f"{job.speed:.2f}", gain, *times]
        rows.append([Text(cell) for cell in row])
        facts = [""] * len(facts)
        gain = ""
    return rows


def _title(plan: Any) -> str:
    jobs = sum(len(group.jobs) for group in plan.groups)
    limit = (
        "" if plan.memory_bytes is None else f", {human_bytes(plan.memory_bytes)} of memory on each"
    )
    return (
        f"{plural(jobs, 'job')} in {plural(len(plan.groups), 'group')} on "
        f"{plural(plan.ranks, 'rank')}{limit}"
    )


def _footnotes(plan: Any) -> list[str]:
    lines = [
        (
            f"On the same ranks the groups make {plan.progress:.2f} times as many steps as one job "
            "after the other."
        ),
        (
            "Step alone, here: time of a step alone, and as predicted in the group. Speed: that "
            "alone over that here."
        ),
        (
            "Gain: the group's steps over those of its jobs one after the other. Memory: of a "
            "rank, at its fullest."
        ),
    ]
    if any(job.estimated for group in plan.groups for job in group.jobs):
        lines.append(
            "~: pieces estimated from the whole step; a profile of the cut step makes the "
            "prediction better."
        )
    if len(plan.groups) > MOST_GROUPS:
        lines.append(f"And {len(plan.groups) - MOST_GROUPS} more groups, which the file has.")
    lines += [
        f"Group {n}: {group.why}." for n, group in enumerate(plan.groups[:MOST_GROUPS]) if group.why
    ]
    return [*lines, *plan.notes]
