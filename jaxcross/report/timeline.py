"""One rank's spans as sets of time: when each lane worked, waited for other ranks, or was idle.

The numbers in a report come from set operations on time. For example, to find out how much of a
job's exchange is hidden, we intersect the time it spent exchanging with the time in which any job
was computing.

This module builds these sets from a rank's spans, i.e. from its records of when something began and
ended. There are two reasons why raw spans won't do:

- A compute span begins when its segment is enqueued on the device. The device may still be busy
  with earlier segments at that point, which makes spans on the same lane overlap. `in_lane_order`
  clips them.
- An exchange span begins when this rank enters the collective. Nothing is transferred until the
  last rank has joined in, so until then this rank is merely waiting. It has no way to observe when
  the others enter, and the ranks' clocks aren't aligned well enough to compare times.

  The last rank to enter doesn't wait at all, though, so its span is as long as the transfer. Hence
  the shortest span of an exchange across all ranks tells us how long the transfer took
  (`shortest_exchanges`), and any longer span begins with a wait (`arrival_ns`). Since we only
  compare lengths, the clocks needn't be aligned.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from jaxcross.interleave import ON_ALL_RANKS, PARAMETER_SERVER, Span
from jaxcross.report.intervals import Interval, intersect, merge_intervals

ExchangeKey = tuple[str, int, int]
"""The job, the number of its call, and the segment. Together they identify a collective across
ranks.
"""


def in_lane_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Clips compute spans so that spans on the same lane don't overlap.

    A compute segment's span begins when the segment is enqueued on the device. But the device runs
    its queue in order, so a segment enqueued while another is still running doesn't start until the
    other segment is done. We move the beginning of its span to that moment; otherwise the device's
    busy time would be counted twice.
    """
    last_end: dict[tuple[int, int], int] = {}
    clipped: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        if span.kind == "compute":
            lane = (span.rank, span.lane)
            # Don't let a span become negative if it ends before its predecessor does.
            start = min(max(span.start_ns, last_end.get(lane, span.start_ns)), span.end_ns)
            if start != span.start_ns:
                span = replace(span, start_ns=start)
            last_end[lane] = max(span.end_ns, last_end.get(lane, span.end_ns))
        clipped.append(span)
    return tuple(clipped)


def numbered_votes(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Replaces each vote's step with a number that identifies the vote across ranks.

    We need to match up the votes of different ranks. All ranks take part in all votes in the same
    order, so a vote's position in that order identifies it. In a long run, though, ranks only keep
    their latest spans, and may have discarded different numbers of votes. So we count backwards
    from the last vote, which all ranks still have.
    """
    spans = tuple(spans)
    left = Counter(span.rank for span in spans if span.kind == "vote")
    numbered: list[Span] = []
    for span in spans:
        if span.kind == "vote":
            span = replace(span, job="", step=-left[span.rank], segment=-1)
            left[span.rank] -= 1
        numbered.append(span)
    return tuple(numbered)


def shortest_exchanges(spans: Iterable[Span]) -> dict[ExchangeKey, int]:
    """Returns the nanoseconds that each exchange or numbered vote took on its fastest rank.

    The last rank to enter an exchange doesn't have to wait for anyone else, so its span is the
    shortest, and just as long as the transfer itself.

    Parameter-server messages are left out. Ranks send them independently, so there's no connection
    between two ranks' messages for step n.
    """
    return {key: min(lengths.values()) for key, lengths in _exchange_lengths(spans).items()}


def last_to_arrive(spans: Iterable[Span]) -> dict[ExchangeKey, int]:
    """Returns the rank that the others waited for in each exchange or numbered vote.

    That's the rank with the shortest span. Exchanges of which we only have a single rank's span are
    left out.
    """
    return {
        key: min(lengths, key=lambda rank: lengths[rank])
        for key, lengths in _exchange_lengths(spans).items()
        if len(lengths) > 1
    }


def _exchange_lengths(spans: Iterable[Span]) -> dict[ExchangeKey, dict[int, int]]:
    """Returns the nanoseconds of each exchange or numbered vote, by rank."""
    lengths: dict[ExchangeKey, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in spans:
        if span.kind in ("collective", "vote") and span.label != PARAMETER_SERVER:
            lengths[span.job, span.number, span.segment][span.rank] += span.end_ns - span.start_ns
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One rank's time, as sets of intervals.

    Attributes:
        rank: The rank.
        compute: For each job, when its compute segments ran.
        exchange: For each job, when its exchanges ran, including waiting for other ranks.
        transfer: For each job, the part of `exchange` in which data was being transferred, i.e.
            after the last rank had entered the exchange.
        computing: When compute segments of any job ran.
        compute_lanes: For each compute lane, by its number, when it worked. A lane does one thing
            at a time, but several lanes can work at the same time.
        exchange_lanes: For each exchange lane, by its number, when it transferred data.
        peer: When an exchange waited for another rank.
        vote: When the exchange lane voted, without waiting for other ranks.
        vote_peer: When a vote, or a collective call of a job, waited for another rank.
        together: When the exchange lane ran a job's collective call, without waiting for other
            ranks.
        input: When a job waited for its next batch.
        host: When a job compiled, ran a collective call, or did other work on the host for which it
            records spans.
        late_compute: When a compute lane was idle even though its next segment was ready.
        late_exchange: When the next exchange was ready but its exchange lane hadn't begun it. The
            lane may have been voting at that time.
        step_ends: For each job, the number of each step and the end of its last segment, in step
            order. Calls that aren't steps, such as evaluations, aren't listed here, but the other
            attributes do include their work.
    """

    rank: int
    compute: Mapping[str, list[Interval]]
    exchange: Mapping[str, list[Interval]]
    transfer: Mapping[str, list[Interval]]
    computing: list[Interval]
    compute_lanes: Mapping[int, list[Interval]]
    exchange_lanes: Mapping[int, list[Interval]]
    peer: list[Interval]
    vote: list[Interval]
    vote_peer: list[Interval]
    together: list[Interval]
    input: list[Interval]
    host: list[Interval]
    late_compute: list[Interval]
    late_exchange: list[Interval]
    step_ends: Mapping[str, tuple[tuple[int, int], ...]]

    @classmethod
    def of(cls, rank: int, spans: Sequence[Span], shortest: Mapping[ExchangeKey, int]) -> Timeline:
        """Builds the timeline of `rank`. Ignores spans of other ranks.

        The spans must come from `in_lane_order`. `shortest` comes from `shortest_exchanges`, which
        needs the spans of all ranks.
        """
        own = [span for span in spans if span.rank == rank]
        compute: dict[str, list[Interval]] = defaultdict(list)
        exchange: dict[str, list[Interval]] = defaultdict(list)
        transfer: dict[str, list[Interval]] = defaultdict(list)
        lanes: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        peer: list[Interval] = []
        vote: list[Interval] = []
        vote_peer: list[Interval] = []
        together: list[Interval] = []
        ends: dict[str, dict[int, int]] = defaultdict(dict)
        for span in own:
            if span.kind == "vote":
                # A `vote` span is either a vote on what to run next or a collective call made by a
                # job, since both run on the exchange lane. Keep the latter apart, because it's the
                # job's own work and not overhead.
                arrived = arrival_ns(span, shortest)
                (together if span.label == ON_ALL_RANKS else vote).append((arrived, span.end_ns))
                vote_peer.append((span.start_ns, arrived))
            if span.kind not in ("compute", "collective"):
                continue
            if span.in_step:
                steps = ends[span.job]
                steps[span.step] = max(span.end_ns, steps.get(span.step, span.end_ns))
            if span.kind == "compute":
                compute[span.job].append((span.start_ns, span.end_ns))
                lanes["compute", span.lane].append((span.start_ns, span.end_ns))
            else:
                arrived = arrival_ns(span, shortest)
                exchange[span.job].append((span.start_ns, span.end_ns))
                transfer[span.job].append((arrived, span.end_ns))
                lanes["exchange", span.lane].append((arrived, span.end_ns))
                peer.append((span.start_ns, arrived))
        return cls(
            rank=rank,
            compute={job: merge_intervals(intervals) for job, intervals in compute.items()},
            exchange={job: merge_intervals(intervals) for job, intervals in exchange.items()},
            transfer={job: merge_intervals(intervals) for job, intervals in transfer.items()},
            computing=merge_intervals(itertools.chain.from_iterable(compute.values())),
            compute_lanes={
                lane: merge_intervals(intervals)
                for (kind, lane), intervals in lanes.items()
                if kind == "compute"
            },
            exchange_lanes={
                lane: merge_intervals(intervals)
                for (kind, lane), intervals in lanes.items()
                if kind == "exchange"
            },
            peer=merge_intervals(peer),
            vote=merge_intervals(vote),
            vote_peer=merge_intervals(vote_peer),
            together=merge_intervals(together),
            input=merge_intervals((s.start_ns, s.end_ns) for s in own if s.kind == "input"),
            host=merge_intervals(
                [*((s.start_ns, s.end_ns) for s in own if s.kind in ("compile", "host")), *together]
            ),
            late_compute=_late(s for s in own if s.kind == "compute"),
            late_exchange=_late(s for s in own if s.kind == "collective"),
            step_ends={job: tuple(sorted(steps.items())) for job, steps in ends.items()},
        )

    def without_undone(self, made: Mapping[str, int]) -> Self:
        """Returns the timeline without the ends of incomplete steps.

        A step doesn't count if the job fails or stops in the middle of it, but by then we've
        already recorded some of its spans. `made` is the number of steps that each job completed;
        any step ends beyond that are dropped.
        """
        return replace(
            self,
            step_ends={
                job: ends[: made.get(job, len(ends))] for job, ends in self.step_ends.items()
            },
        )

    def covered(self, job: str) -> list[Interval]:
        """Returns when the job exchanged while this job or another one computed on this rank."""
        return intersect(self.exchange.get(job, []), self.computing)


def arrival_ns(span: Span, shortest: Mapping[ExchangeKey, int]) -> int:
    """Returns when the last rank entered this exchange or vote."""
    length = shortest.get((span.job, span.number, span.segment), span.end_ns - span.start_ns)
    return max(span.start_ns, span.end_ns - length)


def _late(spans: Iterable[Span]) -> list[Interval]:
    """Returns when spans hadn't begun even though their lane was free and their inputs ready."""
    free: dict[int, int] = {}
    late: list[Interval] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        # A segment can start once its inputs are ready and its lane is done with the previous
        # segment, whichever comes last. From then on it's late. If the span began earlier, the
        # interval is empty, and `merge_intervals` drops it.
        late.append((max(span.ready_ns, free.get(span.lane, span.ready_ns)), span.start_ns))
        free[span.lane] = max(span.end_ns, free.get(span.lane, span.end_ns))
    return merge_intervals(late)
