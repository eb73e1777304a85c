"""Renders a run's progress as text: lines for a log, or a table for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross._endings import JobStatus
from jaxcross.report.progress import JobProgress, RunProgress
from jaxcross.report.units import number

MOST_LINES = 8
"""Maximum number of jobs that get their own line in a log."""

_LASTING_S = 2.0
_BAR = 16


def duration(seconds: float) -> str:
    """Returns `8 s`, `2 min 10 s`, `3 h 05 min`, `4 d 06 h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole >= 48 * 3600:
        return f"{whole // 86400} d {whole % 86400 // 3600:02} h"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def steps_text(job: JobProgress) -> str:
    """Returns `40/100`, or `40` if the total number of steps is unknown."""
    return f"{job.step}/{job.steps}" if job.steps is not None else f"{job.step}"


def state_text(job: JobProgress) -> str:
    """Returns how the job ended, or what it's doing and (if it's taking a while) for how long."""
    if job.status or not job.doing:
        return job.status or ("" if job.step else "before its first step")
    lasting = job.doing_s >= _LASTING_S or job.doing == "compiling"
    return f"{job.doing}, {duration(job.doing_s)}" if lasting else job.doing


def job_line(job: JobProgress) -> str:
    """Returns one line with step, rate, metric, activity and time left."""
    state = state_text(job)
    if (
        job.step
        and not job.status
        and job.doing_s < _LASTING_S
        and job.doing not in ("compiling", "paused")
    ):
        state = ""  # nothing unusual: it's in the middle of a step
    parts = [
        f"step {steps_text(job)}" if job.step or job.steps is not None else "",
        f"{number(job.steps_per_s)} steps/s" if job.steps_per_s and not job.status else "",
        job.metric,
        state,
        f"{duration(job.left_s)} left" if job.left_s else "",
    ]
    return f"{job.name}: " + ", ".join(part for part in parts if part)


def run_lines(run: RunProgress) -> list[str]:
    """Returns one line per job. If there are too many jobs, the last line sums up the rest."""
    shown, rest = _first_jobs(run.jobs, MOST_LINES)
    stamp = f"[jaxcross {duration(run.run_s)}]"
    lines = [f"{stamp} {job_line(job)}" for job in shown]
    return [*lines, f"{stamp} {_rest_text(rest)}"] if rest else lines


def run_table(run: RunProgress, *, width: int, most_jobs: int, title: str) -> Group:
    """Returns a title, a table with one row per job, and a line about jobs that didn't fit.

    Args:
        run: The progress.
        width: Width of the terminal, in characters.
        most_jobs: Number of jobs that get their own row.
        title: The line above the table.
    """
    shown, rest = _first_jobs(run.jobs, most_jobs)
    table = Table(box=None, pad_edge=False)
    rows = {head: [cell(job) for job in shown] for head, cell in _CELLS.items()}
    needed = {
        head: max(_ROOM.get(head, len(head)), *map(len, cells)) for head, cells in rows.items()
    }
    widths = _widths(needed, width)
    for head, columns in widths.items():
        justify: Literal["left", "right"] = "right" if head in _NUMBERS else "left"
        table.add_column(head, justify=justify, no_wrap=True, width=columns)
    for n, job in enumerate(shown):
        style = ""
        if job.status:
            style = "dim" if job.status == JobStatus.ENDED else "bold"
        table.add_row(*(rows[head][n] for head in widths), style=style)
    return Group(Text(title), table, *([Text(_rest_text(rest))] if rest else ()))


def _bar(job: JobProgress) -> Text:
    if not job.steps:
        return Text("")
    full = min(_BAR, _BAR * job.step // job.steps)
    return Text("━" * full).append("─" * (_BAR - full), style="bright_black")


def _rate(job: JobProgress) -> Text:
    return Text(number(job.steps_per_s) if job.steps_per_s and not job.status else "")


def _left(job: JobProgress) -> Text:
    return Text("" if job.left_s is None else duration(job.left_s))


_CELLS: dict[str, Callable[[JobProgress], Text]] = {
    "job": lambda job: Text(job.name),
    "step": lambda job: Text(steps_text(job)),
    "": _bar,
    "steps/s": _rate,
    "left": _left,
    "logged": lambda job: Text(job.metric),
    "now": lambda job: Text(state_text(job)),
}
_NUMBERS = ("step", "steps/s", "left")
_ROOM = {"step": 7, "steps/s": 7, "left": 10, "logged": 12, "now": 28}
"""Minimum widths, in characters. They leave room for longer texts, to keep the columns from jumping
around later.
"""

_MOST = {"job": 30, "logged": 24}
_LEAST = {"logged": 12, "job": 12, "now": 28}
"""On a narrow terminal, we shrink columns to these widths, in this order. Numbers are never cut."""

_DROPPED = ("", "left", "logged", "steps/s")
"""If shrinking isn't enough, we drop these columns, in this order."""


def _widths(needed: Mapping[str, int], width: int) -> dict[str, int]:
    """Returns the width of each column, so that the table fits into `width`."""
    most = {head: min(n, _MOST.get(head, n)) for head, n in needed.items()}
    widths = most
    for dropped in range(len(_DROPPED) + 1):
        widths = {head: n for head, n in most.items() if head not in _DROPPED[:dropped]}
        for head, least in _LEAST.items():
            too_wide = sum(widths.values()) + 2 * (len(widths) - 1) - width
            if head in widths and too_wide > 0:
                widths[head] = max(min(least, widths[head]), widths[head] - too_wide)
        if sum(widths.values()) + 2 * (len(widths) - 1) <= width:
            break
    return widths


def _first_jobs(
    jobs: Sequence[JobProgress], most: int
) -> tuple[list[JobProgress], list[JobProgress]]:
    """Returns the jobs to show, in their original order, and the rest. Prefers running jobs."""
    if len(jobs) <= most:
        return list(jobs), []
    order = sorted(range(len(jobs)), key=lambda n: (bool(jobs[n].status), not jobs[n].step, n))
    chosen = set(order[:most])
    return [jobs[n] for n in sorted(chosen)], [job for n, job in enumerate(jobs) if n not in chosen]


def _rest_text(jobs: Sequence[JobProgress]) -> str:
    counts = Counter(
        job.status or ("running" if job.step else "before the first step") for job in jobs
    )
    return f"{len(jobs)} more job{'s' * (len(jobs) > 1)}: " + ", ".join(
        f"{count} {state}" for state, count in counts.items()
    )
