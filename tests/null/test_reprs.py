"""Tests how a console or notebook displays a result that isn't printed.

It's a single line, however long the run was.
"""

import re
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest

from jaxcross import plan
from jaxcross.jobs.fused import Fusion
from jaxcross.plan.speedup import StepCost, estimate_of
from jaxcross.report import Comparison, JobSummary, Report
from jaxcross.report.sweep_result import SweepResult, SweepTrial
from tests.support.fakes import plain_program
from tests.support.report_spans import S, span

STEPS = 300


def report(policy: str = "round-robin") -> Report:
    spans = [
        span(kind, job, step, 2 * step + shift, 2 * step + shift + 1, segment=shift)
        for step in range(STEPS)
        for job in "ab"
        for shift, kind in enumerate(("compute", "collective"))
    ]
    program = {"graph": profile("a").graph.as_data(), "steps": STEPS, "memory": {}}
    jobs = [
        JobSummary(name="a", steps=STEPS, program=program),
        JobSummary(
            name="b",
            steps=STEPS,
            program=program,
            how="failed",
            why="ValueError: the loader failed",
        ),
    ]
    return Report.build(spans, jobs=jobs, start_ns=0, end_ns=2 * STEPS * S, policy=policy)


def profile(name: str) -> plan.Profile:
    return plan.Profile.whole(name, compute_s=0.2, exchange_s=0.1, ranks=2).cut_evenly(40)


def sweep_result() -> SweepResult:
    trials = tuple(
        SweepTrial(
            number=n,
            name=f"trial{n}",
            params={"lr": n / 10},
            status="finished",
            step=STEPS,
            value=float(n),
            values=tuple((step, 1.0) for step in range(STEPS)),
        )
        for n in range(100)
    )
    return SweepResult(
        metric="error", mode="min", trials=trials, best=trials[0], reports=(report(),)
    )


RESULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "report": (
        report,
        (
            "<Report of 2 jobs (1 ended, 1 failed): 600 steps in 600.00 s on 1 rank; "
            "print() shows the table>"
        ),
    ),
    "sweep": (
        sweep_result,
        (
            "<Sweep of 100 trials by error (min): 100 finished. Best: lr 0, with error 0 after 300 "
            "steps; print() shows "
        ),
    ),
    "plan": (
        lambda: plan.make(
            [plan.Profile.whole(f"job{n}", compute_s=0.2, exchange_s=0.1) for n in range(4)]
        ),
        "<Plan of 4 jobs in ",
    ),
    "profile": (
        lambda: profile("a"),
        (
            "<Profile of `a` on 2 ranks: 200 ms of computation and 100 ms of exchange in 81 "
            "segments; print() shows the table>"
        ),
    ),
    "prediction": (
        lambda: plan.predict(
            [plan.Profile.whole(name, compute_s=0.2, exchange_s=0.1) for name in "ab"], steps=40
        ),
        "<Prediction of 2 jobs, round-robin: 80 steps in ",
    ),
    "estimate": (
        lambda: estimate_of(
            StepCost(whole=profile("step"), steps=4, wire_bytes=10**7, narrow_wire_bytes=10**6)
        ),
        "<Estimate of `step`: ",
    ),
    "comparison": (lambda: Comparison.of([report("sequential")], [report()]), "Comparison("),
    "facts": (lambda: report().jobs[0], "JobSummary(name='a', steps=300, "),
    "rounds": (lambda: report().rounds, "TimeBreakdown("),
    "program": (
        lambda: plain_program("step", exchanges=50),
        "<Program `step`: segments 51 compute, 50 collective; print() lists them>",
    ),
}


SHOWN = {name: make for name, (make, _) in RESULTS.items() if name not in ("facts", "rounds")} | {
    "difference": lambda: plan.predict([profile("a"), profile("b")], steps=STEPS).difference(
        plan.predict([profile("a"), profile("b")], steps=STEPS).report
    ),
    "fusion": lambda: Fusion(jobs=(), reasons=("`a`, `b`: fused", "`c`: x < y & z")),
}


@pytest.mark.parametrize(("make", "begin"), RESULTS.values(), ids=RESULTS)
def test_a_result_is_shown_in_a_line(make: Callable[[], Any], begin: str) -> None:
    result = make()
    assert repr(result).startswith(begin)
    assert len(repr(result)) < 1000 and "\n" not in repr(result)


def words_of(html: str) -> list[str]:
    """Returns the words that a browser shows for a result, in alphabetical order."""
    return sorted(unescape(re.sub("<[^>]*>", " ", html)).split())


@pytest.mark.parametrize("make", SHOWN.values(), ids=SHOWN)
def test_a_notebook_shows_what_print_shows(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser wraps texts at other places than a terminal does, but it's the same words."""
    monkeypatch.setenv("COLUMNS", "110")
    result = make()
    printed = re.sub("[\u2500-\u257f]", " ", str(result))  # without the lines of the table
    assert words_of(result._repr_html_()) == sorted(printed.split())


@pytest.mark.parametrize("name", ["program", "estimate", "fusion"])
def test_a_notebook_shows_texts_as_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a text are aligned by spaces."""
    monkeypatch.setenv("COLUMNS", "110")
    result = SHOWN[name]()
    opened, text = result._repr_html_().split(">", 1)
    assert opened.startswith("<pre ") and "white-space:pre;" in opened
    assert unescape(text) == f"{result}</pre>"


TABLES = ("report", "sweep", "plan", "profile", "prediction", "comparison", "difference")


@pytest.mark.parametrize("name", TABLES)
def test_a_notebook_shows_a_table(name: str) -> None:
    html = SHOWN[name]()._repr_html_()
    assert re.match("<div [^>]*><table [^>]*><caption [^>]*>[^/]", html)
    assert html.count("<table") == 1 and "<pre" not in html


@pytest.mark.parametrize("make", [report, sweep_result], ids=["report", "sweep"])
def test_print_in_a_notebook_is_text(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook kernel, rich would otherwise display the table itself and return nothing."""
    expected = str(make())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(make()) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda name: Report.build(
            [], jobs=[JobSummary(name=name, steps=1)], start_ns=0, end_ns=S, policy="round-robin"
        ),
        lambda name: plan.make([plan.Profile.whole(name, compute_s=0.2, exchange_s=0.1)]),
        lambda name: SweepResult(
            metric=name,
            mode="min",
            trials=(
                SweepTrial(
                    number=0, name=name, params={}, status="failed", step=0, value=None, error=name
                ),
            ),
            best=None,
        ),
        lambda name: estimate_of(
            StepCost(whole=profile(name), steps=4, wire_bytes=10**7, narrow_wire_bytes=10**6)
        ),
        lambda name: plain_program(name, exchanges=1),
        lambda name: Fusion(jobs=(), reasons=(name,)),
    ],
    ids=["report", "plan", "sweep", "estimate", "program", "fusion"],
)
def test_names_are_no_markup_of_a_notebook(make: Callable[[str], Any]) -> None:
    name = "<b>&[red]"
    html = make(name)._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;[red]" in html
