"""Tests which rank a report calls slow, and what it says that this rank costs."""

from dataclasses import replace

import pytest

from jaxcross.interleave import PARAMETER_SERVER
from jaxcross.report import Report
from jaxcross.report.time_breakdown import break_down
from tests.support.breakdown_spans import S, facts, piece

M = 1.0


def job(name, ready_s, *, compute, begin=0.0, every=3.0):
    """A job on several ranks: rank `r` enters the exchange of step `n` at `ready_s[n][r]`.

    All times are relative to the beginning of the step. The last rank to enter waits for nobody.
    """
    spans = []
    for step, ready in enumerate(ready_s):
        start = begin + step * every
        for rank, enters in enumerate(ready):
            spans += [
                piece("compute", name, step, start, start + compute[rank], rank=rank),
                piece("collective", name, step, start + enters, start + max(ready) + M, rank=rank),
            ]
    return spans


def broken_down(spans, *names, ranks=2, steps=5):
    end_ns: int = max(span.end_ns for span in spans)
    return break_down(spans, facts(*names, steps=steps), dict.fromkeys(range(ranks), end_ns))


def test_a_rank_that_computes_longer_is_named():
    """Rank 1 computes for 2 s, the others for 1 s. A step takes 3 s instead of 2 s."""
    spans = job("a", [(1.0, 2.0, 1.0)] * 5, compute=(1.0, 2.0, 1.0))
    slow = broken_down(spans, "a", ranks=3).slow_rank
    assert slow is not None
    assert (slow.rank, slow.factor, slow.cost_share) == (1, 2.0, pytest.approx(1 / 3))


def test_all_ranks_that_compute_longer_are_named():
    """Ranks 1, 3 and 4 compute for 2 s, 1.5 s and 2 s, the others for 1 s."""
    compute = (1.0, 2.0, 1.0, 1.5, 2.0, 1.0)
    slow = broken_down(job("a", [compute] * 5, compute=compute), "a", ranks=6).slow_rank
    assert slow is not None
    assert (slow.rank, slow.other_ranks, slow.factor) == (1, (4, 3), 2.0)
    assert slow.cost_share == pytest.approx(1 / 3)
    assert slow.text("a round") == (
        "Ranks 1, 4 and 3 compute up to 2.00 times as long as the median rank: that costs 33% of a "
        "round."
    )
    assert replace(slow, other_ranks=(4,)).text("a round").startswith("Ranks 1 and 4 compute up to")
    assert replace(slow, other_ranks=(4, 3, 7)).text("it").startswith("Ranks 1, 4, 3 and 7 compute")
    assert (
        replace(slow, other_ranks=tuple(range(2, 20)))
        .text("it")
        .startswith("Ranks 1, 2, 3 and 16 more compute up to 2.00 times")
    )


def test_ranks_that_are_equally_fast_are_not_named():
    spans = job("a", [(2.0, 2.0)] * 5, compute=(2.0, 2.0))
    assert broken_down(spans, "a").slow_rank is None
    spans = job("a", [(2.0, 1.95)] * 5, compute=(2.0, 1.95))
    assert broken_down(spans, "a").slow_rank is None


def test_a_rank_that_is_late_without_computing_longer_is_named():
    """Rank 0 computes as long as rank 1, but enters each exchange a second later."""
    spans = job("a", [(2.0, 1.0)] * 5, compute=(1.0, 1.0))
    result = broken_down(spans, "a")
    slow = result.slow_rank
    assert slow is not None
    assert (slow.rank, slow.factor, slow.cost_share) == (0, 1.0, pytest.approx(1 / 3))
    report = Report(
        spans=tuple(spans), jobs=tuple(facts("a")), wall_ns={0: (0, 15 * S), 1: (0, 15 * S)}
    )
    assert (
        "Rank 0 is late, though not because of its computation: the others do nothing but wait for "
        "it in 33% of a round."
    ) in " ".join(str(report).split())
    assert report.summary()["slow_rank"] == {
        "rank": 0,
        "factor": 1.0,
        "cost_share": 1 / 3,
        "is_late": True,
        "other_ranks": (),
    }


def test_a_late_rank_that_also_computes_longer_is_not_said_to_be_late_for_other_reasons():
    """Rank 1 computes 0.1 s longer, which costs too little to be named, and enters 1.6 s later."""
    slow = broken_down(job("a", [(0.4, 2.0)] * 5, compute=(0.4, 0.5)), "a").slow_rank
    assert slow is not None
    assert (slow.rank, slow.factor, slow.is_late) == (1, 1.25, True)
    assert slow.text("a round") == (
        "Rank 1 is late, and computes 1.25 times as long as the median rank: the others do nothing "
        "but wait for it in 53% of a round."
    )


def test_a_run_with_a_parameter_server_names_none():
    """Its ranks don't wait for each other, so a slow one doesn't hold up the others."""
    spans = []
    for rank in range(2):
        for step in range(6):
            begin, end = step * (1 + rank), (step + 0.9) * (1 + rank)
            served = piece("collective", "a", step, begin, end, rank=rank)
            spans += [
                replace(served, label=PARAMETER_SERVER),
                piece("compute", "b", step, begin, end, rank=rank),
            ]
    assert broken_down(spans, "a", "b", steps=6).slow_rank is None


def test_ranks_that_are_late_in_turn_are_not_named():
    spans = job("a", [(2.0, 1.0), (1.0, 2.0)] * 3, compute=(1.0, 1.0))
    assert broken_down(spans, "a", steps=6).slow_rank is None


def test_a_late_rank_that_others_compute_through_is_not_named():
    """While rank 1 waits for rank 0 in the exchange of `a`, it computes for `b`."""
    late = job("a", [(2.0, 1.0)] * 5, compute=(1.0, 1.0))
    hidden = [
        piece("compute", "b", step, 3 * step + 1.0, 3 * step + 2.0, rank=rank)
        for step in range(5)
        for rank in range(2)
    ]
    assert broken_down([*late, *hidden], "a", "b").slow_rank is None


def test_a_run_of_one_rank_names_none():
    spans = [replace(span, rank=0) for span in job("a", [(1.0,)] * 5, compute=(1.0,))]
    assert broken_down(spans, "a", ranks=1).slow_rank is None
