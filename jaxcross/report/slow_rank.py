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
_MOST_NAMED = 3  # at most this many ranks are named in a sentence, or one more if that's all


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The rank that holds up the others.

    Attributes:
        rank: The rank. If several ranks are slow, the slowest of them.
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
        other_ranks: The other ranks that compute clearly longer than the median rank, the slowest
            first. Their cost is part of `cost_share`.

    Raises:
        ValueError: A number is out of range.
    """

    rank: int
    factor: float
    cost_share: float
    is_late: bool = False
    other_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (
            min((self.rank, *self.other_ranks)) < 0
            or not 0 <= self.factor < float("inf")
            or not 0 <= self.cost_share <= 1
        ):
            raise ValueError(
                "a slow rank must have a `rank` of at least 0, a finite `factor` that isn't "
                "negative, a `cost_share` from 0 to 1, and `other_ranks` of at least 0, got "
                f"{self}"
            )

    @classmethod
    def if_costly(
        cls, ranks: Sequence[int], factor: float, cost_share: float, *, is_late: bool = False
    ) -> Self | None:
        """Returns None if the ranks cost too little to be worth mentioning.

        Args:
            ranks: `rank`, followed by `other_ranks`.
            factor: See `SlowRank`.
            cost_share: See `SlowRank`. Values above 1 count as 1.
            is_late: See `SlowRank`.
        """
        cost_share = min(cost_share, 1.0)
        if cost_share < COSTLY:
            return None
        rank, *others = ranks
        return cls(
            rank=rank,
            factor=factor,
            cost_share=cost_share,
            is_late=is_late,
            other_ranks=tuple(others),
        )

    def text(self, of_what: str) -> str:
        """Returns a sentence that names the rank, up to three others, and what they cost.

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
        who = f"Rank {self.rank} computes"
        if self.other_ranks:
            *names, last = map(str, (self.rank, *self.other_ranks))
            if len(names) > _MOST_NAMED:
                last = f"{len(names) + 1 - _MOST_NAMED} more"
                names = names[:_MOST_NAMED]
            who = f"Ranks {', '.join(names)} and {last} compute up to"
        return f"{who} {self.factor:.2f} times as long as the median rank: that costs {cost}."


def slowest(compute_s: Sequence[float]) -> tuple[list[int], float] | None:
    """Finds the ranks that compute clearly longer than the median rank.

    Returns these ranks, the slowest first, and how many times as long as the median rank the
    slowest of them computes. Returns None if there are no such ranks.

    Args:
        compute_s: The compute time of each rank.
    """
    middle = median_low(compute_s) if compute_s else 0.0
    slow = [rank for rank, own in enumerate(compute_s) if middle and own >= CLEARLY * middle]
    slow.sort(key=lambda rank: -compute_s[rank])
    return (slow, compute_s[slow[0]] / middle) if slow else None


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
