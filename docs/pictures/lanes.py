"""Draws `docs/images/lanes.png`, one rank's threads and queues during one step of two jobs.

python docs/pictures/lanes.py [FILE]
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, DARK, GREY, ORANGE, PALE, arrow, bar, canvas, rounded, target, title

X, ROWS = (
    3.3,
    {"job a": 5.0, "job b": 4.1, "interleaver": 3.2, "compute lane": 2.0, "exchange lane": 1.0},
)
NOTES = {
    "job a": "thread of its loop",
    "job b": "thread of its loop",
    "interleaver": "called by whichever thread\nhas an event",
    "compute lane": "one thread, the accelerator",
    "exchange lane": "one thread, the network",
}


def loop(axes: Axes, y: float, calls: float, returns: float, color: str) -> None:
    """Draws a job's thread, which waits while its step is called."""
    axes.plot([X, calls], [y + 0.3, y + 0.3], color=color, linewidth=4, solid_capstyle="butt")
    axes.plot([calls, returns], [y + 0.3, y + 0.3], color=color, linewidth=1.5, linestyle=":")
    axes.plot([returns, 14.4], [y + 0.3, y + 0.3], color=color, linewidth=4, solid_capstyle="butt")
    axes.text(calls, y + 0.52, "step(state, batch)", fontsize=8, color=DARK, ha="left")
    axes.text(returns, y + 0.52, "returns", fontsize=8, color=DARK, ha="left")


def draw() -> Figure:
    """Returns the figure. Needs no display."""
    figure, axes = canvas(11, 4.9, right=14.6, top=6.4)
    title(
        axes, 6.15, "Which thread does what?  Loops call, the interleaver decides, two lanes work"
    )
    for name, y in ROWS.items():
        axes.text(0, y + 0.42, name, fontsize=10, weight="bold", va="center")
        axes.text(0, y + 0.08, NOTES[name], fontsize=7.8, color=GREY, va="center")
    rounded(axes, X, ROWS["interleaver"] + 0.05, 11.1, 0.5, GREY, fill=PALE)
    axes.text(
        X + 5.5,
        ROWS["interleaver"] + 0.3,
        "events in, instructions out; no thread of its own, no clock",
        ha="center",
        va="center",
        fontsize=8.5,
        color=DARK,
    )

    loop(axes, ROWS["job a"], 3.9, 10.6, BLUE)
    loop(axes, ROWS["job b"], 4.5, 13.6, ORANGE)
    compute, exchange, middle = ROWS["compute lane"], ROWS["exchange lane"], ROWS["interleaver"]
    bar(axes, 4.2, compute, 2.3, BLUE, text="a 0: gradients")
    bar(axes, 6.55, compute, 2.6, ORANGE, text="b 0: gradients")
    bar(axes, 9.8, compute, 0.75, BLUE, text="a 2")
    bar(axes, 12.8, compute, 0.75, ORANGE, text="b 2")
    bar(axes, 6.55, exchange, 2.9, BLUE, hatched=True, text="a 1: exchange")
    bar(axes, 9.7, exchange, 2.8, ORANGE, hatched=True, text="b 1: exchange")
    for x, text in ((4.2, "vote"), (9.45, ""), (12.5, "")):
        bar(axes, x, exchange, 0.22, DARK)
        axes.text(x + 0.1, exchange - 0.2, text or "commit", fontsize=8, color=DARK, ha="center")
    for x, y, color in ((4.0, ROWS["job a"], BLUE), (4.6, ROWS["job b"], ORANGE)):
        arrow(axes, (x, y + 0.24), (x, middle + 0.58), color)
    for x, lane, color in (
        (4.3, compute, BLUE),
        (6.65, compute, ORANGE),
        (9.9, compute, BLUE),
        (12.9, compute, ORANGE),
    ):
        arrow(axes, (x, middle + 0.02), (x, lane + 0.64), color)
    axes.text(4.45, 2.86, "dispatch", fontsize=7.8, color=GREY, va="center")
    arrow(axes, (6.5, compute), (6.6, exchange + 0.64), BLUE)
    arrow(axes, (9.5, exchange + 0.6), (9.85, compute - 0.04), BLUE)
    arrow(axes, (12.55, exchange + 0.6), (12.85, compute - 0.04), ORANGE)
    arrow(axes, (10.55, middle + 0.58), (10.6, ROWS["job a"] + 0.24), BLUE)
    arrow(axes, (13.55, middle + 0.58), (13.6, ROWS["job b"] + 0.24), ORANGE)
    axes.text(
        X,
        0.45,
        "Segment 2 overwrites the job's state. It runs only after the commit: every rank has made "
        "the exchange.",
        fontsize=8.5,
        color=DARK,
    )
    arrow(axes, (X, 0.1), (14.4, 0.1), GREY)
    axes.text(14.4, 0.25, "time", fontsize=8, color=GREY, ha="right")
    return figure


if __name__ == "__main__":
    draw().savefig(target("lanes.png"))
