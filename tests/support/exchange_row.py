"""One row of the table of exchanges, and the formulas its byte counts are made of."""

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
    """One exchange, made for a table that every test reads.

    Attributes:
        name: The strategy and what is particular of it here.
        make: Axis names, in the order of `axes` -> the transformation; also `sizes=`, name ->
            ranks, if `sized`.
        lossless: The same in the setting in which it loses nothing and must equal `reference`, or
            None.
        reference: What `lossless` must equal: `mean` over all axes for exchanges of gradients.
        axes: Ranks -> axis name -> size.
        identical: Whether updates (kind `gradient`, `delta`) or parameters (kind `parameter`) are
            the same bits on every rank, while every rank starts from the same parameters.
        kind: What is exchanged.
        worlds: Ranks -> whether the strategy is defined for them.
        bytes: (leaf shapes, ranks) -> bytes that one rank receives in step 0 for float32 leaves, by
            the formula of its docstring.
        later: A step of another phase, and the bytes of that step; None where all steps are alike.
        rtol: Of MPI against `vmap`, and of `lossless` against `reference`.
        steps: How many steps are run: enough for counters to come round.
        deterministic: Whether two runs give the same bits.
        spreads: Ranks -> steps after which all ranks have seen a NaN of one rank's gradient, its
            own step included.
        spoils: For how many steps that gradient is spoiled: one that a round did not choose is not
            looked at.
        rests: Whether zero gradients give updates of exactly zero. A mean of equal parameters is
            rounded.
        sized: Whether `make` and `lossless` must be told the sizes of the axes.
        shared: State -> what of it is the same bits on every rank.
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
        """The transformation for this many ranks."""
        make = self.lossless if lossless else self.make
        assert make is not None, self.name
        return self._call(make, ranks)

    def referred(self, ranks: int) -> optax.GradientTransformation:
        """What `lossless` must equal."""
        return self.reference(*self.axes(ranks))

    def _call(self, make: Make, ranks: int) -> optax.GradientTransformation:
        axes = self.axes(ranks)
        return make(*axes, sizes=axes) if self.sized else make(*axes)


def nodes_of(local: int) -> Callable[[int], dict[str, int]]:
    """Two axes, the inner one of so many ranks."""
    return lambda ranks: {"node": ranks // local, "local": local}


def node_and_local(ranks: int) -> dict[str, int]:
    """Two axes, the inner one as large as two where that divides."""
    return {"node": ranks // 2, "local": 2} if ranks % 2 == 0 else {"node": ranks, "local": 1}


def count(shapes: Shapes) -> int:
    """Elements of all leaves."""
    return sum(math.prod(shape) for shape in shapes)


def padded(elements: int, ranks: int) -> int:
    """The next multiple of `ranks`."""
    return -(-elements // ranks) * ranks


def all_reduce(nbytes: int, ranks: int) -> int:
    """Bytes a rank receives in an all-reduce of `nbytes`, rounded up."""
    return -(-2 * (ranks - 1) * nbytes // ranks)


def all_gather(nbytes: int, ranks: int) -> int:
    """Bytes a rank receives if every rank brings `nbytes`."""
    return (ranks - 1) * nbytes


def blocks(nbytes: int, ranks: int) -> int:
    """Bytes a rank receives in an all-to-all or reduce-scatter of an operand of `nbytes`, rounded
    up.
    """
    return -(-(ranks - 1) * nbytes // ranks)


def permute(nbytes: int, ranks: int) -> int:
    """Bytes a rank receives in a permutation that moves everything."""
    return nbytes if ranks > 1 else 0
