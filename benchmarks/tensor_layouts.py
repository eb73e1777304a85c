"""Which rank holds which part? Draws the layouts as `tensor.Mesh` itself cuts them, for the page of
that name.

python benchmarks/tensor_layouts.py docs/images/tensor-layouts.png
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib
import numpy as np

from jaxcross.tensor import Mesh

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

MESHES = {
    "1-D on 4": Mesh(tensor=4), "2-D [2,2,1]": Mesh(side=2), "2.5-D [2,2,2]": Mesh(side=2, depth=2),
}  # fmt: skip
CELLS = 4  # per side; every mesh divides this number


def tensors(mesh: Mesh) -> dict[str, Any]:
    """Maps the name of each drawn tensor to the axes over which its rows and columns are cut."""
    rows = tuple(mesh.batch) or None
    return {
        "activations between blocks\nbatch x features": (rows, *(mesh.hidden or (None,))),
        "activations inside a block\nbatch x 4 features": (rows, *(mesh.inner or (None,))),
        "a block's first matrix": mesh.spec("column"),
        "a block's last matrix": mesh.spec("row"),
    }


def holders(mesh: Mesh, spec: Any) -> dict[tuple[int, int, int, int], list[int]]:
    """Maps each rectangle (row, column, height, width), in cells, to the ranks that hold it."""
    cells, found = np.arange(CELLS**2).reshape(CELLS, CELLS), {}
    for rank in range(mesh.ranks):
        mine = mesh.part(cells, spec, rank)
        row, col = divmod(int(mine[0, 0]), CELLS)
        found.setdefault((row, col, *mine.shape), []).append(rank)
    return found


def main(path: str) -> None:
    columns = list(tensors(Mesh()))
    figure, grid = plt.subplots(len(MESHES), len(columns), figsize=(10, 8), layout="constrained")
    colours = plt.get_cmap("Set3").colors
    for n, (line, (name, mesh)) in enumerate(zip(grid, MESHES.items(), strict=True)):
        for axes, (title, spec) in zip(line, tensors(mesh).items(), strict=True):
            for (row, col, height, width), ranks in holders(mesh, spec).items():
                colour = colours[ranks[0] % len(colours)]
                axes.add_patch(
                    Rectangle((col, row), width, height, facecolor=colour, edgecolor="black")
                )
                axes.text(
                    col + width / 2,
                    row + height / 2,
                    " ".join(map(str, ranks)),
                    ha="center",
                    va="center",
                )
            axes.set(
                xlim=(-0.05, CELLS + 0.05),
                ylim=(CELLS + 0.05, -0.05),
                aspect="equal",
                xticks=[],
                yticks=[],
            )
            axes.set_frame_on(False)
            if n == 0:
                axes.set_title(title, fontsize=10)
        line[0].set_ylabel(name, fontsize=11)
    figure.suptitle("Ranks that hold each part", fontsize=12)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main(sys.argv[1])
