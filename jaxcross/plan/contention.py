"""The contention of computations and exchanges on a machine, by the rate of its link."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from jaxcross.interleave.contention import Contention

MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineContention:
    """Contention measured on one machine at several rates of its link.

    Attributes:
        measured: Megabits per second and the contention there, in ascending order of rates.

    Raises:
        ValueError: There is no point, or the rates do not ascend.
    """

    measured: tuple[tuple[float, Contention], ...]

    def __post_init__(self) -> None:
        rates = [rate for rate, _ in self.measured]
        if not rates or any(low >= high for low, high in pairwise(rates)) or rates[0] <= 0:
            raise ValueError(f"contention is measured at one or more rates in ascending order, got {rates}")

    def at(self, mbit_per_s: float) -> Contention:
        """Returns the contention at a rate: linear between two that were measured, the nearest one outside."""
        rates = [rate for rate, _ in self.measured]
        above = bisect_left(rates, mbit_per_s)
        if above == 0 or above == len(rates):
            return self.measured[min(above, len(rates) - 1)][1]
        (low, slow), (high, fast) = self.measured[above - 1 : above + 1]
        part = (mbit_per_s - low) / (high - low)
        return Contention(
            compute=slow.compute + part * (fast.compute - slow.compute),
            exchange=slow.exchange + part * (fast.exchange - slow.exchange),
        )

    def to_json(self) -> list[dict[str, float]]:
        """Returns plain data; `from_json` reads it back."""
        return [
            {"mbit_per_s": rate, "compute": there.compute, "exchange": there.exchange} for rate, there in self.measured
        ]

    @classmethod
    def from_json(cls, points: Any) -> Self:
        """Reads what `to_json` returned.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
            raise ValueError("contention is a list of points: mbit_per_s, compute, exchange")
        keys = {"mbit_per_s", "compute", "exchange"}
        for point in points:
            if point.keys() != keys or not all(type(value) in (int, float) for value in point.values()):
                raise ValueError(f"a point of a contention has the numbers {sorted(keys)}, got {point}")
        return cls(
            measured=tuple(
                (float(p["mbit_per_s"]), Contention(compute=float(p["compute"]), exchange=float(p["exchange"])))
                for p in points
            )
        )


TWO_CORES = MachineContention(
    measured=(
        (500.0, Contention(compute=1.15, exchange=1.05)),
        (1000.0, Contention(compute=1.20, exchange=1.12)),
        (2000.0, Contention(compute=1.37, exchange=1.22)),
    )
)
"""A ResNet-50 step next to exchanges of its 102 MB, MPICH, one core a host (`benchmarks/exchange_cost.py`)."""
