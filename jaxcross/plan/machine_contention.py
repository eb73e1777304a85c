"""How much computation and exchange slow each other down, depending on the link's rate."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from jaxcross import _schema
from jaxcross.interleave import Contention

MAX_FILE_BYTES = 1_000_000
_SAME = 0.02
"""Link rates that differ by less than this share count as the same, since measured rates vary by
about this much from run to run.
"""
_BELOW = 2.0
_ABOVE = 1.25
"""We extrapolate down to the lowest measured rate divided by `_BELOW`, and up to the highest times
`_ABOVE`. In our measurements, contention increases with the rate, so on a slower link it should be
no worse than at the lowest measured rate. How much worse it gets on a faster link isn't known.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineContention:
    """The contention measured on a machine, at several rates of its link.

    Attributes:
        measured: Pairs of a rate (in Mbit/s) and the contention at that rate, in ascending order.

    Raises:
        ValueError: There are no measurements, or the rates aren't positive, finite and ascending.
    """

    measured: tuple[tuple[float, Contention], ...]

    def __post_init__(self) -> None:
        rates = [rate for rate, _ in self.measured]
        ascending = all(low < high for low, high in pairwise([0.0, *rates, math.inf]))
        if not rates or not ascending:
            raise ValueError(
                "contention must be measured at one or more rates above 0 Mbit/s, in ascending "
                f"order, got {rates}"
            )

    def at(self, mbps: float) -> Contention:
        """Returns the contention at a given rate of the link.

        Interpolates linearly between measured rates. Outside the measured range, returns the
        contention at the nearest measured rate. `basis` says which of these applies.
        """
        rates = [rate for rate, _ in self.measured]
        above = bisect_left(rates, mbps)
        if above == 0 or above == len(rates):
            return self.measured[min(above, len(rates) - 1)][1]
        (low, slow), (high, fast) = self.measured[above - 1 : above + 1]
        part = (mbps - low) / (high - low)
        return Contention(
            compute=slow.compute + part * (fast.compute - slow.compute),
            exchange=slow.exchange + part * (fast.exchange - slow.exchange),
        )

    def basis(self, mbps: float) -> str:
        """Returns what `at` is based on at a given rate of the link, e.g. for display.

        Returns `measured at ...`, `interpolated from ... and ...` or `extrapolated from ...`, with
        the measured rates. Returns "" if the rate is below half of the lowest measured rate, or
        more than a quarter above the highest: the contention there isn't known.
        """
        rates = [rate for rate, _ in self.measured]
        if not rates[0] / _BELOW <= mbps <= rates[-1] * _ABOVE:
            return ""
        nearest = min(rates, key=lambda rate: abs(rate - mbps))
        if abs(nearest - mbps) <= _SAME * mbps:
            return f"measured at {nearest:.4g} Mbit/s"
        above = bisect_left(rates, mbps)
        if above == 0 or above == len(rates):
            return f"extrapolated from {nearest:.4g} Mbit/s"
        return f"interpolated from {rates[above - 1]:.4g} and {rates[above]:.4g} Mbit/s"

    def with_point(self, mbps: float, there: Contention) -> Self:
        """Returns a copy with one more measurement, which replaces any at about the same rate."""
        others = [point for point in self.measured if abs(point[0] - mbps) > _SAME * mbps]
        return type(self)(
            measured=tuple(sorted([*others, (mbps, there)], key=lambda point: point[0]))
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file that `jaxcross contention` wrote.

        Raises:
            ValueError: The file doesn't contain a machine's contention, or is too large.
            OSError: The file can't be read.
        """
        what = "the contention of a machine"
        return _schema.load(Path(path), what, cls.from_json, most=MAX_FILE_BYTES)

    def to_json(self) -> list[dict[str, float]]:
        """Returns plain data; `from_json` reads it back."""
        return [
            {"mbps": rate, "compute": there.compute, "exchange": there.exchange}
            for rate, there in self.measured
        ]

    @classmethod
    def from_json(cls, points: Any) -> Self:
        """Reads back what `to_json` returned.

        Raises:
            ValueError: `points` is something else.
        """
        if not isinstance(points, list):
            raise ValueError(
                "contention must be a list of points, as `jaxcross contention` writes it, got "
                f"{points!r:.60}"
            )
        found = _schema.record(points, list[dict[str, float]])
        keys = {"mbps", "compute", "exchange"}
        for point in found:
            if point.keys() != keys:
                raise ValueError(
                    f"each point of a contention must have exactly the numbers {sorted(keys)}, got "
                    f"{point}"
                )
        return cls(measured=tuple((point.pop("mbps"), Contention(**point)) for point in found))


TWO_CORES = MachineContention(
    measured=(
        (25.0, Contention(compute=1.03, exchange=1.0)),
        (100.0, Contention(compute=1.03, exchange=1.0)),
        (200.0, Contention(compute=1.04, exchange=1.05)),
        (500.0, Contention(compute=1.15, exchange=1.05)),
        (1000.0, Contention(compute=1.20, exchange=1.12)),
        (2000.0, Contention(compute=1.37, exchange=1.22)),
    )
)
"""The contention of two-core machines, measured with a ResNet-50 step running alongside exchanges
of the model's 102 MB, with MPICH and one core per host (`benchmarks/exchange_cost.py`). At 25
Mbit/s, the exchanges were shorter (`benchmarks/plan.py`). The values below 500 Mbit/s are from a
later session, in which there was less contention at 500 Mbit/s, too (1.08 and 1.00). Exchanges that
took less time alongside a computation than alone, by up to 4%, count as 1.0.
"""
