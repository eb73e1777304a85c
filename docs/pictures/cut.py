"""Draws `docs/images/cut.png`: one step of one job, uncut and cut where gradients become ready.

python docs/pictures/cut.py [FILE]
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, DARK, GREEN, GREY, RED, arrow, bar, canvas, target, title

X = 2.6
LAYERS = (GREEN, RED, BLUE)  # the last layer's gradient is ready first


def lanes(axes: Axes, y: float, heading: str) -> None:
    """Labels the two lanes for one way of cutting."""
    axes.text(0, y + 2.0, heading, fontsize=10, weight="bold", va="center")
    for name, offset in (("compute", 1.0), ("exchange", 0.1)):
        axes.text(0.3, y + offset + 0.3, name, fontsize=9, color=GREY, va="center")


def draw() -> Figure:
    """Returns the figure. Needs no display."""
    figure, axes = canvas(11, 4.6, right=13.6, top=6.1)
    title(
        axes,
        5.85,
        "Where is a step cut?  Where the gradients of one layer after the other become ready",
    )

    lanes(axes, 3.1, 'cut="whole": three segments')
    bar(axes, X, 4.1, 1.8, GREY, text="forward")
    for number, (color, text) in enumerate(
        zip(LAYERS, ("layer 3", "layer 2", "layer 1"), strict=True)
    ):
        bar(axes, X + 1.8 + number, 4.1, 1, color, text=text)
        bar(axes, X + 4.8 + 1.2 * number, 3.2, 1.2, color, hatched=True)
    bar(axes, X + 8.4, 4.1, 1, GREY, text="optimizer")
    arrow(axes, (X + 4.8, 4.1), (X + 4.85, 3.84), DARK)
    arrow(axes, (X + 8.4, 3.8), (X + 8.45, 4.06), DARK)

    lanes(axes, 0.3, "cut=3: seven segments")
    bar(axes, X, 1.3, 1.8, GREY, text="forward")
    for number, (color, text) in enumerate(
        zip(LAYERS, ("layer 3", "layer 2", "layer 1"), strict=True)
    ):
        bar(axes, X + 1.8 + number, 1.3, 1, color, text=text)
        bar(axes, X + 2.8 + 1.2 * number, 0.4, 1.2, color, hatched=True)
        arrow(axes, (X + 2.8 + number, 1.3), (X + 2.85 + 1.2 * number, 1.04), DARK)
        if number:
            axes.plot([X + 1.8 + number] * 2, [1.2, 2.0], color=DARK, linewidth=1.5, linestyle="--")
    bar(axes, X + 6.4, 1.3, 1, GREY, text="optimizer")
    arrow(axes, (X + 6.4, 1.0), (X + 6.45, 1.26), DARK)
    axes.annotate(
        "",
        (X + 7.4, 0.9),
        (X + 9.4, 0.9),
        arrowprops=dict(arrowstyle="<->", color=GREY, linewidth=1.2),
    )
    axes.text(X + 8.4, 1.05, "saved", ha="center", fontsize=9, color=GREY)
    axes.plot([X + 9.4] * 2, [0.4, 4.0], color=GREY, linewidth=0.8, linestyle=":")
    axes.text(
        X,
        0.02,
        "Dashed: cuts of the backward pass. Each costs fusion and memory, so more cuts are not "
        "always faster.",
        fontsize=8.5,
        color=DARK,
    )
    return figure


if __name__ == "__main__":
    draw().savefig(target("cut.png"))
