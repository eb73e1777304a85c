"""The report around the account: joining ranks, files, text."""

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from jaxcross.interleave.instrument import Span
from jaxcross.report import Comparison, JobSummary, LiveView, Recorder, Report
from jaxcross.report import report as report_module

S = 1_000_000_000


def span(kind, job, step, start, end, *, rank=0, segment=None, lane=0, label=""):
    if segment is None:
        segment = {"compute": 0, "collective": 1}.get(kind, -1)
    return Span(
        rank=rank, job=job, step=step, segment=segment, kind=kind, lane=lane, start_ns=round(start * S),
        end_ns=round(end * S), ready_ns=round(start * S), nbytes=8 if kind == "collective" else 0, label=label,
    )  # fmt: skip


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
    """A control whose other ranks answer what they were told to."""

    def __init__(self, others):
        self.others = others

    def allgather_text(self, text):
        return [text, *self.others]


class Listener:
    """A control that keeps what a rank tells the others."""

    def __init__(self):
        self.sent = []

    def allgather_text(self, text):
        self.sent.append(text)
        return [text]


def two_ranks():
    listener = Listener()
    common = {"jobs": JOBS, "size": 2, "policy": "round_robin", "link": "emulated link 500mbit"}
    Report.build(run_of(1, begin=100), rank=1, start_ns=99 * S, end_ns=110 * S, control=listener, **common)
    return Report.build(run_of(0), rank=0, start_ns=-S, end_ns=10 * S, control=Rehearsed(listener.sent), **common)


def test_ranks_are_joined_on_one_clock():
    report = two_ranks()
    assert report.ranks == (0, 1)
    assert Counter(s.rank for s in report.spans) == {0: 18, 1: 18}
    on = [{(s.job, s.step, s.segment, s.start_ns) for s in report.spans if s.rank == rank} for rank in (0, 1)]
    assert on[0] == on[1]
    assert report.wall_ns == {0: (-S, 10 * S), 1: (-S, 10 * S)}
    assert report.rounds.period_s == 2.0


def test_facts_are_those_of_rank_0():
    listener = Listener()
    facts = [JobSummary(name="a", steps=4, final_loss=loss, metrics={"x": loss}) for loss in (0.5, float("nan"))]
    Report.build(run_of(0), jobs=facts[:1], rank=0, size=2, start_ns=0, end_ns=10 * S, control=listener)

    class Second:
        def allgather_text(self, text):
            return [*listener.sent, text]

    report = Report.build(run_of(1), jobs=facts[1:], rank=1, size=2, start_ns=0, end_ns=10 * S, control=Second())
    assert report.jobs == (facts[0],)


def test_a_report_of_many_ranks_keeps_the_latest_spans(monkeypatch):
    monkeypatch.setattr(report_module, "_MAX_SPANS", 10)
    report = Report.build(run_of(0), jobs=JOBS, start_ns=0, end_ns=10 * S)
    assert report.spans == tuple(run_of(0)[-10:])
    assert report.dropped == len(run_of(0)) - 10


def test_several_ranks_need_control():
    with pytest.raises(ValueError, match="a report of `2` ranks needs `control` to gather their spans"):
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
        JobSummary(name="a", steps=4, final_loss=float("nan"), metrics={"x": float("-inf"), "y": 0.5}),
        JobSummary(name="b", steps=4, final_loss=float("inf"), examples_per_step=float("inf")),
    ]
    report = Report.build(run_of(0), jobs=facts, start_ns=0, end_ns=10 * S)
    path = report.to_json(tmp_path / "report.json")
    strict(path)
    strict(report.to_chrome_trace(tmp_path / "trace.json"))
    assert repr(Report.load(path)) == repr(report)
    path.write_text(path.read_text().replace('"nan"', "NaN"))  # as earlier versions wrote it
    assert repr(Report.load(path)) == repr(report)


def strict(path):
    """Reads JSON as parsers of other languages do."""
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


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
        jobs=[JobSummary(name="a", steps=3)], start_ns=0, end_ns=12 * S,
    )  # fmt: skip
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
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    tracks = ("job a", "job b", "compute lane 0", "exchange lane 0")
    assert names == {(r, n) for r in (0, 1) for n in (f"rank {r}", *tracks)}
    tids = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= tids


def test_every_arrow_starts_in_a_compute_slice_and_ends_at_its_exchange():
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
            e for e in slices
            if (e["pid"], e["tid"], e["cat"]) == (start["pid"], start["tid"], "compute")
            and e["ts"] <= start["ts"] < e["ts"] + e["dur"]
        ]  # fmt: skip
        (exchange,) = [
            e for e in slices
            if (e["pid"], e["tid"], e["cat"]) == (end["pid"], end["tid"], "collective") and e["ts"] == end["ts"]
        ]  # fmt: skip
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        assert [maker["args"][k] for k in ("job", "step")] == [exchange["args"][k] for k in ("job", "step")]


def test_a_part_of_a_step_behind_the_last_is_named_so():
    from jaxcross.report.chrome import trace_events

    spans = tuple(span("compute", "a", step, step, step + 1) for step in (4, 5, 6))
    report = Report(spans=spans, jobs=(JobSummary(name="a", steps=2, first_step=3),), wall_ns={0: (0, 7 * S)})
    steps = [e["name"] for e in trace_events(report)["traceEvents"] if e.get("cat") == "step"]
    assert steps == ["step 4", "step 5", "step 6, which does not count"]


def test_slices_of_a_job_track_do_not_overlap():
    from jaxcross.report.chrome import trace_events

    # the next step's first segment begins before this step's exchange has ended
    spans = [span("compute", "a", 0, 0, 1), span("collective", "a", 0, 1, 3), span("compute", "a", 1, 2, 4)]
    report = Report.build(spans, jobs=[JobSummary(name="a", steps=2)], start_ns=0, end_ns=4 * S)
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in trace_events(report)["traceEvents"] if e.get("cat") == "step"]
    assert steps == [(0, 3e6), (3e6, 4e6)]


def test_the_recorder_keeps_the_latest():
    recorder = Recorder(limit=2)
    for step in range(5):
        recorder.span(span("compute", "a", step, step, step + 1))
    recorder.note(job="a", kind="loss", value=1.0)
    assert [s.step for s in recorder.spans()] == [3, 4]
    assert recorder.dropped == 3


def view(terminal=False, **kwargs):
    out = io.StringIO()
    return LiveView({"a": 3}, console=Console(file=out, force_terminal=terminal, width=100), **kwargs), out


def test_the_live_view_prints_lines_without_a_terminal():
    live, out = view()
    with live:
        live.note(job="a", kind="status", value="compiling")
        live.span(span("compile", "a", 0, 0, 2.5))
        for step in (1, 2, 3):
            live.span(span("compute", "a", step, 2 + step, 3 + step))
        live.note(job="a", kind="loss", value=0.5)
        live.note(job="a", kind="done")
        live.note(job="a", kind="loss", value=0.25)
    assert out.getvalue().splitlines() == [
        "a: compiling",
        "a: compiled in 2.50 s",
        "a: step 1/3",
        "a: step 2/3, 1.00 s/step",
        "a: step 3/3, 1.00 s/step, loss 0.500, done",
    ]


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        # the next step's first segment may end before this one's exchange
        ([1, 2, 3, 2, 3, 4, 5], ["step 1/5", "step 2/5", "step 3/5", "step 4/5", "step 5/5"]),
        ([4, 5], ["step 4/5", "step 5/5"]),  # it resumed after step 3
    ],
)
def test_the_live_view_counts_steps_by_their_numbers(steps, lines):
    out = io.StringIO()
    with LiveView({"a": 5}, console=Console(file=out, width=100)) as live:
        for at, step in enumerate(steps):
            live.span(span("compute", "a", step, at, at + 1))
        live.span(replace(span("compute", "a", 9, 9, 10), in_step=False))
        live.note(job="a", kind="done")
    assert [line.removeprefix("a: ").partition(",")[0] for line in out.getvalue().splitlines()] == lines


def test_the_live_view_shows_no_loss_as_another_step_s():
    live, out = view()
    with live:
        live.note(job="a", kind="status", value="resumes after step 1")
        live.note(job="a", kind="loss", step=2, value=0.5)  # before the first span says where it goes on
        live.span(span("compute", "a", 2, 0, 1))
        live.span(span("compute", "a", 3, 1, 2))
        live.note(job="a", kind="status", value="paused")
        live.note(job="a", kind="loss", step=3, value=0.25)
        live.note(job="a", kind="done", step=3)
    assert out.getvalue().splitlines() == [
        "a: resumes after step 1",
        "a: step 2/3, loss 0.500",
        "a: step 2/3, loss 0.500, paused",
        "a: step 3/3, loss 0.250, done",
    ]
    live, out = view()
    with live:
        for step in (1, 2, 3):
            live.span(span("compute", "a", step, step, step + 1))
            live.note(job="a", kind="loss", step=1, value=0.5)
    assert out.getvalue().splitlines()[1:] == [
        "a: step 1/3, loss 0.500",
        "a: step 2/3, 1.00 s/step, loss 0.500 of step 1",
    ]


@pytest.mark.parametrize("ends", [("done", "ended"), ("status", "disk full")])
def test_the_live_view_shows_another_run_of_a_job_from_its_beginning(ends):
    live, out = view()
    with live:
        for step in (1, 2, 3):
            live.span(span("compute", "a", step, step, step + 1))
        live.note(job="a", kind="loss", step=3, value=0.5)
        live.note(job="a", kind=ends[0], step=3, value=ends[1])
        live.note(job="a", kind="loss", step=3, value=0.25)  # read back late: of the run that is over
        live.span(span("input", "a", 0, 60, 61))
        for step in (1, 2):
            live.span(span("compute", "a", step, 60 + step, 61 + step))
        live.note(job="a", kind="done", step=2)
    again = out.getvalue().splitlines()[-3:]
    assert again == ["a: has data, traces and compiles its first step", "a: step 1/3", "a: step 2/3, done"]


def test_what_is_said_of_a_job_that_left_does_not_hide_why():
    live, out = view()
    with live:
        for step in (1, 2, 3):
            live.span(span("compute", "a", step, step, step + 1))
        live.note(job="a", kind="status", step=2, value="disk full")
        live.note(job="a", kind="status", value="its last state is not saved: no room")
        live.note(job="a", kind="status", value="joined")
    assert [line.removeprefix("a: ") for line in out.getvalue().splitlines()[-3:]] == [
        "step 2/3, 1.00 s/step, disk full",
        "step 2/3, 1.00 s/step, disk full; its last state is not saved: no room",
        "joined",
    ]


def test_a_loss_says_that_the_first_step_is_made():
    live, out = view()
    with live:
        live.note(job="a", kind="loss", step=1, value=0.5)
    assert out.getvalue() == "a: loss 0.500 of step 1\n"


def test_the_live_view_of_a_job_without_end_prints_ever_fewer_lines():
    out = io.StringIO()
    with LiveView({"a": None}, console=Console(file=out, width=100)) as live:
        for step in range(1, 302):
            live.span(span("compute", "a", step, step, step + 1))
    shown = [int(line.partition(",")[0].removeprefix("a: step ")) for line in out.getvalue().splitlines()]
    assert shown == [*range(1, 10), *range(10, 100, 10), 100, 200, 300]


def test_the_live_view_counts_the_last_step_of_a_job_that_fails():
    live, out = view()
    with live:
        for step in (1, 2):
            live.span(span("compute", "a", step, step, step + 1))
        live.note(job="a", kind="status", step=2, value="disk full")
    assert out.getvalue().splitlines()[-1] == "a: step 2/3, disk full"


def test_the_live_view_shows_the_step_of_a_job_that_had_ended_before():
    live, out = view()
    with live:
        live.note(job="a", kind="done", step=3)
    assert out.getvalue() == "a: step 3/3, done\n"


def test_the_live_view_says_once_that_a_job_compiles():
    """A second batch is taken before the first step has ended."""
    live, out = view()
    with live:
        live.span(span("input", "a", 0, 0, 1))
        live.span(span("compile", "a", 0, 1, 2))
        live.span(span("input", "a", 1, 2, 3))
        live.span(span("compute", "a", 1, 2, 4))
    assert out.getvalue().splitlines() == ["a: has data, traces and compiles its first step", "a: compiled in 1.00 s"]


def test_the_bars_of_jobs_that_have_ended_are_full():
    live, out = view(terminal=True)
    with live:
        for step in (1, 2, 3):
            live.span(span("compute", "a", step, step, step + 1))
        live.note(job="a", kind="done", step=3)
        live.span(span("compute", "b", 1, 0, 1))
        live.note(job="b", kind="status", step=1, value="disk full")
    last = out.getvalue().rpartition("\x1b[1A")[2]
    (a,), (b,) = ([line for line in last.splitlines() if f"{name} " in line] for name in "ab")
    assert "3/3" in a and "done" in a
    assert "1/?" in b and "disk full" in b


def test_the_live_view_draws_bars_on_a_terminal():
    live, out = view(terminal=True)
    with live:
        live.span(span("compute", "a", 1, 0, 1))
        live.span(span("compute", "a", 2, 1, 2))
    assert "1/3" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_names_and_errors_are_no_markup(terminal):
    live, out = view(terminal=terminal)
    with live:
        live.note(job="a[/b]", kind="status", value="cannot open [/data/x.npz]")
    assert "a[/b]" in out.getvalue() and "[/data/x.npz]" in out.getvalue()
    spans = [span("compute", "lr[0.1]", step, step, step + 1) for step in range(3)]
    report = Report.build(spans, jobs=[JobSummary(name="lr[0.1]", steps=3)], start_ns=0, end_ns=3 * S, link="[/x]")
    assert "lr[0.1]" in str(report) and "[/x]" in str(report)
    assert "lr[0.1]" in str(Comparison.of([report], [report]))


@pytest.mark.parametrize("terminal", [False, True])
def test_the_live_view_goes_on_when_nobody_reads(terminal, monkeypatch):
    said = []

    class Closed(io.StringIO):
        def write(self, text):
            said.append(text)
            raise BrokenPipeError

    live, taken = LiveView({"a": 3}, console=Console(file=Closed(), force_terminal=terminal, width=100)), []
    with monkeypatch.context() as patched:
        patched.setattr("os.dup2", lambda *places: taken.append(places))  # as rich does with stdout, before it exits
        with live:
            live.note(job="a", kind="status", value="compiling")
            live.note(job="a", kind="done")
    assert said and not taken


def test_the_live_view_of_other_ranks_is_silent():
    live, out = view(enabled=False)
    with live:
        live.note(job="a", kind="status", value="compiling")
        live.span(span("compute", "a", 0, 0, 1))
    assert out.getvalue() == ""
