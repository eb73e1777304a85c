"""One rank's spans as sets of time: when each lane worked, waited for peers, or was idle."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from jaxcross.interleave import ON_ALL_RANKS, PARAMETER_SERVER, Span
from jaxcross.report.intervals import Interval, intersect, merge_intervals

ExchangeKey = tuple[str, int, int]
"""Job, number of the call, and segment, which identify a collective segment across ranks."""


def in_lane_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Clips compute spans so that spans on the same lane don't overlap.

    A device runs its queue in order. So a segment that was enqueued early only began when its
    predecessor had ended.
    """
    last_end: dict[tuple[int, int], int] = {}
    clipped: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        if span.kind == "compute":
            lane = (span.rank, span.lane)
            start = min(max(span.start_ns, last_end.get(lane, span.start_ns)), span.end_ns)
            if start != span.start_ns:
                span = replace(span, start_ns=start)
            last_end[lane] = max(span.end_ns, last_end.get(lane, span.end_ns))
        clipped.append(span)
    return tuple(clipped)


def numbered_votes(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Gives each vote its own number instead of its step, so that votes match up across ranks.

    Every rank takes part in every vote, so counting identifies them. We count backwards from the
    last vote, since a long run only keeps its latest spans.
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
    """Returns how many nanoseconds each exchange and each numbered vote took on its fastest rank.

    That is the duration without waiting: the rank that arrived last didn't wait for any other.
    Parameter-server messages are left out, because step n of one rank has nothing to do with step n
    of another.
    """
    on_rank: dict[tuple[ExchangeKey, int], int] = defaultdict(int)
    for span in spans:
        if span.kind in ("collective", "vote") and span.label != PARAMETER_SERVER:
            on_rank[(span.job, span.number, span.segment), span.rank] += span.end_ns - span.start_ns
    shortest: dict[ExchangeKey, int] = {}
    for (key, _), length in on_rank.items():
        shortest[key] = min(length, shortest.get(key, length))
    return shortest


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One rank's time as sets of intervals.

    Attributes:
        rank: The rank.
        compute: Per job, when its compute segments ran.
        exchange: Per job, when its exchanges ran, including waiting for peers.
        transfer: Per job, the part of `exchange` after the last rank had arrived.
        computing: When any job's compute segments ran.
        compute_lanes: When each compute lane worked, by its number. A lane does one thing at a
            time, but several lanes can work at the same time.
        exchange_lanes: The same for `transfer` and the exchange lanes.
        peer: When an exchange waited for another rank.
        vote: When the exchange lane voted, after the last rank had arrived.
        vote_peer: When a vote, or a collective call of a job, waited for another rank.
        together: When the exchange lane ran a job's collective call, after the last rank had
            arrived.
        input: When a job waited for its next batch.
        host: When a job compiled, or did other work on the host that it measures.
        late_compute: When the next compute segment was ready and the compute lane was idle, but
            hadn't begun it.
        late_exchange: The same for the exchange lanes, which may have been voting.
        step_ends: Per job, the number of each step and the end of its last segment, in the order of
            steps. Calls that aren't steps, such as evaluations, are left out here, but count as
            work of the job elsewhere.
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
        """Builds the timeline of `rank` from spans that `in_lane_order` returned.

        Ignores spans of other ranks.
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
                arrived = _arrival(span, shortest)
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
                arrived = _arrival(span, shortest)
                exchange[span.job].append((span.start_ns, span.end_ns))
                transfer[span.job].append((arrived, span.end_ns))
                lanes["exchange", span.lane].append((arrived, span.end_ns))
                peer.append((span.start_ns, arrived))
        return cls(
            rank=rank,
            compute={job: merge_intervals(pieces) for job, pieces in compute.items()},
            exchange={job: merge_intervals(pieces) for job, pieces in exchange.items()},
            transfer={job: merge_intervals(pieces) for job, pieces in transfer.items()},
            computing=merge_intervals(piece for pieces in compute.values() for piece in pieces),
            compute_lanes={
                lane: merge_intervals(pieces)
                for (kind, lane), pieces in lanes.items()
                if kind == "compute"
            },
            exchange_lanes={
                lane: merge_intervals(pieces)
                for (kind, lane), pieces in lanes.items()
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
        """Returns the timeline with only as many step ends per job as the job made steps. A job
        that failed or stopped leaves spans of a step that doesn't count.
        """
        return replace(
            self,
            step_ends={
                job: ends[: made.get(job, len(ends))] for job, ends in self.step_ends.items()
            },
        )

    def covered(self, job: str) -> list[Interval]:
        """Returns when the job exchanged while any job computed on this rank."""
        return intersect(self.exchange.get(job, []), self.computing)


def _arrival(span: Span, shortest: Mapping[ExchangeKey, int]) -> int:
    """Returns when the last rank had arrived at this exchange or vote."""
    length = shortest.get((span.job, span.number, span.segment), span.end_ns - span.start_ns)
    return max(span.start_ns, span.end_ns - length)


def _late(spans: Iterable[Span]) -> list[Interval]:
    """Returns the time by which spans began late: their lane was free and their inputs ready."""
    free: dict[int, int] = {}
    late: list[Interval] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        late.append((max(span.ready_ns, free.get(span.lane, span.ready_ns)), span.start_ns))
        free[span.lane] = max(span.end_ns, free.get(span.lane, span.end_ns))
    return merge_intervals(late)
