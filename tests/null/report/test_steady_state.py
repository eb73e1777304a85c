"""Tests a run's steady state: which jobs share rounds, from when to when, and which steps count."""

from dataclasses import replace

import pytest

from jaxcross.report.compare import Comparison
from jaxcross.report.report import Report
from jaxcross.report.summary import JobSummary
from jaxcross.report.time_breakdown import break_down
from tests.support.breakdown_spans import S, alone, crossed, facts, piece


def test_a_single_step_is_no_steady_state():
    result = break_down(alone("a", 1, begin=5), facts("a", steps=1), {0: 8 * S})
    assert (result.period_s, result.bound_s, result.lost_s) == (None, None, {})
    (job,) = result.jobs
    assert (job.compute_s, job.exchange_s, job.period_s) == (1.0, 1.0, 0.0)


def test_jobs_never_steady_together_have_no_round():
    """b compiles during all of a's training."""
    spans = [*alone("a", 4), piece("compile", "b", 0, 0, 10), *alone("b", 4, begin=10)]
    result = break_down(spans, facts("a", "b", steps=4), {0: 20 * S})
    assert (
        result.period_s
        is result.bound_s
        is result.efficiency
        is result.s_per_step
        is result.examples_per_s
        is None
    )
    assert (result.lost_s, result.bottleneck, result.steady_share) == ({}, "", 0)
    assert result.shared_share == 0.4  # 8 of 20 s
    assert [(job.period_s, job.compute_s, job.steps_per_round) for job in result.jobs] == [
        (2.0, 1.0, 0)
    ] * 2


def test_less_than_a_round_together_is_none():
    # a ends with the step that it makes during b's first step
    spans = [*alone("a", 4), *alone("b", 4, begin=5)]
    assert break_down(spans, facts("a", "b", steps=4), {0: 20 * S}).period_s is None


def test_job_without_a_second_step_is_not_in_the_round():
    spans = [*crossed(5), piece("compute", "c", 1, 4, 4.5)]
    result = break_down(spans, facts("a", "b", "c"), {0: 12 * S})
    assert (result.period_s, result.s_per_step) == (2.0, 1.0)
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]


def test_the_tail_of_one_job_is_not_measured():
    """b continues alone, and faster. The rows cover only the time when both ran, so they add up."""
    spans = [*crossed(5), *alone("b", 20, begin=20)]
    renumbered = [replace(s, step=s.step + 5) if s.start_ns >= 20 * S else s for s in spans]
    result = break_down(renumbered, facts("a", "b", examples_per_step=8), {0: 60 * S})
    assert result.period_s == 2.0
    assert sum(job.examples_per_s for job in result.jobs) == result.examples_per_s == 8.0


def test_an_evaluation_is_no_step():
    """One evaluation comes before the training. Another, which exchanges, comes in the middle of
    it.
    """
    spans = [replace(piece("compute", "a", 0, 0, 1), in_step=False)]
    spans += [replace(s, step=s.step + 1) for s in alone("a", 2, begin=10)]
    spans += [replace(s, step=3, in_step=False) for s in alone("a", 1, begin=14)]
    spans += [replace(s, step=s.step + 4) for s in alone("a", 2, begin=16)]
    result = break_down(spans, facts("a", steps=4), {0: 20 * S})
    assert result.rounds == 3
    assert result.period_s == pytest.approx(8 / 3)  # 12 to 20 s, including the evaluation
    assert result.bound_s == result.period_s


def test_steady_jobs_have_a_round_after_a_third_left():
    """c has ended before a and b complete their first steps. The round covers a and b, on both
    ranks.
    """
    spans = [
        s for rank in (0, 1) for s in (*crossed(8, rank=rank, begin=20), *alone("c", 4, rank=rank))
    ]
    result = break_down(spans, facts("a", "b", "c", steps=8), {0: 40 * S, 1: 40 * S})
    assert (result.period_s, result.bound_s, result.efficiency, result.s_per_step) == (
        2.0,
        2.0,
        1.0,
        1.0,
    )
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    # c's period is that of its own steady state.
    assert [job.period_s for job in result.jobs] == [2.0, 2.0, 2.0]


def test_job_leaving_soon_leaves_the_round_to_others():
    """a and c are in steady state together for less than a round, but c and b for eight rounds."""
    spans = [
        *alone("a", 4),
        *(replace(s, job={"a": "b", "b": "c"}[s.job]) for s in crossed(10, begin=5)),
    ]
    result = break_down(spans, facts("a", "b", "c", steps=10), {0: 40 * S})
    assert [job.steps_per_round for job in result.jobs] == [0, 1, 1]
    assert result.period_s == 2.0


def test_job_leaving_after_two_rounds_does_not_set_it():
    """After their first steps, a, b and c make two rounds of 3 s. Then a and b make thirty rounds
    of 2 s.
    """
    spans = [
        piece("compute", job, n, 3 * n + k, 3 * n + k + 1)
        for n in range(3)
        for k, job in enumerate("abc")
    ]
    spans += [
        piece("compute", job, n + 3, 9 + 2 * n + k, 10 + 2 * n + k)
        for n in range(30)
        for k, job in enumerate("ab")
    ]
    result = break_down(spans, facts("a", "b", "c", steps=33), {0: 70 * S})
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    assert 2.0 <= result.period_s < 2.2  # c took part in two of the 32 rounds
    assert result.steady_share > 0.9


def test_a_step_that_does_not_count_is_none():
    """A job stops or fails in its sixth step, which has computed but not exchanged anything."""
    spans = [*alone("a", 5, nbytes=64), piece("compute", "a", 5, 10, 10.5)]
    result = break_down(spans, facts("a", how="stopped"), {0: 11 * S})
    assert (result.period_s, result.rounds, result.jobs[0].bytes_per_step) == (2.0, 4, 64)


def test_total_hidden_share_is_that_of_the_round():
    """c exchanges alone beforehand. It has no numbers in its row, and doesn't count in the last
    row.
    """
    spans = [*alone("c", 4, exchange=9), *crossed(8, begin=60)]
    result = break_down(spans, facts("a", "b", "c", steps=8), {0: 90 * S})
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    assert result.hidden_share == 1.0


def test_simultaneous_step_ends_are_no_steady_state():
    spans = [piece("compute", "a", step, 1, 1) for step in (1, 2)]
    result = break_down(spans, facts("a", steps=2), {0: 2 * S})
    assert (result.period_s, result.rounds) == (None, 0)


def test_one_step_among_many_short_ones_is_no_round():
    """While a makes two steps of 60 s, b makes ten steps of 6 s and ends."""
    spans = [piece("collective", "a", n, 60 * n, 60 * n + 60) for n in range(4)]
    spans += [piece("compute", "b", n, 61 + 6 * n, 67 + 6 * n) for n in range(11)]
    assert (
        break_down(
            spans, [JobSummary(name="a", steps=4), JobSummary(name="b", steps=11)], {0: 240 * S}
        ).period_s
        is None
    )


def test_jobs_beside_a_job_mid_step_have_a_round():
    """c's second step takes as long as all of a's and b's steps."""
    spans = [
        *crossed(8, begin=10),
        *(piece("collective", "c", n, *at) for n, at in enumerate(((0, 9), (9, 40), (40, 41)))),
    ]
    result = break_down(
        spans, [*facts("a", "b", steps=8), JobSummary(name="c", steps=3)], {0: 50 * S}
    )
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    assert result.period_s == 2.0


def test_turns_with_rounds_of_other_jobs_are_separate():
    """Turns are compared separately if they have rounds of different jobs.

    In one turn, all three jobs share rounds of 3 s. In the other one, job c has left, so the
    remaining two jobs share rounds of 2 s.
    """

    def turn(spans):
        return Report.build(spans, jobs=facts("a", "b", "c", steps=8), start_ns=0, end_ns=40 * S)

    every = [
        piece("compute", job, n, 3 * n + k, 3 * n + k + 1)
        for n in range(8)
        for k, job in enumerate("abc")
    ]
    turns = [turn([*crossed(8, begin=20), *alone("c", 4)]), turn(every)]
    pooled = Comparison.of(turns, turns).first
    assert ([job.steps_per_round for job in pooled.jobs], pooled.period_s) == ([1, 1, 1], 3.0)
