"""Draws `docs/images/streets.png`, the package's folders in two rings.

The inner ring has the path of a step and that of a loop; the outer ring is built on it.

    python docs/pictures/streets.py [FILE]

A test compares the folders named here with those that exist.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import BLUE, DARK, GREY, ORANGE, PALE, arrow, canvas, rounded, target, title

# Folder -> a short description of its contents.
FOLDERS = {
    "step": "`crossover`: one variant for\neach set of argument types",
    "program": "trace, flatten, cut,\nprint, verify, compile",
    "wire": "collectives as MPI messages,\npacked into few buffers",
    "jobs": "runner, loops, batches,\nwhat a training function calls",
    "runtime": "the driver and the threads\nof the two lanes",
    "interleave": "pure decisions: which job\nis next, votes, policies",
    "world": "ranks, their start,\ncontrol messages",
    "health": "watchdog, heartbeat,\nabort of all ranks",
    "exchange": "gradient exchanges as\noptax transformations",
    "tensor": "layers split over ranks,\nup to 2.5-D",
    "server": "parameter servers",
    "data": "records and batches",
    "checkpoint": "save and restore",
    "report": "tables, pictures,\nbounds",
    "plan": "decisions before a run",
    "gains": "what sharing would gain",
    "sweeps": "trials of one function",
    "commands": "`jaxcross launch`, `demo`,\n`doctor`, ...",
    "notebook": "cells on several ranks",
    "lab": "hosts and links to test on",
}
BELOW = ("world", "health", "checkpoint", "report")  # both streets use these
GROUPS = {
    "inside a step": ("exchange", "tensor", "server"),
    "around a run": ("data", "plan", "gains", "sweeps"),
    "tools": ("commands", "notebook", "lab"),
}


WIDTH, GROUP_WIDTH = 2.8, 4.2
COLUMNS = (2.6, 6.3, 10.0)


def draw_street(
    axes: Axes, y: float, own: str, name: str, color: str, folders: tuple[str, ...]
) -> None:
    """Draws what the user provides, followed by one folder after another."""
    axes.text(0, y + 1.17, name, fontsize=9.5, color=color, style="italic")
    rounded(axes, 0, y, 1.6, 1, color, fill="white", dashed=True)
    axes.text(0.8, y + 0.5, own, ha="center", va="center", fontsize=11, weight="bold")
    end = 1.65
    for x, folder in zip(COLUMNS, folders, strict=True):
        # The driver sends events to the interleaver and receives instructions in return.
        arrow(
            axes,
            (end, y + 0.5),
            (x - 0.07, y + 0.5),
            color,
            "<|-|>" if folder == "interleave" else "-|>",
        )
        rounded(axes, x, y, WIDTH, 1, color, fill=f"{color}22")
        axes.text(
            x + WIDTH / 2,
            y + 0.77,
            f"{folder}/",
            ha="center",
            va="center",
            fontsize=11,
            weight="bold",
        )
        axes.text(
            x + WIDTH / 2,
            y + 0.34,
            FOLDERS[folder],
            ha="center",
            va="center",
            fontsize=8.5,
            color=DARK,
        )
        end = x + WIDTH + 0.07


def draw_folder(axes: Axes, folder: str, x: float, y: float, width: float, height: float) -> None:
    """Draws a folder off the streets."""
    rounded(axes, x, y, width, height, "#aaaaaa", fill=PALE)
    axes.text(x + 0.12, y + height / 2, f"{folder}/", va="center", fontsize=9.5, weight="bold")
    axes.text(x + 1.45, y + height / 2, FOLDERS[folder], va="center", fontsize=7.8, color=DARK)


def draw_group(axes: Axes, x: float, title: str, folders: tuple[str, ...]) -> None:
    """Draws folders of the outer ring, one below the other."""
    axes.text(
        x + GROUP_WIDTH / 2, 2.0, title, ha="center", fontsize=9.5, color=GREY, style="italic"
    )
    height = 1.85 / len(folders)
    for number, folder in enumerate(folders):
        y = 1.85 - (number + 1) * height
        draw_folder(axes, folder, x, y + 0.05, GROUP_WIDTH, height - 0.1)


def draw() -> Figure:
    """Returns the figure. Needs no display."""
    figure, axes = canvas(11, 6.6, right=13.3, top=8.1)
    title(
        axes,
        7.85,
        "Where does a line of code live?  In the machine, on one of its two streets, or in what is "
        "built on it",
    )
    axes.set_xlim(-0.35, 13.35)
    rounded(axes, -0.2, 2.8, 13.35, 4.75, GREY, fill="white", dashed=True)
    draw_street(axes, 6.15, "your step", "compile street", BLUE, ("step", "program", "wire"))
    draw_street(axes, 4.3, "your loop", "run street", ORANGE, ("jobs", "runtime", "interleave"))
    middle = COLUMNS[1] + WIDTH / 2
    arrow(axes, (middle, 6.08), (middle, 5.37), GREY)
    axes.text(
        middle + 0.15, 5.72, "executables for the lanes", fontsize=8.5, color=GREY, va="center"
    )
    width = 12.95 / len(BELOW)
    for number, folder in enumerate(BELOW):
        draw_folder(axes, folder, number * width, 3.05, width - 0.15, 0.8)
    axes.text(12.8, 7.32, "the machine", ha="right", fontsize=9.5, color=GREY, style="italic")
    for number, (group, folders) in enumerate(GROUPS.items()):
        draw_group(axes, number * (GROUP_WIDTH + 0.25), group, folders)
    return figure


if __name__ == "__main__":
    draw().savefig(target("streets.png"))
