"""The table that is printed at the end of a run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from jaxcross._endings import JobStatus
from jaxcross.errors import first_line
from jaxcross.report.summary import BRIEF, LOST_TIME, JobTiming, TimeBreakdown
from jaxcross.report.units import number, seconds, share

if TYPE_CHECKING:
    from jaxcross.report.report import Report

WIDTH = 110
"""Maximum number of characters per line, even if the output isn't a terminal."""

_NAME = 24
_TEXT = 8
"""Column widths on a narrow terminal, in characters: `_NAME` for the name of a row, `_TEXT` for all
other texts. Longer texts are wrapped.
"""


def printed_text(group: Group, most: int = WIDTH) -> str:
    """Renders as text without colours, no wider than the terminal or `most` characters.

    If a table is too wide, we first drop its borders and wrap its texts. Numbers are never wrapped;
    if they still don't fit, we spread the columns over several narrower tables, each of which
    repeats the leftmost columns that say what a row is about.
    """
    out = io.StringIO()
    width = min(most, screen_width(os.environ) or most)
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False
    )
    unlimited = console.options.update(width=1000)
    for each in group.renderables:
        if isinstance(each, Table) and Measurement.get(console, unlimited, each).maximum > width:
            console.print(*_narrow(each, width), sep="\n")
        else:
            console.print(each)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _narrow(table: Table, width: int) -> list[Table]:
    """Drops a table's borders, and splits it into as many tables as its numbers require."""
    n_texts = next((n for n, column in enumerate(table.columns) if column.justify == "right"), 1)
    n_names = max(
        n_texts, 1 + next((n for n, column in enumerate(table.columns) if column.header), 0)
    )
    names = table.columns[:n_names]
    rooms = [
        _room(column, _NAME if n < n_names else _TEXT) for n, column in enumerate(table.columns)
    ]
    taken = width
    parts: list[list[Column]] = []
    for column, room in zip(table.columns[n_names:], rooms[n_names:], strict=True):
        if taken + 1 + room > width:
            parts.append([*names])
            taken = sum(rooms[:n_names]) + n_names - 1
        parts[-1].append(column)
        taken += 1 + room
    return [_without_lines(table, columns) for columns in parts or [names]]


def _room(column: Column, text: int) -> int:
    """Returns a column's minimum width. Numbers are never wrapped, texts at `text` characters."""
    widest = max(cell_len(str(cell)) for cell in (column.header, column.footer, *column.cells))
    return widest if column.justify == "right" else min(widest, text)


def _without_lines(table: Table, columns: Sequence[Column]) -> Table:
    part = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_footer=table.show_footer)
    for column in columns:
        right = column.justify == "right"
        part.add_column(
            column.header, column.footer, justify=column.justify, no_wrap=right, overflow="fold"
        )
    for row, cells in zip(
        table.rows, zip(*(column.cells for column in columns), strict=True), strict=True
    ):
        part.add_row(*cells, style=row.style)
    return part


def screen_width(environ: Mapping[str, str]) -> int:
    """Returns `COLUMNS` from the environment, or else the terminal's width; 0 if neither exists.

    Ranks started by `jaxcross launch` write to a pipe, so there's no terminal they could ask for
    its width. Instead, the launcher passes down the width of its own terminal as `COLUMNS`.
    """
    text = environ.get("COLUMNS", "")
    if text.isdecimal():
        return int(text)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal, or stdout is closed or missing
        return 0


def render(report: Report) -> Group:
    """Returns a title, a table with one row per job and the total, and where the time went."""
    rounds = report.rounds
    counted = any(job.facts.examples_per_step is not None for job in rounds.jobs)
    with_loss = any(job.facts.final_loss is not None for job in rounds.jobs)
    with_left = any(job.facts.how != JobStatus.ENDED for job in rounds.jobs)
    title = Text(_title(report), style="bold")  # `Text`, since names and links aren't markup
    table = Table(show_footer=len(rounds.jobs) > 1)
    for name, total in zip(
        ("job", "steps", "steps/s"), (f"all {len(rounds.jobs)}", *totals(rounds)[:2]), strict=True
    ):
        table.add_column(name, footer=total, justify="left" if name == "job" else "right")
    if counted:
        table.add_column(f"{unit(rounds.jobs)}/s", justify="right", footer=totals(rounds)[2])
    for name, total in zip(("compute", "exchange", "hidden"), totals(rounds)[3:], strict=True):
        table.add_column(name, justify="right", footer=total)
    if with_loss:
        table.add_column("loss", justify="right")
    if with_left:
        table.add_column("left")
    for job in rounds.jobs:
        steps, pace, examples, *costs = cells(rounds, job)
        row: list[str | Text] = [
            Text(job.facts.name),
            steps,
            pace,
            *([examples] if counted else []),
            *costs,
        ]
        row += [number(job.facts.final_loss)] if with_loss else []
        row += [f"{job.facts.how} at {job.facts.last_step}"] if with_left else []
        table.add_row(*row)
    return Group(title, table, Text("\n".join(_footnotes(report))))


def unit(jobs: Sequence[JobTiming]) -> str:
    """Returns the unit of the jobs' examples, or `examples` if the units differ."""
    units = {job.facts.unit for job in jobs if job.facts.examples_per_step is not None}
    return units.pop() if len(units) == 1 else "examples"


def cells(rounds: TimeBreakdown, job: JobTiming) -> list[str]:
    """Returns the cells of a job: steps, steps/s, examples/s, compute, exchange and hidden share.

    The table's last row sums up a round, i.e. one step of every job. A job that takes no part in
    the round isn't included in these sums. Showing its times anyway would look as if the columns
    didn't add up, so all of its cells except the steps are `-`.
    """
    facts = job.facts
    steps = str(facts.steps)
    if facts.first_step and facts.steps:
        steps = f"{facts.steps} ({facts.first_step + 1} to {facts.last_step})"
    if not job.period_s or (rounds.period_s is not None and not job.steps_per_round):
        return [steps, *["-"] * 5]
    pace = [number(job.steps_per_s), number(job.examples_per_s)]
    return [steps, *pace, seconds(job.compute_s), seconds(job.exchange_s), share(job.hidden_share)]


def totals(rounds: TimeBreakdown) -> list[str]:
    """Returns the cells of the last row: sums per round if there's a round, otherwise `-`."""
    steps = str(sum(job.facts.steps for job in rounds.jobs))
    if not rounds.period_s:
        return [steps, *["-"] * 5]
    pace = [number(len(rounds.crossed) / rounds.period_s), number(rounds.examples_per_s)]
    return [
        steps,
        *pace,
        seconds(rounds.compute_s),
        seconds(rounds.exchange_s),
        share(rounds.hidden_share),
    ]


def a_round(rounds: TimeBreakdown) -> str:
    """Describes which steps make up a round."""
    if all(job.steps_per_round == 1 for job in rounds.crossed):
        if len(rounds.crossed) == len(rounds.jobs):
            return "one step of every job"
        return "one step of each job in it"
    return ", ".join(
        f"{job.steps_per_round:.2f} steps of {job.facts.name}" for job in rounds.crossed
    )


def too_small(rounds: TimeBreakdown) -> str:
    """Returns a warning if votes take longer than overlap could save, otherwise ""."""
    jobs = len(rounds.crossed)
    if rounds.bound_s is None or rounds.in_turn or jobs < 2:
        return ""
    votes = rounds.lost_s["votes"]
    work = rounds.compute_s + rounds.exchange_s
    if votes < max(
        work - rounds.bound_s, 0.1 * work
    ):  # the first is what overlap can save at most, the second is for jobs that hardly exchange
        return ""
    return f"Too small to gain: {seconds(votes / jobs)} of votes on a {seconds(work / jobs)} step."


def _title(report: Report) -> str:
    ranks = len(report.wall_ns)
    parts = [
        report.policy or "run",
        f"{ranks} rank{'s' if ranks != 1 else ''}",
        report.placement,
        report.link,
    ]
    return ", ".join(part for part in parts if part)


def _footnotes(report: Report) -> list[str]:
    rounds = report.rounds
    lines = _without_round(rounds) if rounds.period_s is None else _with_round(rounds)
    measured = (
        f"{share(rounds.steady_share)} of it measured, " if rounds.period_s is not None else ""
    )
    lines.append(
        f"Run {seconds(rounds.wall_s)}: {measured}{seconds(rounds.start_up_s)} start-up and "
        "winding up."
    )
    if rounds.period_s is not None and rounds.steady_share < BRIEF:
        lines.append(
            "So short a time may not be representative: jobs may progress at other rates in the "
            "rest of the run."
        )
    replicas = dict.fromkeys(job.replicas for job in report.jobs if job.replicas)
    for text in replicas:
        lines.append(
            f"{', '.join(job.name for job in report.jobs if job.replicas == text)}: replicas "
            f"{text}."
        )
    carried = [job.name for job in report.jobs if job.is_carried]
    if carried:
        lines.append(
            f"{', '.join(carried)}: the exchange is carried, that of a step runs while the next "
            "one computes."
        )
    for job in report.jobs:
        if not job.steps and not job.first_step and job.how == JobStatus.ENDED:
            lines.append(
                f"{job.name}: 0 steps: only those of `crossover` and of a parameter server are "
                "counted."
            )
        if job.first_step:
            none = "" if job.steps else ", and made no steps in this run"
            lines.append(f"{job.name}: resumed after step {job.first_step}{none}.")
        if job.left_over:
            ranks = (
                f"rank{'s' if len(job.left_over) > 1 else ''} {', '.join(map(str, job.left_over))}"
            )
            lines.append(
                f"{job.name}: its loop ended with the shortest rank's data; {ranks} had more, "
                "which was not used."
            )
        if job.skipped:
            lines.append(
                f"{job.name}: {job.skipped} of {job.steps} steps kept the state, for values not "
                "finite."
            )
        if job.why:
            lines.append(first_line(job.why))
    lines += [
        f"{job.facts.name}: its steps are the calls of the first function that exchanges, not "
        f"counted are {job.other_calls} of others."
        for job in rounds.jobs
        if job.other_calls and job.bytes_per_other_call > job.bytes_per_step
    ]
    lines += [f"{reason}." for reason in report.fusion]
    if report.dropped:
        lines.append(f"{report.dropped} early spans were not kept.")
    return lines


def _without_round(rounds: TimeBreakdown) -> list[str]:
    begun = [job for job in rounds.jobs if job.period_s]
    if len(begun) < 2:
        return ["No steady state: that begins with a job's second step."]
    return [
        (
            "Rows are per step, each in the job's own steady state; hidden: share of exchange "
            "under computation."
        ),
        (
            "Never in steady state together: at least two jobs were at work in "
            f"{share(rounds.shared_share)} of the run, but never"
        ),
        "all of them past their first step and before their end for a whole round.",
    ]


def _with_round(rounds: TimeBreakdown) -> list[str]:
    period = rounds.period_s or 0.0
    bound = rounds.bound_s
    names = {"compute": "all computation", "exchange": "all exchange", "chain": "the longest job"}
    if bound is None:
        limit = "no bound: a step with a parameter server is its own"
    else:
        limit = (
            f"bound {seconds(bound)} ({names[rounds.bottleneck]}), "
            f"efficiency {share(rounds.efficiency)}"
        )
    lines = [
        (
            "Times are per step (last row: per round), in the steady state; hidden: share of "
            "exchange under computation."
        ),
        f"Round {seconds(period)} ({a_round(rounds)}), {limit}.",
    ]
    if rounds.in_turn and len(rounds.crossed) > 1:
        lines.append(
            "One job after the other: rates of a row are while that job ran, those of the last row "
            "over all."
        )
    elif bound is not None and len(rounds.crossed) > 1:
        lines.append(
            "The bound takes compute and exchange as they were here, slowed by each other or not."
        )
    lines += [
        f"{job.facts.name}: no part in the round, {_why_no_part(job)}."
        for job in rounds.jobs
        if not job.steps_per_round and job.facts.steps
    ]
    named = [(c, s) for c, s in rounds.lost_s.items() if s >= max(5e-7, 0.001 * period)]
    if named and bound is not None:
        lines.append(f"Lost {seconds(period - bound)} a round:")
        lines += [
            f"  {cause:<9} {seconds(lost):>9}  {LOST_TIME[cause]}{_level(rounds, cause)}"
            for cause, lost in named
        ]
    if rounds.slow_rank is not None:
        lines.append(rounds.slow_rank.text("a round"))
    return [*lines, *filter(None, [too_small(rounds)])]


def _level(rounds: TimeBreakdown, cause: str) -> str:
    """Names the storage level that caused the most waiting for batches.

    Returns "" if it didn't cause much, or if the cause isn't `input`.
    """
    level = max(rounds.input_share, key=lambda each: rounds.input_share[each], default="")
    if cause != "input" or not level or rounds.input_share[level] < BRIEF:
        return ""
    return f", {share(rounds.input_share[level])} of it from the level `{level}`"


def _why_no_part(job: JobTiming) -> str:
    if job.period_s:
        return "as it was hardly or never in steady state together with the others"
    return "which needs two steps"
