"""Records spans, converts them to rows, and aligns the ranks' clocks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from statistics import median
from typing import Any

from jaxcross.interleave import PARAMETER_SERVER, Instrument, Span

SPAN_FIELDS = tuple(f.name for f in fields(Span))


class Recorder(Instrument):
    """An instrument that keeps this rank's latest spans. Thread-safe, and never waits."""

    def __init__(self, limit: int = 200_000) -> None:
        self._spans: deque[Span] = deque(maxlen=limit)
        self._seen = 0

    def span(self, span: Span) -> None:
        # Several threads may report spans at the same time. Appending to a deque is atomic, so no
        # lock is needed for that. Incrementing the counter isn't, but if an increment gets lost,
        # `dropped` is merely off by a few.
        self._spans.append(span)
        self._seen += 1

    def spans(self) -> tuple[Span, ...]:
        """Returns the spans that were kept, oldest first."""
        # Copy the deque before iterating over it. Up to Python 3.11, a garbage collection during
        # the iteration may let another thread run, and if that thread appends a span, the iteration
        # raises an error. `copy` can't be interrupted like that.
        return tuple(self._spans.copy())

    @property
    def dropped(self) -> int:
        """Number of spans discarded because of the limit."""
        return max(0, self._seen - len(self._spans))


def to_rows(spans: Iterable[Span]) -> list[list[Any]]:
    """Returns one JSON row per span, with its fields in the order of `SPAN_FIELDS`."""
    # `dataclasses.astuple` would be ten times slower, because it makes deep copies.
    values = attrgetter(*SPAN_FIELDS)
    return [list(values(span)) for span in spans]


def from_rows(
    rows: Iterable[Sequence[Any]], names: Sequence[str] = SPAN_FIELDS
) -> tuple[Span, ...]:
    """Inverts `to_rows`. `names` are the file's columns, which may differ in older versions."""
    known = [(i, name) for i, name in enumerate(names) if name in SPAN_FIELDS]
    return tuple(Span(**{name: row[i] for i, name in known}) for row in rows)


def clock_offsets(spans: Sequence[Span]) -> dict[int, int]:
    """Returns the nanoseconds to add to each rank's clock to align it with the lowest rank's clock.

    A blocking collective ends at nearly the same time on all ranks, give or take a network latency.
    So whenever two ranks take part in the same exchange, the difference between their recorded end
    times is an estimate of their clock offset. Every now and then a rank leaves late, so we take
    the median over all exchanges.

    A rank that shares no exchange with the lowest rank gets an offset of 0. Parameter-server
    messages don't count, since each rank sends its own.
    """
    ranks = sorted({span.rank for span in spans})
    ends: dict[tuple[str, int, int], dict[int, int]] = defaultdict(dict)
    for span in spans:
        if span.kind == "collective" and span.label != PARAMETER_SERVER:
            of_rank = ends[span.job, span.number, span.segment]
            of_rank[span.rank] = max(span.end_ns, of_rank.get(span.rank, span.end_ns))
    offsets = dict.fromkeys(ranks, 0)
    for rank in ranks[1:]:
        apart = [at[ranks[0]] - at[rank] for at in ends.values() if ranks[0] in at and rank in at]
        if apart:
            offsets[rank] = round(median(apart))
    return offsets


def shifted(spans: Iterable[Span], offsets: dict[int, int]) -> tuple[Span, ...]:
    """Converts the spans' times to the common clock."""

    def on_common_clock(span: Span) -> Span:
        offset = offsets[span.rank]
        if not offset:
            return span
        return replace(
            span,
            start_ns=span.start_ns + offset,
            end_ns=span.end_ns + offset,
            ready_ns=span.ready_ns + offset,
        )

    return tuple(map(on_common_clock, spans))
