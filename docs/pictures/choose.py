"""Draws `docs/images/choose.png`, a decision tree for choosing a gradient exchange.

python docs/pictures/choose.py [FILE]
"""

from __future__ import annotations

from matplotlib.figure import Figure
from style import BLUE, DARK, GREEN, GREY, arrow, canvas, rounded, target, title

# A question, and the exchange to use if the answer is yes. Otherwise, ask the next question.
QUESTIONS = (
    (
        "Are ranks of unequal speed?",
        "ParameterServer",
        "a worker waits only if it is too far ahead",
    ),
    ("Is the optimizer's state too large?", "sharded_optimizer", "1/P of it on each rank"),
    ("Do all exchanges hide?\n(sum of m at most sum of c)", "mean", "nothing to tune"),
    (
        "Do several ranks share a node?",
        'mean(pattern="hierarchical")',
        "in bfloat16: half of the bytes, one stream a node",
    ),
    (
        "Would half of the bytes hide?",
        "mean(wire_dtype=bfloat16)",
        "the same accuracy on both tasks",
    ),
    (
        "Is a larger batch welcome anyway?",
        "local_sgd(every=H)",
        "1/H of the bytes; ranks drift apart in between",
    ),
    (
        "Are most parameters in large matrices?",
        "power_sgd(rank)",
        "two thin factors instead of each matrix",
    ),
)
ELSE = ("top_k(density)", "few ranks, a slow network; else see the table of exchanges")


def draw() -> Figure:
    """Returns the figure. Needs no display."""
    figure, axes = canvas(9.5, 6.6, right=11.6, top=9.1)
    title(axes, 8.8, "Which exchange?  The first one whose question you answer with yes")
    for number, (question, exchange, note) in enumerate(QUESTIONS):
        y = 7.6 - 1.05 * number
        rounded(axes, 0, y, 4.2, 0.72, BLUE, fill=f"{BLUE}18")
        axes.text(2.1, y + 0.36, question, ha="center", va="center", fontsize=9, color=DARK)
        rounded(axes, 5.6, y, 5.8, 0.72, GREEN, fill=f"{GREEN}18")
        axes.text(
            5.8, y + 0.5, exchange, va="center", fontsize=9.5, weight="bold", family="monospace"
        )
        axes.text(5.8, y + 0.19, note, va="center", fontsize=8.2, color=DARK)
        arrow(axes, (4.25, y + 0.36), (5.52, y + 0.36), GREEN)
        axes.text(4.85, y + 0.46, "yes", ha="center", fontsize=8.5, color=GREEN)
        arrow(axes, (2.1, y - 0.03), (2.1, y - 0.28), GREY)
        axes.text(2.25, y - 0.17, "no", va="center", fontsize=8.5, color=GREY)
    y = 7.6 - 1.05 * len(QUESTIONS)
    rounded(axes, 0, y, 4.2, 0.72, GREY, fill="#f6f6f6")
    axes.text(
        2.1,
        y + 0.5,
        ELSE[0],
        ha="center",
        va="center",
        fontsize=9,
        weight="bold",
        family="monospace",
    )
    axes.text(2.1, y + 0.19, ELSE[1], ha="center", va="center", fontsize=8.2, color=DARK)
    return figure


if __name__ == "__main__":
    draw().savefig(target("choose.png"))
