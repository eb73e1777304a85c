"""`SlowRank`: the rank that holds up the others, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Self

from jaxcross.interleave import Span
from jaxcross.report.intervals import Interval, merge_intervals
from jaxcross.report.timeline import ExchangeKey, arrival_ns, last_to_arrive
from jaxcross.report.units import share

CLEARLY = 1.1
"""A rank is only called slow if it computes at least this many times as long as the median rank.
Ranks that are equally fast differ by a few per cent when they're measured.
"""
COSTLY = 0.05
"""A rank is only called slow if it costs at least this share of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The rank that holds up the others.

    Attributes:
        rank: The rank.
        factor: Its compute time per round, relative to that of the median rank. The median of an
            even number of ranks is the lower of the two middle ones, i.e. that of the faster rank
            if there are two.
        cost_share: The share of the time that would be saved if no rank were slower than the median
            rank. In an estimate or a plan, that's a share of the predicted time. In a report, it's
            the difference between this rank's bound and the median rank's, as a share of the
            measured round.
        is_late: Whether the rank arrives late in a run, although its bound is about that of the
            median rank. `cost_share` is then the share of a round during which the others did
            nothing but wait for it, averaged over them.

    Raises:
        ValueError: A number is out of range.
    """

    rank: int
    factor: float
    cost_share: float
    is_late: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0 or not 0 <= self.factor < float("inf") or not 0 <= self.cost_share <= 1:
            raise ValueError(
                "a slow rank must have a `rank` of at least 0, a finite `factor` that isn't "
                f"negative, and a `cost_share` from 0 to 1, got {self}"
            )

    @classmethod
    def if_costly(
        cls, rank: int, factor: float, cost_share: float, *, is_late: bool = False
    ) -> Self | None:
        """Returns None if the rank costs too little to be worth mentioning."""
        cost_share = min(cost_share, 1.0)
        if cost_share < COSTLY:
            return None
        return cls(rank=rank, factor=factor, cost_share=cost_share, is_late=is_late)

    def text(self, of_what: str) -> str:
        """Returns a sentence that names the rank and what it costs.

        Args:
            of_what: What `cost_share` is a share of, e.g. `a round`.
        """
        cost = f"{share(self.cost_share)} of {of_what}"
        if self.is_late:
            why = "though not because of its computation"
            if self.factor >= CLEARLY:  # its computation may be one of the reasons
                why = f"and computes {self.factor:.2f} times as long as the median rank"
            return (
                f"Rank {self.rank} is late, {why}: the others do nothing but wait for it in {cost}."
            )
        return (
            f"Rank {self.rank} computes {self.factor:.2f} times as long as the median rank: that "
            f"costs {cost}."
        )


def slowest(compute_s: Sequence[float]) -> tuple[int, float] | None:
    """Returns the rank that computes the longest, and its time relative to the median rank's.

    Returns None if it isn't clearly slower than the median rank.

    Args:
        compute_s: The compute time of each rank.
    """
    middle = median_low(compute_s) if compute_s else 0.0
    rank = max(range(len(compute_s)), key=lambda each: compute_s[each], default=0)
    if not middle or compute_s[rank] < CLEARLY * middle:
        return None
    return rank, compute_s[rank] / middle


def waits_by_cause(
    spans: Iterable[Span], shortest: Mapping[ExchangeKey, int]
) -> dict[tuple[int, int], list[Interval]]:
    """Returns when a rank waited in an exchange or a vote, by (rank, rank that it waited for).

    Args:
        spans: The spans of all ranks, with numbered votes.
        shortest: From `shortest_exchanges`.
    """
    spans = tuple(spans)
    last = last_to_arrive(spans)
    waits: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for span in spans:
        cause = last.get((span.job, span.number, span.segment))
        if span.kind in ("collective", "vote") and cause is not None and cause != span.rank:
            waits[span.rank, cause].append((span.start_ns, arrival_ns(span, shortest)))
    return {pair: merge_intervals(found) for pair, found in waits.items()}
