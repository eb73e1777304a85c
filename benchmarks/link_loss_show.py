"""Prints and draws rows of `link_loss.py`: test loss against seconds of training. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMED = {
    "mean": "#0072b2",
    "mean, bfloat16": "#56b4e9",
    "top_k 1%, threshold": "#d55e00",
    "delayed_mean": "#009e73",
    "streaming_diloco, every 8, 4 bits": "#cc79a7",
    "diloco, every 16, outer momentum 0.5": "#e69f00",
    "sparse_loco 1/64, every 8": "#666666",
    "no_loco, every 16": "#8c510a",
}
"""Colours of the labelled strategies; all others are grey."""
LOSSES = {"text": 2.5, "images": 0.2}
"""The test loss of each task at which the title compares strategies."""


def line(row: Mapping[str, Any]) -> str:
    loss = row["final_test_loss"]
    end = "diverged" if loss is None else f"test loss {loss:.3f}"
    seconds = statistics.median(curve[-1] for curve in row["seconds"])
    return (
        f"{row['task']:7} {row['strategy']:40} {1e3 * row['s_per_step']:7.1f} ms a step, "
        f"{seconds:6.1f} s, {end}"
    )


def first_at(row: Mapping[str, Any], loss: float) -> float | None:
    """Returns the median seconds to a test loss, or None if a seed didn't reach it."""
    found = []
    for seconds, losses in zip(row["seconds"], row["test_loss"], strict=True):
        reached = [
            s
            for s, value in zip(seconds, losses, strict=True)
            if value is not None and value <= loss
        ]
        if not reached:
            return None
        found.append(reached[0])
    return statistics.median(found)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws a panel per task and a line per strategy, the mean over seeds."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in result["rows"]))
    figure = Figure(
        figsize=(7.6 if len(tasks) < 2 else 5.4 * len(tasks), 4.6), dpi=140, layout="constrained"
    )
    for number, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), number + 1)
        rows = [row for row in result["rows"] if row["task"] == task]
        for row in rows:
            color = NAMED.get(row["strategy"])
            seconds, losses = _mean(row["seconds"]), _mean(row["test_loss"])
            axes.plot(
                seconds,
                losses,
                color=color or "#c0c0c0",
                lw=1.8 if color else 1.2,
                zorder=3 if color else 2,
                label=row["strategy"] if color else None,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        rate = ", ".join(
            dict.fromkeys(row["rate"].removesuffix("mbit") + " Mbit/s" for row in rows)
        )
        axes.set(
            xlabel="seconds of training",
            ylabel="test loss",
            title=f"{task}, {rate}",
            ylim=(None, 3.6) if task == "text" else (None, None),
        )
        axes.spines[["top", "right"]].set_visible(False)
    drawn = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    order = [name for name in NAMED if name in drawn]
    figure.legend(
        [drawn[name] for name in order],
        order,
        loc="outside lower center",
        ncols=3 if len(tasks) > 1 else 2,
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(title(result, tasks), x=0.01, ha="left", fontsize=11.5, weight="bold")
    figure.savefig(path)


def _mean(curves: Sequence[Sequence[float | None]]) -> list[float]:
    return [
        statistics.fmean(float("nan") if value is None else value for value in values)
        for values in zip(*curves, strict=True)
    ]


def title(result: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """Returns the picture's question, with its answer for each task that has both rows."""
    by = {(row["task"], row["strategy"]): row for row in result["rows"]}
    lines = ["How soon does a model learn over a slow link?"]
    for task in tasks:
        rows = [by.get((task, name)) for name in ("mean", "streaming_diloco, every 8, 4 bits")]
        mean, rare = (None if row is None else first_at(row, LOSSES[task]) for row in rows)
        if mean is not None and rare is not None:
            lines.append(
                f"{task}, to a test loss of {LOSSES[task]:g}: mean {_s(mean)}, streaming DiLoCo "
                f"{_s(rare)}"
            )
    return "\n".join(lines)


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
