"""The mesh of ranks that hold a model, and how tensors are cut over it depending on their role.

There are three layouts: Megatron-LM's 1-D layout (arXiv 1909.08053), Optimus' 2-D layout (arXiv
2104.05343), and the 2.5-D layout of SUMMA2.5-LM and Tesseract (arXiv 2105.14500). A mesh with just
one rank gives you the serial model. This module is pure and doesn't communicate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from jaxcross._pytree import PyTree
from jaxcross._tracing import current_tracing
from jaxcross.errors import quoted

Role = Literal["column", "row", "table", "positions", "inner", "hidden"]
Spec = tuple[str | tuple[str, ...] | None, ...]

ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array)

# How a parameter is cut depends on its role in the model. For each role, these tables list the axis
# over which each dimension of the parameter is cut, or None for dimensions that aren't cut. Nothing
# else determines how a model is stored on a grid or a line of ranks.
_GRID: dict[Role, Spec] = {
    "column": ("row", "col"),
    "row": ("row", "col"),
    "table": ("row", "col"),
    "positions": (None, "col"),
    "inner": ("col",),
    "hidden": ("col",),
}
_LINE: dict[Role, Spec] = {
    "column": (None, "tensor"),
    "row": ("tensor", None),
    "table": ("tensor", None),
    "positions": (None, None),
    "inner": ("tensor",),
    "hidden": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks that hold a model, as a grid with named axes.

    `Mesh()` is the serial model, `Mesh(tensor=p)` is 1-D, `Mesh(side=q)` is 2-D on q x q ranks, and
    `Mesh(side=q, depth=d)` is 2.5-D on q x q x d ranks. Add `data=n` for n replicas of any of
    these. Ranks are numbered in row-major order over `axes`. You pass the mesh to the layers, which
    refer to its axes by name. It must be the same on every rank.

    ```python
    mesh = jaxcross.tensor.Mesh(side=2, depth=2)
    step = jaxcross.crossover(train_step, axes=mesh.axes)
    ```

    Attributes:
        data: Number of replicas of the rest of the mesh, each of which gets part of the batch.
        tensor: Number of ranks along the axis `tensor` (1-D).
        depth: Number of layers of the grid along the axis `depth` (2.5-D). They all hold the same
            weights, but work on different data.
        side: Number of ranks along `row` and along `col` (2-D, 2.5-D).
        whole: Whether a single rank holds all parts. Models are saved in this form, and the ranks'
            parts are cut from it.

    Raises:
        ValueError: A size is below 1, or both a line and a grid are requested.
    """

    data: int = 1
    tensor: int = 1
    depth: int = 1
    side: int = 1
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "depth", "side"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"`{name}` of the mesh must be a whole number of ranks, at least 1, got "
                    f"`{size!r}`."
                )
        if self.tensor > 1 and self.side * self.depth > 1:
            raise ValueError(
                f"The mesh has both {self.tensor} ranks along `tensor` and a grid of side "
                f"{self.side} and depth {self.depth}. Choose one of them: `tensor` for 1-D, or "
                "`side` and `depth` for 2-D and 2.5-D."
            )

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks along each axis, outermost first, ready to be passed to `crossover`.

        Only includes axes with more than one rank, or `{"data": 1}` if there aren't any.
        """
        return {name: size for name, size in self._sizes().items() if size > 1} or {"data": 1}

    @property
    def ranks(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.axes.values())

    @property
    def row(self) -> tuple[str, ...]:
        """The axis over which a matrix's rows are cut in 2-D and 2.5-D, otherwise empty.

        Also empty on a whole mesh.
        """
        return self._live("row")

    @property
    def col(self) -> tuple[str, ...]:
        """The axis over which a matrix's columns are cut in 2-D and 2.5-D, otherwise empty.

        Also empty on a whole mesh.
        """
        return self._live("col")

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes over which the batch is cut.

        There's one chunk per position along these axes. The rank at position `(data, depth, row)`
        gets chunk `(data d + depth) q + row`, where d is the number of layers and q is the side of
        the grid (SUMMA2.5-LM, section 3).
        """
        return self._live("data", "depth", "row")

    @property
    def hidden(self) -> tuple[str, ...]:
        """The axis over which features are cut between blocks.

        Empty in 1-D, where every rank holds all features.
        """
        return self.col

    @property
    def inner(self) -> tuple[str, ...]:
        """The axis over which features inside a block are cut: heads, MLP units, or logits."""
        return self._live("tensor", "col")

    def size(self, axes: Sequence[str]) -> int:
        """Returns the number of ranks along all of `axes` together; 1 on a whole mesh."""
        return 1 if self.whole else math.prod(self._sizes()[a] for a in axes)

    def spec(self, role: Role) -> Spec:
        """Returns the axis over which each dimension of a parameter of this role is cut, or None.

        Raises:
            ValueError: There's no such role.
        """
        if role not in _LINE:
            raise ValueError(
                f"The role of a parameter must be one of {', '.join(map(repr, _LINE))}, got "
                f"{role!r}."
            )
        if self.side > 1:
            return _GRID[role]
        return _LINE[role] if self.tensor > 1 else (None,) * len(_LINE[role])

    def summed(self, spec: Spec) -> tuple[str, ...]:
        """Returns the axes over which a parameter's gradient must be summed.

        These are the axes over which the batch is cut, minus any over which the parameter itself is
        cut.
        """
        return tuple(a for a in self.batch if a not in named(spec))

    def block(self, shape: Sequence[int], spec: Spec, what: str) -> tuple[int, ...]:
        """Returns the shape of each rank's part of a tensor of `shape`.

        Raises:
            ValueError: A dimension can't be divided equally, or `spec` belongs to a different mesh.
        """
        self.check_spec(spec, what)
        for dim, (length, axes) in enumerate(zip(shape, spec, strict=False)):
            parts = math.prod(self._sizes()[a] for a in named((axes,)))
            if length % parts:
                raise ValueError(
                    f"{what} of shape {tuple(shape)} cannot be sharded: dimension {dim} has length "
                    f"{length}, which is no multiple of the {parts} ranks along {_names(axes)}. "
                    "Pad it, or choose a different mesh."
                )
        padded = [*spec, *[None] * (len(shape) - len(spec))]
        return tuple(n // self.size(named((axes,))) for n, axes in zip(shape, padded, strict=True))

    def here(self, value: jax.Array, spec: Spec) -> jax.Array:
        """Returns this rank's part of `value`. Sends nothing.

        Call this inside a step that binds the mesh's axes.
        """
        for dim, entry in enumerate(spec):
            axes = self._live(*named((entry,)))
            if axes:
                length = value.shape[dim] // self.size(axes)
                value = jax.lax.dynamic_slice_in_dim(
                    value, jax.lax.axis_index(axes) * length, length, dim
                )
        return value

    def part(self, value: ArrayT, spec: Spec, rank: int) -> ArrayT:
        """Returns the part of `value` that `rank` holds. Sends nothing.

        This just takes a static slice, so it works on the host as well as inside `jit`.
        """
        where = self.coords(rank)
        sizes = self._sizes()
        index = []
        for axes, length in zip(spec, self.block(value.shape, spec, "A tensor"), strict=False):
            position = 0
            for axis in named((axes,)):
                position = position * sizes[axis] + where[axis]
            index.append(slice(position * length, (position + 1) * length))
        return value[(*index, ...)]

    def local_batch(self, batch: PyTree, rank: int) -> PyTree:
        """Returns the rows of a global batch that `rank` computes. Sends nothing.

        Pass tokens and labels in the same tree, so that they're cut in the same way. Ranks whose
        positions only differ along `col` or `tensor` get the same rows, because they share the work
        on these rows.

        Raises:
            ValueError: The batch can't be divided equally, a leaf has no rows, or there's no such
                rank.
        """

        def rows(path: jax.tree_util.KeyPath, leaf: ArrayT) -> ArrayT:
            if not np.ndim(leaf):
                raise ValueError(
                    f"The batch's `{jax.tree_util.keystr(path)}` is a scalar, so it has no rows "
                    "to divide among the ranks. Pass it outside the batch, or give it a first "
                    "dimension."
                )
            return self.part(leaf, (self.batch or None,), rank)

        return jax.tree_util.tree_map_with_path(rows, batch)

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the rank's coordinate along every axis, including axes of length 1.

        On a grid of side q with d layers, the rank's number is `(data d + depth) q^2 + row q +
        col`.

        Raises:
            ValueError: There's no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(
                f"`rank` must be from 0 to {self.ranks - 1} on the mesh {self.axes}, got {rank}."
            )
        sizes = self._sizes()
        return {
            a: int(c)
            for a, c in zip(sizes, np.unravel_index(rank, tuple(sizes.values())), strict=True)
        }

    def check_ranks(self, ranks: int) -> None:
        """Checks that a run has as many ranks as the mesh.

        Raises:
            ValueError: The numbers differ.
        """
        if ranks != self.ranks:
            raise ValueError(
                f"The mesh {self.axes} needs {self.ranks} ranks, but there are {ranks}. Start "
                f"{self.ranks}, or change the mesh."
            )

    def check_bound(self) -> None:
        """Checks, from inside a step, that the step binds the mesh's axes.

        Every axis must have the same length as in the mesh. Under `crossover`, the axes must also
        be in the same order.

        Raises:
            ValueError: The length of an axis or the order of the axes differs.
            NameError: An axis isn't bound (JAX's own error).
        """
        for axis, size in {} if self.whole else self.axes.items():
            if size <= 1:
                continue
            found = jax.lax.axis_size(axis)
            if found != size:
                raise ValueError(
                    f"The mesh has {size} ranks along `{axis}`, but the step runs with {found}. "
                    "Give `crossover` (or `vmap`, `shard_map`) the mesh's own `axes`."
                )
        trace = current_tracing()
        bound = []
        if trace is not None and not self.whole:
            bound = [axis for axis in trace.axes if axis in self.axes]
        if bound != [axis for axis in self.axes if axis in bound]:
            raise ValueError(
                f"The mesh has its axes in the order {quoted(self.axes)}, the step in the order "
                f"{quoted(bound)}: ranks would hold each other's parts. Give `crossover` the "
                "mesh's own `axes`."
            )

    def check_spec(self, spec: Spec, what: str) -> None:
        """Checks that a tensor's spec was made for this mesh's layout.

        Raises:
            ValueError: The mesh is a grid and the spec names an axis of a line, or vice versa.
        """
        foreign: set[str] = set()
        if self.side * self.depth > 1:
            foreign = {"tensor"}
        elif self.tensor > 1:
            foreign = {"depth", "row", "col"}
        wrong = [a for a in named(spec) if a in foreign]
        if wrong:
            raise ValueError(
                f"{what} has a spec over {quoted(wrong)}, but the mesh has the axes "
                f"{quoted(self.axes)}, so the spec belongs to a different mesh. Take it from "
                "`partition` of a model with this mesh."
            )

    def as_whole(self) -> Mesh:
        """Returns the same mesh with `whole` set, i.e. with all parts on a single rank."""
        return replace(self, whole=True)

    def _sizes(self) -> dict[str, int]:
        return {
            "data": self.data,
            "depth": self.depth,
            "row": self.side,
            "col": self.side,
            "tensor": self.tensor,
        }

    def _live(self, *axes: str) -> tuple[str, ...]:
        return tuple(a for a in axes if self.size((a,)) > 1)


def named(spec: Sequence[Any]) -> tuple[str, ...]:
    """Returns the axes that a spec names, in order."""
    flat = [a for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,))]
    return tuple(a for a in flat if a is not None)


def _names(axes: str | tuple[str, ...] | None) -> str:
    return " x ".join(f"`{a}`" for a in named((axes,)))
