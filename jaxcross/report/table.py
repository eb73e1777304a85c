"""The table at the end of a run."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxcross.report.facts import LOSSES
from jaxcross.wording import first_line

if TYPE_CHECKING:
    from jaxcross.report.report import Report

WIDTH = 110


def plain(report: Report) -> str:
    """The table as text without colour, the same in a terminal, a file and a log."""
    return _printed(render(report))


def _printed(renderable: Group | Table, width: int = WIDTH) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def render(report: Report) -> Group:
    """Title, one row a job, the total, and where the time went."""
    rounds = report.rounds
    with_images = any(job.facts.examples_per_step is not None for job in rounds.jobs)
    with_loss = any(job.facts.final_loss is not None for job in rounds.jobs)
    with_left = any(job.facts.how != "ended" for job in rounds.jobs)
    title = Text(_title(report), style="bold")  # names and links are no markup
    table = Table(title=title, title_justify="left", show_footer=len(rounds.jobs) > 1)
    k = len(rounds.jobs)
    table.add_column("job", footer=f"all {k}")
    table.add_column("steps", justify="right", footer=str(sum(job.facts.steps for job in rounds.jobs)))
    table.add_column("steps/s", justify="right", footer=number(k / rounds.period_s if rounds.period_s else 0.0))
    if with_images:
        table.add_column("images/s", justify="right", footer=number(rounds.examples_per_s))
    table.add_column("compute s", justify="right", footer=number(sum(job.compute_s for job in rounds.jobs)))
    table.add_column("exchange s", justify="right", footer=number(sum(job.exchange_s for job in rounds.jobs)))
    table.add_column("hidden", justify="right", footer=f"{rounds.hidden_share:.0%}")
    if with_loss:
        table.add_column("loss", justify="right")
    if with_left:
        table.add_column("left")
    for job in rounds.jobs:
        row: list[str | Text] = [Text(job.facts.name), str(job.facts.steps), number(job.steps_per_s)]
        row += [number(job.examples_per_s)] if with_images else []
        row += [number(job.compute_s), number(job.exchange_s), f"{job.hidden_share:.0%}"]
        row += [number(job.facts.final_loss)] if with_loss else []
        row += [f"{job.facts.how} at {job.facts.steps}"] if with_left else []
        table.add_row(*row)
    return Group(table, Text("\n".join(_footnotes(report))))


def number(value: float | None) -> str:
    """Three significant digits, never an exponent where a person would not write one."""
    if value is None:
        return "-"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        digits = 3 if abs(value) < 1 else 2 if abs(value) < 100 else 0
        return f"{value:.{digits}f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2g}"
    return f"{value:.2e}"


def seconds(value: float) -> str:
    """A duration with the unit that suits it."""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.0f} us"


def _title(report: Report) -> str:
    ranks = len(report.wall_ns)
    parts = [report.policy or "run", f"{ranks} rank{'s' if ranks != 1 else ''}", report.placement, report.link]
    return ", ".join(part for part in parts if part)


def _footnotes(report: Report) -> list[str]:
    rounds = report.rounds
    limits = {"compute": "all computation", "exchange": "all exchange", "chain": "the longest job"}
    lines = [
        "Seconds are per step (last row: per round), in the steady state; hidden: share of exchange under computation.",
        (
            f"Round {seconds(rounds.period_s)} (one step of every job), bound {seconds(rounds.bound_s)} "
            f"({limits[rounds.limit]}), efficiency {rounds.efficiency:.0%}."
        ),
    ]
    total = rounds.period_s - rounds.bound_s
    named = [(c, s) for c, s in rounds.lost_s.items() if abs(s) >= max(5e-7, 0.001 * rounds.period_s)]
    if named:
        lines.append(f"Lost {seconds(total)} a round:")
        lines += [f"  {cause:<9} {seconds(lost):>9}  {LOSSES[cause]}" for cause, lost in named]
    lines.append(f"Run {seconds(rounds.wall_s)}, of which start-up and winding up {seconds(rounds.start_up_s)}.")
    for job in report.jobs:
        if job.skipped:
            lines.append(f"{job.name}: {job.skipped} of {job.steps} steps kept the state, for values not finite.")
        if job.why:
            lines.append(first_line(job.why))
    if report.dropped:
        lines.append(f"{report.dropped} early spans were not kept.")
    return lines


def comparison(first: Report, second: Report) -> str:
    """Two runs of the same jobs as one plain table: per job and in total, with the speed-up of the second."""
    title = Text(", ".join(filter(None, ["both runs", second.placement, second.link])))
    table = Table(title=title, title_justify="left")
    for name in ("run", "job"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "images/s", "compute s", "exchange s", "hidden", "round s", "bound s", "speed-up"):
        table.add_column(name, justify="right")
    for run in (first, second):
        rounds = run.rounds
        for i, job in enumerate(rounds.jobs):
            cells = [str(job.facts.steps), number(job.examples_per_s), number(job.compute_s), number(job.exchange_s)]
            table.add_row(
                run.policy if i == 0 else "", Text(job.facts.name), *cells, f"{job.hidden_share:.0%}", "", "", ""
            )
        steps = str(sum(job.facts.steps for job in rounds.jobs))
        cells = [steps, number(rounds.examples_per_s), number(sum(job.compute_s for job in rounds.jobs))]
        cells += [number(sum(job.exchange_s for job in rounds.jobs)), f"{rounds.hidden_share:.0%}"]
        cells += [number(rounds.period_s), number(rounds.bound_s), f"{run.speedup(over=first):.2f}x"]
        table.add_row("", f"all {len(rounds.jobs)}", *cells, style="bold", end_section=True)
    return _printed(table, width=WIDTH + 20) + (
        "\nA round is one step of every job; bound: the shortest round that any order of this work allows."
    )
