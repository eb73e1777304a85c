"""The live view: the lines and bars that it shows of a job from its first step to its end."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from jaxcross.report import Comparison, JobSummary, LiveView, Report
from tests.support.report_spans import S, span


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
def test_live_view_shows_a_rerun_from_its_beginning(ends):
    """The live view shows another run of a job from its beginning."""
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


def test_later_notes_on_a_job_do_not_hide_why_it_left():
    """What is reported later about a job that left does not hide why it left."""
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


def test_live_view_of_an_endless_job_prints_ever_less():
    """The live view of a job without end prints fewer and fewer lines."""
    out = io.StringIO()
    with LiveView({"a": None}, console=Console(file=out, width=100)) as live:
        for step in range(1, 302):
            live.span(span("compute", "a", step, step, step + 1))
    shown = [int(line.partition(",")[0].removeprefix("a: step ")) for line in out.getvalue().splitlines()]
    assert shown == [*range(1, 10), *range(10, 100, 10), 100, 200, 300]


def test_live_view_counts_a_failing_jobs_last_step():
    """The live view counts the last step of a job that fails."""
    live, out = view()
    with live:
        for step in (1, 2):
            live.span(span("compute", "a", step, step, step + 1))
        live.note(job="a", kind="status", step=2, value="disk full")
    assert out.getvalue().splitlines()[-1] == "a: step 2/3, disk full"


def test_live_view_shows_step_of_an_earlier_ended_job():
    """The live view shows the step of a job that had ended before."""
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
