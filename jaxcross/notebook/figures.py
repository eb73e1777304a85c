"""A backend for matplotlib that shows a rank's figures in the notebook.

`MPLBACKEND` names this module on the ranks. Otherwise, they'd inherit the backend of the kernel,
which only works in a kernel.
"""

from __future__ import annotations

import builtins
import io
from typing import Any

from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg

FigureCanvas = FigureCanvasAgg
"""matplotlib takes this name, and `show`, from its backends."""


def show(*_: Any, **__: Any) -> None:
    """Shows all open figures, and closes them. On ranks other than 0, only closes them."""
    display: Any = builtins.__dict__["display"]
    try:
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
    finally:
        pyplot.close("all")


def png(figure: Any) -> bytes:
    """Returns a figure as the bytes of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", bbox_inches="tight")
    return data.getvalue()
