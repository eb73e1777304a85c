"""Arranges the ranks in a grid with named axes: sizes, coordinates, and groups that exchange.

Pure functions without any MPI.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxcross._arguments import is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """The ranks of a world as a row-major grid, from one rank's point of view.

    Attributes:
        names: The axes, outermost first.
        shape: Number of ranks along each axis.
        coords: This rank's position along each axis.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    coords: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each axis, by name. Steps are traced with these axis sizes."""
        return dict(zip(self.names, self.shape, strict=True))

    @property
    def rank(self) -> int:
        return int(np.ravel_multi_index(self.coords, self.shape)) if self.shape else 0

    def index(self, axis: str) -> int:
        """This rank's position along one axis, as returned by `jax.lax.axis_index`."""
        return self.coords[self._position(axis)]

    def group(
        self, axes: Sequence[str], groups: Sequence[Sequence[int]] | None = None
    ) -> tuple[int, ...]:
        """Returns the world ranks that exchange with this rank over `axes`, including itself.

        They're ordered by JAX's flattened axis index.

        Args:
            axes: The axes in the order the user wrote them. The first axis varies slowest.
            groups: JAX's `axis_index_groups`, i.e. lists of positions within the flattened axes.

        Raises:
            ValueError: An axis isn't in the mesh or occurs twice, or no group contains this rank.
        """
        where = [self._position(a) for a in axes]
        if len(set(where)) != len(where):
            raise ValueError(f"An exchange must name each axis once, got {tuple(axes)!r}.")
        ranks = np.arange(math.prod(self.shape)).reshape(self.shape)
        line = ranks[tuple(slice(None) if i in where else c for i, c in enumerate(self.coords))]
        kept = sorted(where)
        flat = [int(r) for r in line.transpose([kept.index(w) for w in where]).reshape(-1)]
        if groups is None:
            return tuple(flat)
        mine = flat.index(self.rank)
        for members in groups:
            if mine in members:
                return tuple(flat[i] for i in members)
        raise ValueError(
            f"`axis_index_groups` must contain each index over {tuple(axes)!r}, but {mine} is "
            f"missing, got {groups!r}."
        )

    def _position(self, axis: str) -> int:
        if axis not in self.names:
            raise ValueError(
                f"Unknown axis {axis!r}: the mesh has {', '.join(map(repr, self.names))}."
            )
        return self.names.index(axis)


def axis_sizes(axes: str | Mapping[str, int]) -> dict[str, int]:
    """Returns the size of each axis by name. One size may still be -1.

    Use this before the number of ranks is known. It checks everything about `axes` that doesn't
    depend on that number.

    Raises:
        TypeError: `axes` is neither a name nor a mapping.
        ValueError: There are no axes, a size is invalid, or more than one size is -1.
    """
    if isinstance(axes, str):
        return {axes: -1}
    if not isinstance(axes, Mapping):
        raise TypeError(
            '`axes` must be one name, such as "batch", for an axis over all ranks, or a mapping of '
            f'names to sizes, such as {{"batch": -1}}, got `{axes!r}`.'
        )
    if not axes:
        raise ValueError(f"`axes` must contain at least one axis, got `{axes!r}`.")
    for name, n in axes.items():
        if not isinstance(name, str) or not is_whole(n) or (n < 1 and n != -1):
            raise ValueError(
                "`axes` must map strings to whole numbers, 1 or more, or -1 for the "
                f"remaining ranks, got size {n!r} for axis {name!r}."
            )
    free = [name for name, n in axes.items() if n == -1]
    if len(free) > 1:
        raise ValueError(
            f"Only one size in `axes` may be -1, got -1 for {', '.join(map(repr, free))}. Give the "
            "size of all but one of them."
        )
    return {name: int(n) for name, n in axes.items()}


def make_rank_grid(axes: str | Mapping[str, int], *, rank: int, size: int) -> RankGrid:
    """Returns the grid described by `axes`, from one rank's point of view.

    Args:
        axes: A single name (for one axis spanning all ranks), or a mapping from names to sizes,
            outermost first. One size may be -1.
        rank: The rank whose point of view it is.
        size: Number of ranks.

    Raises:
        TypeError: `axes` is neither a name nor a mapping.
        ValueError: `axes` is invalid, or the product of the sizes isn't `size`.
    """
    wanted = axis_sizes(axes)
    known = math.prod(n for n in wanted.values() if n != -1)
    free = [name for name, n in wanted.items() if n == -1]
    if free and size % known:
        raise ValueError(
            f"{size} ranks cannot be split over {wanted}: {size} is not a multiple of {known}. "
            f"Start a multiple of {known} ranks, or change the sizes."
        )
    if free:
        wanted[free[0]] = size // known
    elif known != size:
        raise ValueError(
            f"The axes {wanted} multiply to {known}, but there are {size} ranks. "
            f"Start {known} ranks (`mpirun -n {known}`), or let one axis be -1."
        )
    shape = tuple(wanted.values())
    coords = tuple(int(c) for c in np.unravel_index(rank, shape))
    return RankGrid(names=tuple(wanted), shape=shape, coords=coords)
