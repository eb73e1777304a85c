"""`SweepResult` and `SweepTrial`: the trials of a sweep, as a table and a picture."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross.errors import first_line, require_extra, shortened
from jaxcross.report.html_table import as_html
from jaxcross.report.table import printed_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxcross.report.report import Report

_MOST_FAILURES = 5
_INK = "#222222"
# Maps the outcome of a trial to the colour and style of its line, and to the mark at its end.
_LOOKS = {
    "best": ("#0072B2", "-", "o"),
    "finished": ("#8C8C8C", "-", ""),
    "pruned": ("#C4C4C4", "-", "x"),
    "stopped": ("#C4C4C4", "--", "x"),
    "failed": ("#D55E00", "--", "x"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTrial:
    """One trial.

    Attributes:
        number: The trial's number, counting from 0 in the order in which the search proposed the
            trials.
        name: Name of the trial's job and of its files.
        params: The trial's parameters.
        status: `finished`, `pruned`, `failed`, or `stopped` by `job.stop`.
        step: Number of steps that the trial made.
        value: The last value logged for the metric; None if it was never logged.
        digest: A digest of the final state on all ranks, if the trial finished.
        error: Why the trial failed.
        values: All values logged for the metric, as pairs `(step, value)`.
    """

    number: int
    name: str
    params: dict[str, Any]
    status: Literal["finished", "pruned", "failed", "stopped"]
    step: int
    value: float | None
    digest: str = ""
    error: str = ""
    values: tuple[tuple[int, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The outcome of a sweep. Identical across ranks, except that `state` may be rank-local.

    Attributes:
        metric: The metric by which trials are compared.
        mode: `max` if larger values are better, otherwise `min`.
        trials: All trials, sorted by number.
        best: The finished trial with the best last value, or the first of them in case of a tie.
            None if no trial finished with a value other than NaN.
        state: The best trial's final state. None if the trial ended before the sweep was restarted,
            since its state belonged to the previous process. In that case, read it with
            `jaxcross.load_checkpoint("FOLDER/checkpoints", result.best.name, state)`, where `state`
            is any state with the same structure.
        reports: The reports of the sweep's runs. Usually there's just one run.
    """

    metric: str
    mode: str
    trials: tuple[SweepTrial, ...]
    best: SweepTrial | None
    state: Any = field(default=None, repr=False)
    reports: tuple[Report, ...] = field(default=(), repr=False)

    @property
    def ranked(self) -> list[SweepTrial]:
        """The trials, best first.

        Finished trials come first, sorted by their last value, followed by the pruned, stopped and
        failed trials in that order. Within each of those groups, trials that made more steps come
        first.
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
        return printed_text(_table(self))

    def _repr_html_(self) -> str:
        return as_html(_table(self))

    def to_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draws the metric of all trials over their steps, and returns the path of the PNG.

        Raises:
            MissingExtraError: matplotlib is not installed. The extra `plot` installs it.
        """
        best = None if self.best is None else self.best.number
        return _draw(
            Path(path),
            self.ranked,
            best=best,
            metric=self.metric,
            mode=self.mode,
            answer=headline(self),
        )


def _table(result: SweepResult) -> Group:
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
    """Returns one line that says which trial is the best."""
    if result.best is None:
        return f"No trial has finished with a number as `{result.metric}`."
    settings = ", ".join(f"{name} {_cell(value)}" for name, value in result.best.params.items())
    return (
        f"Best: {settings}, with {result.metric} {exact(result.best.value)} after "
        f"{result.best.step} steps."
    )


def exact(value: float | None) -> str:
    """Formats a value with four significant digits, as trials often differ in the third."""
    if value is None:
        return "-"
    return f"{value:.4g}"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else shortened(str(value), 30)


def _draw(
    path: Path,
    trials: Sequence[SweepTrial],
    *,
    best: int | None,
    metric: str,
    mode: str,
    answer: str,
) -> Path:
    """Writes the PNG. Needs no display, and leaves matplotlib's global state alone.

    Args:
        path: Where to write the PNG.
        trials: The trials, best first.
        best: The number of the best trial, if there is one.
        metric: The metric that the trials logged.
        mode: `max` or `min`.
        answer: A line that says which trial is the best, for the title.
    """
    require_extra("plot", "a picture of a sweep", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels: dict[str, int] = {}
    for trial in reversed(trials):  # the best on top
        points = [(step, value) for step, value in trial.values if math.isfinite(value)]
        label = "best" if trial.number == best else trial.status
        colour, line, mark = _LOOKS[label]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        width = 2.4 if label == "best" else 1.1
        first = label not in labels
        labels[label] = labels.get(label, 0) + 1
        name = label if first else None
        axes.plot(steps, values, line, color=colour, linewidth=width, label=name)
        if mark or len(points) == 1:
            axes.plot(steps[-1:], values[-1:], mark or "o", color=colour, markersize=6)
    _legend(axes, labels)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(metric.replace("$", r"\$"), color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    question = (
        f"Which of {len(trials)} trials has the {'highest' if mode == 'max' else 'lowest'} "
        f"{metric}?"
    )
    title = f"{question}\n{textwrap.fill(answer, 90)}"
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=11, weight="bold", color=_INK)
    figure.tight_layout()
    figure.savefig(path)
    return path


def _legend(axes: Axes, labels: Mapping[str, int]) -> None:
    """Draws a legend of all outcomes that occur, in a fixed order, with the number of trials."""
    handles, names = axes.get_legend_handles_labels()
    found = dict(zip(names, handles, strict=True))
    order = [label for label in _LOOKS if label in labels]
    texts = [label if label == "best" else f"{label} ({labels[label]})" for label in order]
    if order:
        below = {
            "loc": "upper right",
            "bbox_to_anchor": (1, -0.08),
            "ncols": len(order),
        }  # below the axes, because lines may end anywhere inside
        axes.legend(
            [found[label] for label in order], texts, frameon=False, labelcolor=_INK, **below
        )
