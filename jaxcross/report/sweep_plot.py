"""Draws a sweep: which trial is best, and how the others fell behind."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxcross.errors import require_extra
from jaxcross.report.sweep_trial import SweepTrial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#222222"
# Outcome of a trial -> colour, line, and mark at its end.
_LOOKS = {
    "best": ("#0072B2", "-", "o"),
    "finished": ("#8C8C8C", "-", ""),
    "pruned": ("#C4C4C4", "-", "x"),
    "stopped": ("#C4C4C4", "--", "x"),
    "failed": ("#D55E00", "--", "x"),
}


def draw(
    path: Path,
    trials: Sequence[SweepTrial],
    *,
    best: int | None,
    metric: str,
    mode: str,
    answer: str,
) -> Path:
    """Writes the PNG. Needs no display and changes no global state of matplotlib.

    Args:
        path: Where to write the PNG.
        trials: The trials, best first.
        best: The number of the best trial, if there is one.
        metric: The metric that the trials logged.
        mode: `max` or `min`.
        answer: The answer to the question which trial is best, for the title.

    Raises:
        MissingExtraError: matplotlib is not installed.
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
    """Names the outcomes that occur, in a fixed order, with the number of trials of each."""
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
