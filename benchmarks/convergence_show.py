"""Draws the picture of `convergence.py`: final accuracy against received bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMED = {
    "mean": ("#0072b2", (6, -13)),
    "mean, bfloat16": ("#56b4e9", (-40, 8)),
    "top_k 1%, exact": ("#d55e00", (-80, -4)),
    "power_sgd, rank 2": ("#009e73", (-10, -15)),
    "local_sgd, every 8": ("#cc79a7", (-20, 11)),
    "adasum of deltas": ("#e69f00", (-95, 5)),
}
"""The strategies that the picture labels: their colours, and their labels' offsets in points.

All other strategies are grey.
"""


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws a panel per task and a point per strategy, the mean over seeds at the last step."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(result["tasks"])
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(5.6 * len(tasks), 4.2), squeeze=False, layout="constrained"
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        rows = [row for row in result["rows"] if row["task"] == task]
        points = {
            row["strategy"]: (row["received_bytes"][-1] / 1e6, accuracy_of(row)) for row in rows
        }
        mean = points.get("mean", (0.0, 0.0))[1]
        for name, (mb, accuracy) in points.items():
            if name not in NAMED:
                axis.scatter(mb, accuracy, color="#c0c0c0", s=25, zorder=2)
                continue
            color, offset = NAMED[name]
            axis.scatter(mb, accuracy, color=color, s=60, zorder=3)
            axis.annotate(
                name, (mb, accuracy), offset, textcoords="offset points", fontsize=8.5, color=color
            )
        axis.axhline(mean, color="#0072b2", lw=0.8, linestyle=":")
        axis.set(xlabel="MB that a rank receives", ylabel="test accuracy at the end", title=task)
        axis.set_xscale("log")
        lowest = min(
            (accuracy for name, (_, accuracy) in points.items() if name in NAMED), default=0.0
        )
        axis.set_ylim(
            lowest - 0.03, max(accuracy for _, accuracy in points.values()) + 0.015
        )  # diverged runs lie below this
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_answer(result), fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def accuracy_of(row: dict[str, Any]) -> float:
    """Returns the mean over seeds at the last step, or 0 if all seeds diverged."""
    ends = [seed[-1] for seed in row["accuracy"] if seed[-1] is not None]
    return sum(ends) / len(ends) if ends else 0.0


def _answer(result: dict[str, Any]) -> str:
    """Returns the picture's question with its answer: top-k against the mean in each task."""
    ends = {(row["task"], row["strategy"]): accuracy_of(row) for row in result["rows"]}
    sparse = "top_k 1%, exact"
    over = [
        f"{ends[task, sparse] - ends[task, 'mean']:+.3f} accuracy on {task}"
        for task in result["tasks"]
        if (task, sparse) in ends and (task, "mean") in ends
    ]
    answer = f"\n{sparse}: {', '.join(over)}, against the mean" if over else ""
    return f"What do fewer bytes cost?{answer}"
