"""Draws `docs/images/vote.png`, one step on two ranks with its votes, also when a rank fails.

python docs/pictures/vote.py [FILE]
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, DARK, GREY, RED, bar, canvas, target, title

X = 2.4


def vote(axes: Axes, x: float, low: float, text: str, color: str = DARK) -> None:
    """Draws an all-reduce over both ranks."""
    for y in (low, low + 0.9):
        bar(axes, x, y, 0.25, color)
    axes.plot([x + 0.125] * 2, [low + 0.6, low + 0.9], color=color, linewidth=2)
    axes.text(
        x + 0.125,
        low - 0.16,
        text,
        ha="center",
        va="top",
        fontsize=8.2,
        color=color,
        linespacing=1.25,
    )


def draw() -> Figure:
    """Returns the figure. Needs no display."""
    figure, axes = canvas(11, 5.2, right=13.3, top=7.0)
    title(
        axes,
        6.75,
        "When does a step count?  When the vote after its last exchange finds that no rank has "
        "failed",
    )
    for low, heading in ((4.3, "no rank fails"), (1.0, "rank 1 fails")):
        axes.text(0, low + 1.85, heading, fontsize=10, weight="bold", va="center")
        for number in range(2):
            axes.text(
                0.3,
                low + 0.9 * (1 - number) + 0.3,
                f"rank {number}",
                fontsize=9,
                color=GREY,
                va="center",
            )

    low = 4.3
    bar(axes, X, low + 0.9, 2.6, BLUE, text="gradients")
    bar(axes, X, low, 3.0, BLUE, text="gradients")
    for y in (low, low + 0.9):
        bar(axes, X + 3.55, y, 2.6, BLUE, hatched=True, text="exchange")
        bar(axes, X + 7.0, y, 1.6, BLUE, text="new state")
    vote(axes, X + 3.1, low, "vote: do all ranks\ncall this step?")
    vote(axes, X + 6.4, low, "vote: has some\nrank failed?  no")
    axes.text(
        X + 8.8,
        low + 0.75,
        "committed:\nstate n+1 on both ranks",
        fontsize=9,
        color=DARK,
        va="center",
    )

    low = 1.0
    bar(axes, X, low + 0.9, 2.6, BLUE, text="gradients")
    bar(axes, X, low, 1.4, BLUE, text="gradients")
    axes.text(X + 1.55, low + 0.3, "out of memory", fontsize=8.5, color=RED, va="center")
    bar(axes, X + 3.55, low + 0.9, 2.6, BLUE, hatched=True, text="exchange")
    bar(axes, X + 3.55, low, 2.6, RED, hatched=True, text="exchange of zeros")
    vote(axes, X + 3.1, low, "vote: do all ranks\ncall this step?")
    vote(axes, X + 6.4, low, "vote: has some\nrank failed?  yes", RED)
    axes.text(
        X + 7.1,
        low + 0.75,
        "not committed: both ranks keep state n,\nthe job leaves with one error on all "
        "ranks,\nother jobs go on",
        fontsize=9,
        color=DARK,
        va="center",
    )
    return figure


if __name__ == "__main__":
    draw().savefig(target("vote.png"))
