"""The picture of `convergence.py`: loss and accuracy against steps and against received bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PANELS = (("test_loss", "steps"), ("test_loss", "MB"), ("accuracy", "steps"), ("accuracy", "MB"))
WORDS = {"test_loss": "test loss", "accuracy": "test accuracy", "steps": "steps", "MB": "MB received a rank"}


def looks_of(names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """A colour and a line's style for each, all different: up to 50."""
    colours = [f"C{n}" for n in range(10)]  # matplotlib's own cycle
    styles = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
    return dict(zip(names, itertools.product(styles, colours), strict=False))


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes it. Curves are means over seeds; each strategy has the same look in every panel."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["strategy"] for row in result["rows"]))
    looks = looks_of(names)
    tasks = list(result["tasks"])
    figure, axes = plt.subplots(
        len(tasks), len(PANELS), figsize=(19, 4.5 * len(tasks)), squeeze=False, layout="constrained"
    )
    for line, task in zip(axes, tasks, strict=True):
        rows = [row for row in result["rows"] if row["task"] == task]
        every = result["tasks"][task]["every"]
        for axis, (value, against) in zip(line, PANELS, strict=True):
            for row in rows:
                mean = np.mean(np.asarray(row[value], float), axis=0)  # null, where it diverged, is NaN: a gap
                steps = [every * (n + 1) for n in range(len(mean))]
                at = steps if against == "steps" else [nbytes / 1e6 for nbytes in row["received_bytes"]]
                style, colour = looks[row["strategy"]]
                axis.plot(at, mean, color=colour, linestyle=style, label=row["strategy"], lw=1.3)
            axis.set(xlabel=WORDS[against], ylabel=WORDS[value], title=task)
            axis.grid(alpha=0.3)
            if against == "MB":
                axis.set_xscale("log")
            if value == "test_loss":
                axis.set_yscale("log")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)
