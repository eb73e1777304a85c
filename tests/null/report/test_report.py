"""Tests the report: ranks on a common clock, files, the table as text, and the Chrome trace."""

import json
from collections import Counter

import pytest

from jaxcross.report import JobSummary, Report
from jaxcross.report import report as report_module
from jaxcross.report.record import Recorder
from tests.support.report_spans import S, span


def run_of(rank=0, begin=0.0, steps=4):
    spans = [span("compile", "a", 0, begin - 1, begin, rank=rank)]
    for step in range(steps):
        for shift, job in enumerate("ab"):
            t = begin + 2 * step + shift
            spans += [span("compute", job, step, t, t + 1, rank=rank)]
            spans += [span("collective", job, step, t + 1, t + 2, rank=rank)]
    spans.append(span("vote", "", 1, begin + 2, begin + 2.01, rank=rank))
    return spans


JOBS = [
    JobSummary(name="a", steps=4, examples_per_step=8, final_loss=0.7),
    JobSummary(name="b", steps=4, examples_per_step=8),
]


class Rehearsed:
    """A control plane whose other ranks give fixed answers."""

    def __init__(self, others):
        self.others = others

    def allgather_text(self, text):
        return [text, *self.others]


class Listener:
    """A control plane that keeps what a rank sends to the others."""

    def __init__(self):
        self.sent = []

    def allgather_text(self, text):
        self.sent.append(text)
        return [text]


def two_ranks():
    listener = Listener()
    common = {"jobs": JOBS, "size": 2, "policy": "round_robin", "link": "emulated link 500mbit"}
    Report.build(
        run_of(1, begin=100), rank=1, start_ns=99 * S, end_ns=110 * S, control=listener, **common
    )
    return Report.build(
        run_of(0), rank=0, start_ns=-S, end_ns=10 * S, control=Rehearsed(listener.sent), **common
    )


def test_ranks_are_joined_on_one_clock():
    report = two_ranks()
    assert report.ranks == (0, 1)
    assert Counter(s.rank for s in report.spans) == {0: 18, 1: 18}
    on = [
        {(s.job, s.step, s.segment, s.start_ns) for s in report.spans if s.rank == rank}
        for rank in (0, 1)
    ]
    assert on[0] == on[1]
    assert report.wall_ns == {0: (-S, 10 * S), 1: (-S, 10 * S)}
    assert report.rounds.period_s == 2.0


def test_facts_are_those_of_rank_0():
    listener = Listener()
    facts = [
        JobSummary(name="a", steps=4, final_loss=loss, metrics={"x": loss})
        for loss in (0.5, float("nan"))
    ]
    Report.build(
        run_of(0), jobs=facts[:1], rank=0, size=2, start_ns=0, end_ns=10 * S, control=listener
    )

    class Second:
        def allgather_text(self, text):
            return [*listener.sent, text]

    report = Report.build(
        run_of(1), jobs=facts[1:], rank=1, size=2, start_ns=0, end_ns=10 * S, control=Second()
    )
    assert report.jobs == (facts[0],)


def test_a_report_of_many_ranks_keeps_the_latest_spans(monkeypatch):
    monkeypatch.setattr(report_module, "_MAX_SPANS", 10)
    report = Report.build(run_of(0), jobs=JOBS, start_ns=0, end_ns=10 * S)
    assert report.spans == tuple(run_of(0)[-10:])
    assert report.dropped == len(run_of(0)) - 10


def test_several_ranks_need_control():
    with pytest.raises(
        ValueError, match="a report of `2` ranks needs `control` to gather their spans"
    ):
        Report.build([], jobs=JOBS, start_ns=0, end_ns=1, size=2)


def test_json_loads_back_equal(tmp_path):
    report = two_ranks()
    path = report.to_json(tmp_path / "report.json")
    assert Report.load(path) == report
    summary = json.loads(path.read_text())["summary"]
    assert summary["s_per_step"] == 1.0
    assert [job["name"] for job in summary["jobs"]] == ["a", "b"]
    assert summary["link"] == "emulated link 500mbit"


def test_numbers_that_are_not_finite_load_back(tmp_path):
    facts = [
        JobSummary(
            name="a", steps=4, final_loss=float("nan"), metrics={"x": float("-inf"), "y": 0.5}
        ),
        JobSummary(name="b", steps=4, final_loss=float("inf"), examples_per_step=float("inf")),
    ]
    report = Report.build(run_of(0), jobs=facts, start_ns=0, end_ns=10 * S)
    path = report.to_json(tmp_path / "report.json")
    strict(path)
    strict(report.to_chrome_trace(tmp_path / "trace.json"))
    assert repr(Report.load(path)) == repr(report)
    path.write_text(path.read_text().replace('"nan"', "NaN"))  # the format of earlier versions
    assert repr(Report.load(path)) == repr(report)


def strict(path):
    """Parses JSON as strictly as the parsers of other languages do."""
    return json.loads(
        path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON")
    )


def test_a_file_that_is_no_report(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a report of jaxcross"):
        Report.load(path)


def test_the_table_as_text():
    text = str(two_ranks())
    assert "round_robin, 2 ranks, emulated link 500mbit" in text
    assert "examples/s" in text
    assert "all 2" in text
    assert "Round 2.00 s (one step of every job), bound 2.00 s" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_speed_up_compares_job_steps():
    slow = Report.build(
        [s for step in range(3) for s in (span("compute", "a", step, 4 * step, 4 * step + 4),)],
        jobs=[JobSummary(name="a", steps=3)],
        start_ns=0,
        end_ns=12 * S,
    )
    assert two_ranks().speedup(over=slow) == 4.0


def test_chrome_trace_has_the_events_that_viewers_read(tmp_path):
    report = two_ranks()
    content = json.loads(report.to_chrome_trace(tmp_path / "trace.json").read_text())
    events = content["traceEvents"]
    assert {e["ph"] for e in events} == {"X", "M", "s", "f"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    names = {
        (e["pid"], e["args"]["name"])
        for e in events
        if e["name"] in ("process_name", "thread_name")
    }
    tracks = ("job a", "job b", "compute lane 0", "exchange lane 0")
    assert names == {(r, n) for r in (0, 1) for n in (f"rank {r}", *tracks)}
    tids = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= tids


def test_arrows_lead_from_compute_to_their_exchange():
    from jaxcross.report.chrome import trace_events

    events = trace_events(two_ranks())["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == 2 * 2 * 4
    assert starts.keys() == ends.keys()
    slices = [e for e in events if e["ph"] == "X"]
    for number, start in starts.items():
        end = ends[number]
        (maker,) = [
            e
            for e in slices
            if (e["pid"], e["tid"], e["cat"]) == (start["pid"], start["tid"], "compute")
            and e["ts"] <= start["ts"] < e["ts"] + e["dur"]
        ]
        (exchange,) = [
            e
            for e in slices
            if (e["pid"], e["tid"], e["cat"]) == (end["pid"], end["tid"], "collective")
            and e["ts"] == end["ts"]
        ]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        assert [maker["args"][k] for k in ("job", "step")] == [
            exchange["args"][k] for k in ("job", "step")
        ]


def test_a_part_of_a_step_behind_the_last_is_named_so():
    from jaxcross.report.chrome import trace_events

    spans = tuple(span("compute", "a", step, step, step + 1) for step in (4, 5, 6))
    report = Report(
        spans=spans, jobs=(JobSummary(name="a", steps=2, first_step=3),), wall_ns={0: (0, 7 * S)}
    )
    steps = [e["name"] for e in trace_events(report)["traceEvents"] if e.get("cat") == "step"]
    assert steps == ["step 4", "step 5", "step 6, which does not count"]


def test_slices_of_a_job_track_do_not_overlap():
    from jaxcross.report.chrome import trace_events

    # The next step's first segment begins before this step's exchange has ended.
    spans = [
        span("compute", "a", 0, 0, 1),
        span("collective", "a", 0, 1, 3),
        span("compute", "a", 1, 2, 4),
    ]
    report = Report.build(spans, jobs=[JobSummary(name="a", steps=2)], start_ns=0, end_ns=4 * S)
    steps = [
        (e["ts"], e["ts"] + e["dur"])
        for e in trace_events(report)["traceEvents"]
        if e.get("cat") == "step"
    ]
    assert steps == [(0, 3e6), (3e6, 4e6)]


def test_the_recorder_keeps_the_latest():
    recorder = Recorder(limit=2)
    for step in range(5):
        recorder.span(span("compute", "a", step, step, step + 1))
    recorder.note(job="a", kind="loss", value=1.0)
    assert [s.step for s in recorder.spans()] == [3, 4]
    assert recorder.dropped == 3
