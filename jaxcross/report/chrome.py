"""Exports a run as Chrome trace events (JSON Object Format), which Perfetto reads as well.

In the trace viewer, each rank shows up as a process with several tracks. There's a track for each
job, showing its steps and whatever doesn't run on a lane, such as waiting for a batch. The segments
(the pieces into which a step is cut) are on separate tracks, one for each compute lane and each
exchange lane. An arrow leads to each exchange from the compute segment that produced its operands.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxcross.interleave import Span, segment_name
from jaxcross.report.timeline import in_lane_order

if TYPE_CHECKING:
    from jaxcross.report.report import Report


class _Slice(NamedTuple):
    """A slice on its track. `event` is the trace event without its times."""

    start_ns: int
    end_ns: int
    event: dict[str, Any]


LANE_TRACK = 1000
"""Job tracks are numbered from 1, compute lanes from 1000 and exchange lanes from 2000. Viewers
sort tracks by number, which puts a rank's jobs at the top.
"""


def trace_events(report: Report) -> dict[str, Any]:
    """Returns the whole trace file as plain data. Times are microseconds since the first span."""
    spans = in_lane_order(report.spans)
    origin = min((span.start_ns for span in spans), default=0)
    tracks = {job.name: i for i, job in enumerate(report.jobs, start=1)}
    for span in spans:
        if span.job and span.job not in tracks:
            tracks[span.job] = len(tracks) + 1
    lanes = sorted({(s.rank, lane, _lane_name(s)) for s in spans if (lane := _lane(s)) is not None})
    events: list[dict[str, Any]] = []
    for rank in sorted({*report.ranks, *(span.rank for span in spans)}):
        events += [
            _meta("process_name", rank, name=f"rank {rank}"),
            _meta("process_sort_index", rank, sort_index=rank),
        ]
        for job, track in tracks.items():
            events += _track(rank, track, f"job {job}")
        for _, lane, name in (lane for lane in lanes if lane[0] == rank):
            events += _track(rank, lane, name)
    last = {job.name: job.last_step for job in report.jobs}
    for part in _nested(
        [*_steps(spans, tracks, last), *(_slice_of(span, tracks, origin) for span in spans)]
    ):
        events.append(
            {
                **part.event,
                "ts": _us(part.start_ns, origin),
                "dur": (part.end_ns - part.start_ns) / 1e3,
            }
        )
    events += _arrows(spans, origin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "policy": report.policy,
            "placement": report.placement,
            "link": report.link,
            "round_s": report.rounds.period_s,
            "bound_s": report.rounds.bound_s,
        },
    }


def _us(time_ns: int, origin: int) -> float:
    return (time_ns - origin) / 1e3


def _lane(span: Span) -> int | None:
    if span.kind == "compute":
        return LANE_TRACK + span.lane
    return 2 * LANE_TRACK + span.lane if span.kind in ("collective", "vote") else None


def _lane_name(span: Span) -> str:
    return f"compute lane {span.lane}" if span.kind == "compute" else f"exchange lane {span.lane}"


def _meta(name: str, pid: int, tid: int = 0, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _track(pid: int, tid: int, name: str) -> list[dict[str, Any]]:
    return [
        _meta("thread_name", pid, tid, name=name),
        _meta("thread_sort_index", pid, tid, sort_index=tid),
    ]


def _name(span: Span) -> str:
    if span.kind == "input":
        return f"input from {span.label}" if span.label else "input"
    return span.label or span.kind


def _slice_of(span: Span, tracks: dict[str, int], origin: int) -> _Slice:
    """Returns a span's slice on its lane, or on its job's track if it has no lane."""
    lane = _lane(span)
    track = lane if lane is not None else tracks.get(span.job, 0)
    if lane is not None and span.job and span.segment >= 0 and not span.label:
        name = segment_name(span.job, span.kind, span.segment)
    else:
        name = _name(span) if lane is None or not span.job else f"{span.job} {_name(span)}"
    args: dict[str, Any] = {"job": span.job, "step": span.step, "segment": span.segment}
    args["ready_us"] = _us(span.ready_ns, origin)
    if span.nbytes:
        args["bytes"] = span.nbytes
    event = {
        "ph": "X",
        "name": name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": track,
        "args": args,
    }
    return _Slice(span.start_ns, span.end_ns, event)


def _steps(spans: tuple[Span, ...], tracks: dict[str, int], last: dict[str, int]) -> list[_Slice]:
    """Returns the steps on the jobs' tracks, each from its first segment to its last.

    A step's first compute segment doesn't communicate, so it can start before the previous step has
    finished. When it does, we start the step where the previous one ended, to keep steps from
    overlapping on the track.

    A step that was cut short by a failure is still shown after the job's last complete step, with a
    label saying that it doesn't count.
    """
    bounds: dict[tuple[int, str], dict[int, tuple[int, int]]] = defaultdict(dict)
    for s in spans:
        if s.kind in ("compute", "collective") and s.job and s.in_step:
            low, high = bounds[s.rank, s.job].get(s.step, (s.start_ns, s.end_ns))
            bounds[s.rank, s.job][s.step] = (min(low, s.start_ns), max(high, s.end_ns))
    slices: list[_Slice] = []
    for (rank, job), steps in bounds.items():
        cursor = -(2**63)
        for step, (start, end) in sorted(steps.items()):
            start = max(start, cursor)
            cursor = max(end, start)
            name = f"step {step}"
            if step > last.get(job, step):
                name += ", which does not count"
            event = {"ph": "X", "name": name, "cat": "step", "pid": rank, "tid": tracks[job]}
            slices.append(_Slice(start, cursor, {**event, "args": {"job": job, "step": step}}))
    return slices


def _nested(slices: Iterable[_Slice]) -> Iterator[_Slice]:
    """Splits slices that partially overlap another slice on their track.

    Viewers require the slices (bars) on a track to be either nested or disjoint, but in a real run
    they may overlap partially. For example, a job may start waiting for its next batch during one
    step and still be waiting when that step is over. In that case, we split the wait in two where
    the step ends.
    """
    tracks: dict[tuple[int, int], list[_Slice]] = defaultdict(list)
    for part in slices:
        tracks[part.event["pid"], part.event["tid"]].append(part)
    for slices_of_track in tracks.values():
        count = itertools.count()  # breaks ties: of two equal slices, the first is outside
        heap = [(part.start_ns, -part.end_ns, next(count), part) for part in slices_of_track]
        heapq.heapify(heap)
        around: list[int] = []  # the ends of the open slices, innermost last
        while heap:
            start, end, _, part = heapq.heappop(heap)
            while around and around[-1] <= start:
                around.pop()
            if around and -end > around[-1]:
                rest = part._replace(start_ns=around[-1])
                heapq.heappush(heap, (rest.start_ns, end, next(count), rest))
                part = part._replace(end_ns=around[-1])
            around.append(part.end_ns)
            yield part


def _arrows(spans: tuple[Span, ...], origin: int) -> list[dict[str, Any]]:
    """Returns an arrow to each exchange from the compute segment that produced its operands."""
    computes: dict[tuple[int, str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "compute" and span.end_ns > span.start_ns:
            computes[span.rank, span.job, span.number].append(span)
    events: list[dict[str, Any]] = []
    for number, span in enumerate(s for s in spans if s.kind == "collective"):
        producer = _producer(span, computes[span.rank, span.job, span.number])
        if producer is None:
            continue
        arrow = {"name": "operands", "cat": "flow", "id": number, "pid": span.rank}
        # The arrow should leave from the compute segment's slice. Viewers attach an arrow to
        # whichever slice contains its timestamp, and a slice doesn't include its own end, so an
        # arrow starting exactly there would be left dangling. Start it 90% of the way through the
        # segment instead.
        left = min(
            producer.start_ns + (producer.end_ns - producer.start_ns) * 9 // 10, span.start_ns
        )
        events.append({**arrow, "ph": "s", "tid": _lane(producer), "ts": _us(left, origin)})
        events.append(
            {**arrow, "ph": "f", "bp": "e", "tid": _lane(span), "ts": _us(span.start_ns, origin)}
        )
    return events


def _producer(exchange: Span, computes: list[Span]) -> Span | None:
    """Returns the compute segment that produced the exchange's operands, if there is one.

    Only segments that began before the exchange can have produced its operands. Among these, we
    pick the last segment to have ended by the time the exchange's inputs became ready. Segment ends
    are recorded by a separate thread that may lag behind, so it can look as if no segment had ended
    by then; in that case, we settle for whichever ends first.
    """
    before = [
        c
        for c in computes
        if c.start_ns <= exchange.start_ns
        and (c.segment < exchange.segment or exchange.segment < 0)
    ]
    ended = [c for c in before if c.end_ns <= min(exchange.ready_ns, exchange.start_ns)]
    if ended:
        return max(ended, key=lambda c: (c.end_ns, c.segment))
    return min(before, key=lambda c: c.end_ns, default=None)
