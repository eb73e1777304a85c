"""One row of the table of exchanges, and the formulas that its byte counts are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optax

from jaxcross.exchange import mean

Make = Callable[..., optax.GradientTransformation]
Shapes = Sequence[tuple[int, ...]]
Formula = Callable[[Shapes, int], int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One exchange of the table that every test of exchanges reads.

    Attributes:
        name: The strategy, and what is particular about it in this row.
        make: Axis names, in the order of `axes` -> the transformation. If `sized`, also gets
            `sizes=`, name -> ranks.
        lossless: Like `make`, for the setting in which the strategy loses nothing and must equal
            `reference`; None if it has no such setting.
        reference: What `lossless` must equal. For exchanges of gradients, `mean` over all axes.
        axes: Ranks -> axis name -> size.
        identical: Whether updates (kinds `gradient` and `delta`) or parameters (kind `parameter`)
            are bit for bit identical across ranks, given that all ranks start from the same
            parameters.
        kind: What is exchanged.
        worlds: Ranks -> whether the strategy is defined for them.
        bytes: (leaf shapes, ranks) -> bytes that one rank receives in step 0 for float32 leaves,
            by the formula in the strategy's docstring.
        later: A step that exchanges something else, and its bytes; None if all steps are alike.
        rtol: Tolerance of MPI against `vmap`, and of `lossless` against `reference`.
        steps: Number of steps to run, enough for counters to wrap around.
        deterministic: Whether two runs give the same bits.
        spreads: Ranks -> number of steps after which a NaN in one rank's gradient has reached all
            ranks, including the step of the NaN.
        spoils: Number of steps for which that gradient has a NaN. More than one if a round chooses
            whose gradients it reads.
        rests: Whether zero gradients give updates of exactly zero. The mean of equal parameters
            is rounded, so exchanges of parameters may not.
        sized: Whether `make` and `lossless` need the sizes of the axes.
        shared: State -> the part of it that is bit for bit identical across ranks.
    """

    name: str
    make: Make
    lossless: Make | None = None
    reference: Make = lambda *axes: mean(axes)
    axes: Callable[[int], dict[str, int]] = lambda ranks: {"batch": ranks}
    identical: bool = True
    kind: Literal["gradient", "delta", "parameter"] = "gradient"
    worlds: Callable[[int], bool] = lambda ranks: True
    bytes: Formula
    later: tuple[int, Formula] | None = None
    rtol: float = 2e-5
    steps: int = 3
    deterministic: bool = True
    spreads: Callable[[int], int] = lambda ranks: 1
    spoils: int = 1
    rests: bool = True
    sized: bool = False
    shared: Callable[[Any], Any] = lambda state: ()

    def made(self, ranks: int, *, lossless: bool = False) -> optax.GradientTransformation:
        """The transformation for `ranks` ranks."""
        make = self.lossless if lossless else self.make
        assert make is not None, self.name
        return self._call(make, ranks)

    def referred(self, ranks: int) -> optax.GradientTransformation:
        """What `lossless` must equal on `ranks` ranks."""
        return self.reference(*self.axes(ranks))

    def _call(self, make: Make, ranks: int) -> optax.GradientTransformation:
        axes = self.axes(ranks)
        return make(*axes, sizes=axes) if self.sized else make(*axes)


def nodes_of(local: int) -> Callable[[int], dict[str, int]]:
    """Two axes, the inner one with `local` ranks."""
    return lambda ranks: {"node": ranks // local, "local": local}


def node_and_local(ranks: int) -> dict[str, int]:
    """Two axes, the inner one of size 2 if the number of ranks is even, and else of size 1."""
    return {"node": ranks // 2, "local": 2} if ranks % 2 == 0 else {"node": ranks, "local": 1}


def count(shapes: Shapes) -> int:
    """The number of elements of all leaves."""
    return sum(math.prod(shape) for shape in shapes)


def padded(elements: int, ranks: int) -> int:
    """`elements`, rounded up to a multiple of `ranks`."""
    return -(-elements // ranks) * ranks


def all_reduce(nbytes: int, ranks: int) -> int:
    """Bytes that a rank receives in an all-reduce of `nbytes`, rounded up."""
    return -(-2 * (ranks - 1) * nbytes // ranks)


def all_gather(nbytes: int, ranks: int) -> int:
    """Bytes that a rank receives in an all-gather of `nbytes` per rank."""
    return (ranks - 1) * nbytes


def blocks(nbytes: int, ranks: int) -> int:
    """Bytes that a rank receives in an all-to-all or reduce-scatter of `nbytes`, rounded up."""
    return -(-(ranks - 1) * nbytes // ranks)


def permute(nbytes: int, ranks: int) -> int:
    """Bytes that a rank receives in a permutation in which every rank receives."""
    return nbytes if ranks > 1 else 0
