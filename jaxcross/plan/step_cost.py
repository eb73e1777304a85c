"""`StepCost`: the cost of one step alone, from which estimates are made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jaxcross.plan.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step alone: everything that an estimate is made from. Identical across ranks.

    Attributes:
        whole: Profile of the uncut step, named like the step, with its memory.
        cut: Profile of the step in several exchange segments; None if it can't be cut or wasn't.
        where: The job whose step this is, to show to people; empty outside a run.
        steps: Number of steps that were timed; 0 if the profiles were given.
        wire_bytes: Bytes that a rank receives per step.
        narrow_wire_bytes: The same if everything that travels in 32 or 64 bits travels in 16.
        link_mbps: Rate of the link that the user asked about, in Mbit/s; None if the exchange times
            were measured.
        limit_bytes: Bytes that a rank may use; None if unknown.
        shares_processor: Whether the processor that computes also drives the network.
    """

    whole: Profile
    cut: Profile | None = None
    where: str = ""
    steps: int
    wire_bytes: int
    narrow_wire_bytes: int
    link_mbps: float | None = None
    limit_bytes: int | None = None
    shares_processor: bool = True

    @property
    def compute_s(self) -> float:
        """Seconds of the step's computation (c)."""
        return self.whole.compute_s

    @property
    def exchange_s(self) -> float:
        """Seconds of the step's exchanges after all ranks have arrived (m)."""
        return self.whole.exchange_s

    @property
    def narrow_exchange_s(self) -> float:
        """Seconds of the step's exchanges in 16 bits, if time shrinks in proportion to bytes."""
        if not self.wire_bytes:
            return self.exchange_s
        return self.exchange_s * self.narrow_wire_bytes / self.wire_bytes

    @property
    def mbps(self) -> float | None:
        """Rate at which a rank receives, in Mbit/s; None if the step has no exchanges."""
        return 8e-6 * self.wire_bytes / self.exchange_s if self.exchange_s else None

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields as numbers, texts, lists and dicts, plus c, m and the rate."""
        costs = {
            "whole": self.whole.as_data(),
            "cut": None if self.cut is None else self.cut.as_data(),
        }
        derived = {"compute_s": self.compute_s, "exchange_s": self.exchange_s, "mbps": self.mbps}
        return {**asdict(self), **costs, **derived}
