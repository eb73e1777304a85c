"""Tests the breakdown of a run's time: its bound, and the cause of every second lost beyond it."""

from dataclasses import replace

import pytest

from jaxcross.interleave.instrument import ON_ALL_RANKS, PARAMETER_SERVER
from jaxcross.report.intervals import intersect, measure, merge_intervals, subtract
from jaxcross.report.time_breakdown import break_down
from tests.support.breakdown_spans import S, alone, crossed, facts, piece


def test_sets_of_time():
    some = merge_intervals([(5, 7), (0, 2), (1, 3), (9, 9)])
    assert some == [(0, 3), (5, 7)]
    assert measure(some) == 5
    assert intersect(some, [(2, 6)]) == [(2, 3), (5, 6)]
    assert subtract(some, [(1, 2), (6, 9)]) == [(0, 1), (2, 3), (5, 6)]
    assert subtract([], some) == []


def test_a_perfect_crossover_reaches_its_bound():
    result = break_down(crossed(5), facts("a", "b", examples_per_step=8), {0: 12 * S})
    assert (result.period_s, result.bound_s, result.efficiency) == (2.0, 2.0, 1.0)
    assert result.s_per_step == 1.0
    assert all(lost == 0 for lost in result.lost_s.values())
    # b's last exchange has nothing to hide behind, but a has already ended by then
    assert result.hidden_share == 1.0
    assert [job.hidden_share for job in result.jobs] == [1.0, 1.0]
    assert result.examples_per_s == 8.0
    assert (result.rounds, result.steady_share, result.shared_share) == (3, 0.5, 0.75)
    assert [job.steps_per_s for job in result.jobs] == [0.5, 0.5]
    # the steady state runs from the end of a's first step (2 s) to that of b's last step (11 s)
    assert result.start_up_s == 3.0


def test_sequential_run_adds_periods_and_blames_order():
    spans = alone("a", 4) + alone("b", 4, begin=8)
    result = break_down(spans, facts("a", "b", steps=4), {0: 16 * S}, in_turn=True)
    assert (result.period_s, result.bound_s, result.efficiency) == (4.0, 2.0, 0.5)
    assert result.s_per_step == 2.0
    assert result.lost_s == pytest.approx(
        {"order": 2.0, **dict.fromkeys(set(result.lost_s) - {"order"}, 0.0)}
    )
    assert result.hidden_share == 0


def test_one_job_is_bound_by_its_own_chain():
    result = break_down(alone("a", 5, compute=2, exchange=1, nbytes=64), facts("a"), {0: 15 * S})
    (job,) = result.jobs
    assert (result.bottleneck, result.period_s, result.bound_s) == ("chain", 3.0, 3.0)
    assert (job.compute_s, job.exchange_s, job.bytes_per_step) == (2.0, 1.0, 64.0)


def test_a_gap_before_ready_work_is_dispatch():
    spans = alone("a", 5, gap=0.25)
    # the next step's inputs exist as soon as the exchange ends
    spans = [
        piece("compute", "a", s.step, s.start_ns / S, s.end_ns / S, ready=s.start_ns / S - 0.25)
        if s.kind == "compute" and s.step
        else s
        for s in spans
    ]
    result = break_down(spans, facts("a"), {0: 12 * S})
    assert (result.period_s, result.bound_s) == (2.25, 2.0)
    assert result.lost_s["dispatch"] == pytest.approx(0.25)
    assert result.lost_s["other"] == pytest.approx(0.0)


def test_waiting_for_a_batch_and_voting_are_named():
    spans = alone("a", 5, gap=0.75)
    for step in range(4):
        end = (step + 1) * 2.75 - 0.75
        spans += [
            piece("input", "a", step + 1, end, end + 0.5),
            piece("vote", "", -1, end + 0.5, end + 0.6),
        ]
    result = break_down(spans, facts("a"), {0: 14 * S})
    assert result.lost_s["input"] == pytest.approx(0.5)
    assert result.lost_s["votes"] == pytest.approx(0.1)
    assert result.lost_s["other"] == pytest.approx(0.15)
    assert sum(result.lost_s.values()) == pytest.approx(result.period_s - result.bound_s)


def test_early_rank_waits_for_its_peer():
    # Rank 0 computes for 1 s and rank 1 for 1.5 s. The exchange itself takes 1 s. The clocks differ
    # by 100 s.
    early = alone("a", 5, compute=1.0, exchange=1.5, rank=0)
    late = alone("a", 5, compute=1.5, exchange=1.0, rank=1, begin=100)
    result = break_down(early + late, facts("a"), {0: 13 * S, 1: 13 * S})
    assert result.jobs[0].exchange_s == 1.0
    assert result.jobs[0].compute_s == 1.25
    assert (result.period_s, result.bound_s) == (2.5, 2.25)
    # The slower rank sets the period. The time that it computes beyond the mean is imbalance, and
    # nothing else is lost.
    assert result.lost_s["imbalance"] == pytest.approx(0.25)
    assert result.lost_s["peer"] == result.lost_s["other"] == 0


def test_jitter_between_equal_ranks_is_peer_waiting():
    # The ranks are slow in turn: in every step, one of them computes for 1.5 s and the other one
    # for 1 s. So each rank computes for 1.25 s on average, but because they wait for each other,
    # every step takes as long as the slower one, i.e. 1.5 s.
    spans = []
    for step in range(5):
        begin = 2.5 * step
        for rank in (0, 1):
            length = 1.5 if (step + rank) % 2 else 1.0
            spans.append(piece("compute", "a", step, begin, begin + length, rank=rank))
            spans.append(piece("collective", "a", step, begin + length, begin + 2.5, rank=rank))
    result = break_down(spans, facts("a"), {0: 13 * S, 1: 13 * S})
    assert (result.period_s, result.bound_s) == (2.5, 2.25)
    assert result.lost_s["peer"] == pytest.approx(0.25)
    assert result.lost_s["imbalance"] == 0
    assert result.lost_s["other"] == pytest.approx(0.0)


def test_an_exchange_bound_run():
    # c = 0.5, m = 1: the exchange lane is always full
    spans = []
    for step in range(6):
        for j, job in enumerate("ab"):
            start = 2 * step + j + 0.5
            spans.append(piece("compute", job, step, start - 0.5, start))
            spans.append(piece("collective", job, step, start, start + 1))
    result = break_down(spans, facts("a", "b", steps=6), {0: 13 * S})
    assert (result.bottleneck, result.period_s, result.bound_s) == ("exchange", 2.0, 2.0)


def test_votes_cost_only_what_they_hold_up():
    # There's one job, which computes for 1 s and exchanges for 1.5 s. In each step, a vote that
    # takes 0.2 s delays the exchange by 0.1 s. An earlier vote overlaps with the computation, so it
    # costs nothing.
    spans = []
    for step in range(5):
        t = 2.6 * step
        spans.append(piece("compute", "a", step, t, t + 1))
        spans.append(piece("vote", "", 0, t + 0.2, t + 0.3))
        spans.append(piece("vote", "", 0, t + 0.9, t + 1.1))
        spans.append(piece("collective", "a", step, t + 1.1, t + 2.6, ready=t + 1))
    result = break_down(spans, facts("a"), {0: 13 * S})
    assert (result.bottleneck, result.period_s, result.bound_s) == ("chain", 2.6, 2.5)
    assert result.lost_s["votes"] == pytest.approx(0.1)
    assert result.lost_s["other"] == pytest.approx(0.0)
    # Exchange-bound, with c = 0.5 and m = 1. A vote of 0.1 s precedes each of the round's two
    # exchanges.
    spans = []
    for step in range(6):
        for j, job in enumerate("ab"):
            start = 2.2 * step + 1.1 * j + 1
            spans.append(piece("compute", job, step, start - 0.6, start - 0.1))
            spans.append(piece("vote", "", 0, start - 0.1, start))
            spans.append(piece("collective", job, step, start, start + 1, ready=start - 0.1))
    result = break_down(spans, facts("a", "b", steps=6), {0: 14 * S})
    assert (result.bottleneck, result.period_s, result.bound_s) == ("exchange", 2.2, 2.0)
    assert result.lost_s["votes"] == pytest.approx(0.2)
    assert result.lost_s["dispatch"] == result.lost_s["order"] == 0


@pytest.mark.parametrize("ready", [1.2, 1.1])
def test_vote_waiting_for_a_late_rank_is_peer_waiting(ready):
    """If one rank votes for long because another is late, that time counts as waiting for a peer.

    Rank 0's vote takes 1 s, because rank 1's batch is late and rank 1 only enters the vote for the
    last 0.1 s. This must hold even if other work becomes ready in the meantime.
    """
    early, late = [], []
    for step in range(5):
        t = 3.0 * step
        late += [
            piece("compute", "a", step, t, t + 1.0, rank=1),
            piece("input", "a", step, t + 1.0, t + 1.9, rank=1),
        ]
        late += [
            piece("vote", "", 0, t + 1.9, t + 2.0, rank=1),
            piece("collective", "a", step, t + 2.0, t + 3.0, rank=1),
        ]
        early += [piece("compute", "a", step, t, t + 1.0), piece("vote", "", 0, t + 1.0, t + 2.0)]
        early.append(piece("collective", "a", step, t + 2.0, t + 3.0, ready=t + ready))
    kept = [piece("vote", "", 0, -1.0, -0.5, rank=1)]  # an early vote that rank 0 has dropped
    result = break_down([*kept, *early, *late], facts("a"), {0: 16 * S, 1: 16 * S})
    assert (result.period_s, result.bound_s) == (3.0, 2.0)
    assert result.lost_s["peer"] == pytest.approx(0.9)
    assert result.lost_s["votes"] == pytest.approx(0.1)


def test_enqueued_compute_begins_when_previous_ends():
    spans = [
        piece("compute", "a", 0, 0, 1),
        piece("compute", "a", 1, 0.1, 2),
        piece("compute", "a", 2, 0.2, 3),
    ]
    result = break_down(spans, facts("a", steps=3), {0: 3 * S})
    assert result.jobs[0].compute_s == 1.0
    assert (result.period_s, result.bottleneck) == (1.0, "compute")


def test_exchange_beside_own_backward_shortens_chain():
    # Segment 1 exchanges the result of segment 0, which takes 1 s. Meanwhile segment 2 computes for
    # 2 s, so the exchange is hidden.
    spans = []
    for step in range(4):
        t = 4 * step
        spans.append(piece("compute", "a", step, t, t + 2, segment=0))
        spans.append(piece("collective", "a", step, t + 2, t + 3, segment=1))
        spans.append(piece("compute", "a", step, t + 2, t + 4, segment=2))
    result = break_down(spans, facts("a", steps=4), {0: 16 * S})
    assert (result.period_s, result.bound_s, result.efficiency) == (4.0, 4.0, 1.0)


def test_nothing_ran():
    result = break_down([], facts("a", steps=0), {0: S})
    assert (result.period_s, result.bound_s, result.efficiency, result.hidden_share) == (
        None,
        None,
        None,
        0,
    )
    assert result.start_up_s == 1.0


def test_exchanges_with_parameter_servers_overlap():
    """Exchanges with parameter servers overlap, because each job has its own lane for them.

    Ranks don't wait for each other, so the n-th steps of two ranks have nothing to do with each
    other. We can't report an efficiency: within a step, computing and waiting follow each other, so
    the bound would be the measured time itself.
    """
    spans = []
    for rank, pace in ((0, 1), (1, 3)):
        for lane, job in enumerate("ab"):
            steps = alone(job, 6, compute=1.0 * pace, exchange=3.0 * pace, rank=rank)
            spans += [replace(s, lane=1 + lane, label=PARAMETER_SERVER) for s in steps]
    result = break_down(spans, facts("a", "b", steps=6), {0: 80 * S, 1: 80 * S})
    assert result.period_s == 12.0
    assert (result.bound_s, result.efficiency, result.bottleneck, result.lost_s) == (
        None,
        None,
        "",
        {},
    )
    assert [job.exchange_s for job in result.jobs] == [6.0, 6.0]  # the mean of 3 and 9 s


def test_bytes_per_step_are_those_of_training_steps():
    spans = alone("a", 5, nbytes=64)
    spans += [replace(s, step=6, in_step=False) for s in alone("a", 1, begin=10, nbytes=1000)]
    (job,) = break_down(spans, facts("a"), {0: 15 * S}).jobs
    assert job.bytes_per_step == 64


def test_two_of_three_jobs_share_a_part_of_the_run():
    """The shared time is that in which at least two jobs run, here a and b from 3 to 6 s.

    The job c runs alone later.
    """
    spans = [*alone("a", 3), *alone("b", 3, begin=3), *alone("c", 2, begin=12)]
    assert break_down(spans, facts("a", "b", "c", steps=3), {0: 16 * S}).shared_share == 3 / 16


@pytest.mark.parametrize("kind", ["compile", "host"])
def test_compiling_in_the_steady_state_is_named(kind):
    """A second program compiles for 3 s, e.g. for the first step that exchanges after some that
    don't.
    """
    spans = [
        *alone("a", 3),
        piece(kind, "a", 3, 6, 9),
        *(replace(s, step=s.step + 3) for s in alone("a", 3, begin=9)),
    ]
    result = break_down(spans, facts("a", steps=6), {0: 15 * S})
    assert result.lost_s["host"] == pytest.approx(3 / 5)
    assert result.lost_s["other"] == 0


def test_a_step_that_failed_hands_over_no_bytes():
    spans = alone("a", 6, nbytes=64)
    (job,) = break_down(spans, facts("a", how="ejected"), {0: 12 * S}).jobs
    assert job.bytes_per_step == 64


def test_idle_votes_beside_host_work_cost_nothing():
    """A job compiles for 3 s. Meanwhile nothing is ready, and the exchange lane keeps voting."""
    spans = [
        *alone("a", 3),
        piece("compile", "a", 3, 6, 9),
        *(replace(s, step=s.step + 3) for s in alone("a", 3, begin=9)),
    ]
    spans += [piece("vote", "", 0, 6 + n, 7 + n) for n in range(3)]
    lost = break_down(spans, facts("a", steps=6), {0: 15 * S}).lost_s
    assert (lost["host"], lost["votes"]) == (pytest.approx(3 / 5), 0)


@pytest.mark.parametrize("ready", [6, 9])
def test_work_on_all_ranks_at_once_is_no_vote(ready):
    """The exchange lane saves for 3 s, whether or not an exchange is ready and waiting."""
    spans = [
        *alone("a", 3),
        *(replace(s, step=s.step + 3) for s in alone("a", 3, begin=9, compute=0)),
    ]
    spans = [
        replace(s, ready_ns=ready * S) if s.start_ns == 9 * S and s.kind == "collective" else s
        for s in spans
    ]
    spans.append(replace(piece("vote", "a", 0, 6, 9), label=ON_ALL_RANKS))
    lost = break_down(spans, facts("a", steps=6), {0: 15 * S}).lost_s
    assert (lost["host"], lost["votes"], lost["peer"]) == (pytest.approx(3 / 5), 0, 0)


def test_measured_time_and_the_rest_are_the_run():
    """The ranks leave at different times."""
    result = break_down(crossed(5), facts("a", "b"), {0: 12 * S, 1: 15 * S})
    assert result.wall_s == 15.0
    # The first steps of a and b end at 2 and 3 s, their last steps at 10 and 11 s.
    assert result.start_up_s == 15.0 - 9.0
