"""Tests tables and the lines below them on a terminal of 80 columns.

No line may be longer, and no number may be broken.
"""

import pytest

from jaxcross.interleave.instrument import Span
from jaxcross.report import Comparison, JobSummary, Report
from jaxcross.report.sweep_result import SweepResult, SweepTrial
from jaxcross.report.table import screen_width

S = 1_000_000_000


def report(policy="round-robin"):
    names = ("resnet50-lr-0.1", "a-transformer-with-a-long-name")
    spans = [
        Span(
            rank=0,
            job=name,
            step=n + 1,
            segment=segment,
            kind=("compute", "collective")[segment],
            lane=0,
            start_ns=start * S,
            end_ns=(start + 1) * S,
            ready_ns=start * S,
        )
        for n in range(6)
        for j, name in enumerate(names)
        for segment in (0, 1)
        for start in [2 * n + j + segment]
    ]
    jobs = [
        JobSummary(
            name=name,
            steps=6,
            first_step=700,
            how="stopped",
            examples_per_step=256,
            final_loss=1.25,
        )
        for name in names
    ]
    return Report.build(
        spans, jobs=jobs, start_ns=0, end_ns=16 * S, policy=policy, link="emulated link 500mbit"
    )


def sweep():
    params = {
        "lr": 0.001,
        "width": 1024,
        "dropout": 0.1,
        "activation": "a-word-of-thirty-characters-12",
    }
    trials = tuple(
        SweepTrial(number=n, name=f"t{n}", params=params, status="finished", step=1000, value=0.5)
        for n in range(2)
    )
    return SweepResult(metric="eval/accuracy", mode="max", trials=trials, best=trials[0])


@pytest.mark.parametrize(
    "make", [report, sweep, lambda: Comparison.of([report("sequential")], [report()])]
)
def test_every_line_fits(monkeypatch, make):
    monkeypatch.setenv("COLUMNS", "80")
    text = str(make())
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text, "nothing is left out"
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, str(make()).splitlines())) > 80


def test_numbers_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert all(number in str(report()) for number in ("6 (701 to 706)", "1.00 s", "1.25"))


def test_a_wide_table_becomes_several(monkeypatch):
    """A truncated number would read as a different number. Each of the tables repeats the row
    names.
    """
    monkeypatch.setenv("COLUMNS", "80")
    names = ("momentum", "weight_decay", "warmup_steps", "label_smoothing", "dropout")
    params = {name: 0.0001234 + n for n, name in enumerate(names)}
    trials = tuple(
        SweepTrial(number=n, name=f"t{n}", params=params, status="pruned", step=30000, value=0.5)
        for n in (17, 18)
    )
    text = str(SweepResult(metric="eval/accuracy", mode="max", trials=trials, best=None))
    assert max(map(len, text.splitlines())) <= 80
    for cell in ("17", "18"):
        assert sum(line.split()[:1] == [cell] for line in text.splitlines()) == 2
    words = text.split()
    assert all(words.count(word) == 2 for word in ("0.0001234", "4", "30000", "0.5"))
    assert all(name in words for name in names)


def test_a_file_has_no_width():
    assert screen_width({}) == 0
    assert screen_width({"COLUMNS": "72"}) == 72
    assert screen_width({"COLUMNS": "wide"}) == 0
