"""`SweepResult`: the trials of a sweep, as a table and a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxcross.errors import first_line, shortened
from jaxcross.report.sweep_trial import SweepTrial

if TYPE_CHECKING:
    from rich.console import Group

    from jaxcross.report.report import Report

_MOST_FAILURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The outcome of a sweep. Identical across ranks, except that states may be rank-local.

    Attributes:
        metric: The metric by which trials are compared.
        mode: `max` or `min`.
        trials: All trials, by number.
        best: The finished trial with the best last value; the first if several are equal. None if
            no trial finished with a value other than NaN.
        state: The best trial's final state, if it ended in this process. None if it ended before a
            restart; in that case,
            `jaxcross.load_checkpoint("FOLDER/checkpoints", result.best.name, state)` reads it,
            where `state` is any state with the same structure.
        reports: Reports of the runs, usually one.
    """

    metric: str
    mode: str
    trials: tuple[SweepTrial, ...]
    best: SweepTrial | None
    state: Any = field(default=None, repr=False)
    reports: tuple[Report, ...] = field(default=(), repr=False)

    @property
    def ranked(self) -> list[SweepTrial]:
        """The trials, best first: finished ones, then pruned, stopped and failed ones, of which
        those that made more steps come first.
        """
        sign = -1 if self.mode == "max" else 1

        def key(trial: SweepTrial) -> tuple[float, ...]:
            value = trial.value
            if value is None or value != value:
                value = float("inf") * sign
            if trial.status == "finished":
                return 0, sign * value, trial.number
            return (
                ("pruned", "stopped", "failed").index(trial.status) + 1,
                -trial.step,
                sign * value,
                trial.number,
            )

        return sorted(self.trials, key=key)

    def __rich__(self) -> Group:
        """The table, for `rich.print`."""
        return _table(self)

    def __repr__(self) -> str:
        return (
            f"<{_title(self)}. {shortened(headline(self).rstrip('.'), 200)}; print() shows the "
            "table>"
        )

    def __str__(self) -> str:
        from jaxcross.report.table import printed

        return printed(_table(self))

    def _repr_html_(self) -> str:
        from jaxcross.report.table import as_html

        return as_html(_table(self))

    def to_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draws the metric of all trials over their steps, and returns the path of the PNG.

        Raises:
            MissingExtraError: matplotlib is not installed. The extra `plot` installs it.
        """
        from jaxcross.report.sweep_plot import draw

        best = None if self.best is None else self.best.number
        return draw(
            Path(path),
            self.ranked,
            best=best,
            metric=self.metric,
            mode=self.mode,
            answer=headline(self),
        )


def _table(result: SweepResult) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    names = list(dict.fromkeys(name for trial in result.trials for name in trial.params))
    table = Table()
    table.add_column("")
    table.add_column("trial", justify="right")
    for name in names:
        table.add_column(Text(name), justify="right")
    table.add_column(Text(result.metric), justify="right")
    table.add_column("steps", justify="right")
    table.add_column("status")
    for trial in result.ranked:
        best = result.best is not None and trial.number == result.best.number
        cells = [_cell(trial.params[name]) if name in trial.params else "-" for name in names]
        row = [
            "*" if best else "",
            str(trial.number),
            *cells,
            exact(trial.value),
            str(trial.step),
            trial.status,
        ]
        table.add_row(*map(Text, row), style="bold" if best else None)
    lines = [headline(result)]
    failed = [trial for trial in result.trials if trial.status == "failed"]
    lines += [
        f"Trial `{t.name}` failed: {shortened(first_line(t.error), 300)}"
        for t in failed[:_MOST_FAILURES]
    ]
    if len(failed) > _MOST_FAILURES:
        lines.append(f"And {len(failed) - _MOST_FAILURES} more failed: `sweep.json` says why.")
    title = Text(_title(result), style="bold")
    return Group(title, table, Text("\n".join(lines)))


def _title(result: SweepResult) -> str:
    counts = {
        status: sum(t.status == status for t in result.trials)
        for status in ("finished", "pruned", "stopped", "failed")
    }
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"Sweep of {len(result.trials)} trials by {result.metric} ({result.mode}): {summary}"


def headline(result: SweepResult) -> str:
    """Returns one line that says which trial is best."""
    if result.best is None:
        return f"No trial has finished with a number as `{result.metric}`."
    words = ", ".join(f"{name} {_cell(value)}" for name, value in result.best.params.items())
    return (
        f"Best: {words}, with {result.metric} {exact(result.best.value)} after {result.best.step} "
        "steps."
    )


def exact(value: float | None) -> str:
    """Returns four significant digits, because trials often differ in the third."""
    if value is None:
        return "-"
    return f"{value:.4g}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else shortened(str(value), 30)
