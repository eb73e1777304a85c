"""A run as Chrome trace events (the JSON Object Format), which Perfetto reads too.

One process a rank. In it one track a job (its steps, and in each its waiting and segments), the compute lanes and the
exchange lanes. An arrow leads from the compute segment that made an exchange's operands to the exchange.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from jaxcross.report.timeline import in_lane_order
from jaxcross.runtime.events import Span

if TYPE_CHECKING:
    from jaxcross.report.report import Report

LANE_TRACK = 1000
"""Track numbers: jobs from 1, compute lanes from 1000, exchange lanes from 2000, so that they sort so."""


def trace_events(report: Report) -> dict[str, Any]:
    """The whole file as plain data. Times are microseconds from the first span."""
    spans = in_lane_order(report.spans)
    origin = min((span.start_ns for span in spans), default=0)
    tracks = {job.name: i for i, job in enumerate(report.jobs, start=1)}
    for span in spans:
        if span.job and span.job not in tracks:
            tracks[span.job] = len(tracks) + 1
    lanes = sorted({(s.rank, lane, _lane_name(s)) for s in spans if (lane := _lane(s)) is not None})
    events: list[dict[str, Any]] = []
    for rank in sorted({*report.ranks, *(span.rank for span in spans)}):
        events += [_meta("process_name", rank, name=f"rank {rank}"), _meta("process_sort_index", rank, sort_index=rank)]
        for job, track in tracks.items():
            events += _track(rank, track, f"job {job}")
        for _, lane, name in (lane for lane in lanes if lane[0] == rank):
            events += _track(rank, lane, name)
    events += _steps(spans, tracks, origin)
    for span in spans:
        events += _pieces(span, tracks, origin)
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
    return [_meta("thread_name", pid, tid, name=name), _meta("thread_sort_index", pid, tid, sort_index=tid)]


def _name(span: Span) -> str:
    what = {"collective": "exchange"}.get(span.kind, span.kind)
    return span.label or (f"{what} {span.segment}" if span.segment >= 0 else what)


def _pieces(span: Span, tracks: dict[str, int], origin: int) -> list[dict[str, Any]]:
    """A span on its lane, or on its job's track if it has no lane."""
    lane = _lane(span)
    track = lane if lane is not None else tracks.get(span.job, 0)
    name = _name(span) if lane is None or not span.job else f"{span.job} {_name(span)}"
    args: dict[str, Any] = {"job": span.job, "step": span.step, "segment": span.segment}
    args["ready_us"] = _us(span.ready_ns, origin)
    if span.nbytes:
        args["bytes"] = span.nbytes
    event = {"ph": "X", "name": name, "cat": span.kind, "pid": span.rank, "tid": track, "args": args}
    return [{**event, "ts": _us(span.start_ns, origin), "dur": (span.end_ns - span.start_ns) / 1e3}]


def _steps(spans: tuple[Span, ...], tracks: dict[str, int], origin: int) -> list[dict[str, Any]]:
    """A job's steps on its own track, from the first segment's begin to the last one's end.

    The begin is moved to the end of the step before where the first compute segment started earlier (it needs no
    agreement, so it may): slices of one track must nest.
    """
    bounds: dict[tuple[int, str], dict[int, tuple[int, int]]] = defaultdict(dict)
    for s in spans:
        if s.kind in ("compute", "collective") and s.job:
            low, high = bounds[s.rank, s.job].get(s.step, (s.start_ns, s.end_ns))
            bounds[s.rank, s.job][s.step] = (min(low, s.start_ns), max(high, s.end_ns))
    events: list[dict[str, Any]] = []
    for (rank, job), steps in bounds.items():
        cursor = 0
        for step, (start, end) in sorted(steps.items()):
            start = max(start, cursor)
            cursor = max(end, start)
            event = {"ph": "X", "name": f"step {step}", "cat": "step", "pid": rank, "tid": tracks[job]}
            event |= {"ts": _us(start, origin), "dur": (cursor - start) / 1e3, "args": {"job": job, "step": step}}
            events.append(event)
    return events


def _arrows(spans: tuple[Span, ...], origin: int) -> list[dict[str, Any]]:
    """From the last compute segment of the same step that ended by the time the exchange's inputs were ready."""
    computes: dict[tuple[int, str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind == "compute":
            computes[span.rank, span.job, span.step].append(span)
    events: list[dict[str, Any]] = []
    for number, span in enumerate(s for s in spans if s.kind == "collective"):
        before = [
            c
            for c in computes[span.rank, span.job, span.step]
            if c.end_ns <= span.end_ns and (c.segment < span.segment or span.segment < 0)
        ]
        if not before:
            continue
        maker = max(before, key=lambda c: (c.segment, c.end_ns))
        arrow = {"name": "operands", "cat": "flow", "id": number, "pid": span.rank}
        # a flow binds to the slice that encloses its time stamp: inside the maker, not on its open right edge
        left = maker.start_ns + (maker.end_ns - maker.start_ns) * 9 // 10
        events.append({**arrow, "ph": "s", "tid": _lane(maker), "ts": _us(left, origin)})
        events.append({**arrow, "ph": "f", "bp": "e", "tid": _lane(span), "ts": _us(span.start_ns, origin)})
    return events
