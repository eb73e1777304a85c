"""Colours and shapes shared by the pictures of the documentation."""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

IMAGES = Path(__file__).parents[1] / "images"
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
GREY, DARK, PALE = "#666666", "#333333", "#f6f6f6"


def target(name: str) -> Path:
    """Returns the file given on the command line, or `docs/images/NAME`."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "file", nargs="?", type=Path, default=IMAGES / name, help="where to write the picture"
    )
    return parser.parse_args().file


def canvas(width: float, height: float, *, right: float, top: float) -> tuple[Figure, Axes]:
    """Returns an empty figure of this size in inches.

    It has a single plot, whose coordinates go up to `right` and `top`.
    """
    figure = Figure(figsize=(width, height), dpi=150)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set_xlim(-0.1, right)
    axes.set_ylim(-0.1, top)
    axes.axis("off")
    return figure, axes


def title(axes: Axes, y: float, text: str) -> None:
    """Writes the question that the picture answers."""
    axes.text(0, y, text, fontsize=12.5, weight="bold", va="center")


def rounded(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    *,
    fill: str,
    dashed: bool = False,
) -> None:
    style = "round,pad=0.02,rounding_size=0.1"
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=color, linewidth=1.5
    )
    patch.set_linestyle("--" if dashed else "-")
    axes.add_patch(patch)


def bar(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    color: str,
    *,
    hatched: bool = False,
    text: str = "",
) -> None:
    """Draws an interval of time in a lane: filled for computation, hatched for an exchange."""
    fill = f"{color}33" if hatched else color
    axes.add_patch(
        Rectangle(
            (x, y),
            width,
            0.6,
            facecolor=fill,
            edgecolor=color,
            hatch="///" if hatched else None,
            linewidth=1,
        )
    )
    if text:
        box = dict(facecolor="white", edgecolor="none", pad=1.0, alpha=0.9) if hatched else None
        axes.text(
            x + width / 2,
            y + 0.29,
            text,
            ha="center",
            va="center",
            fontsize=8.5,
            color=DARK if hatched else "white",
            bbox=box,
        )


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, style: str = "-|>"
) -> None:
    """Draws an arrow along which data or control flows."""
    look = dict(
        arrowstyle=style, color=color, linewidth=1.6, shrinkA=0, shrinkB=0, mutation_scale=13
    )
    axes.annotate("", end, start, arrowprops=look)
