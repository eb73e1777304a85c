"""Accounts of runs that are written down by hand, so that every number is known."""

from dataclasses import replace

import pytest

from jaxcross.interleave.instrument import PARAMETER_SERVER, TOGETHER, Span
from jaxcross.report.compare import Comparison
from jaxcross.report.intervals import intersect, measure, subtract, union
from jaxcross.report.report import Report
from jaxcross.report.summary import JobSummary
from jaxcross.report.time_breakdown import break_down

S = 1_000_000_000


def piece(kind, job, step, start, end, *, rank=0, segment=None, ready=None, lane=0, nbytes=0):
    """A span in seconds. Compute is segment 0, the exchange segment 1 unless said otherwise."""
    if segment is None:
        segment = {"compute": 0, "collective": 1}.get(kind, -1)
    ready = start if ready is None else ready
    return Span(
        rank=rank, job=job, step=step, segment=segment, kind=kind, lane=lane, nbytes=nbytes,
        start_ns=round(start * S), end_ns=round(end * S), ready_ns=round(ready * S),
    )  # fmt: skip


def alone(job, steps, *, begin=0.0, compute=1.0, exchange=1.0, rank=0, gap=0.0, nbytes=0):
    """A job whose steps follow one another."""
    spans, now = [], begin
    for step in range(steps):
        spans.append(piece("compute", job, step, now, now + compute, rank=rank))
        now += compute
        spans.append(piece("collective", job, step, now, now + exchange, rank=rank, nbytes=nbytes))
        now += exchange + gap
    return spans


def crossed(steps, *, rank=0, begin=0.0):
    """Two jobs, c = m = 1 s each: a computes while b exchanges."""
    return alone("a", steps, rank=rank, begin=begin) + alone("b", steps, rank=rank, begin=begin + 1)


def facts(*names, steps=5, **more):
    return [JobSummary(name=name, steps=steps, **more) for name in names]


def test_sets_of_time():
    some = union([(5, 7), (0, 2), (1, 3), (9, 9)])
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
    # b's last exchange has nothing to hide behind, but a has ended by then
    assert result.hidden_share == 1.0
    assert [job.hidden_share for job in result.jobs] == [1.0, 1.0]
    assert result.examples_per_s == 8.0
    assert (result.rounds, result.steady_share, result.shared_share) == (3, 0.5, 0.75)
    assert [job.steps_per_s for job in result.jobs] == [0.5, 0.5]
    # the steady state runs from a's first step's end (2 s) to b's last (11 s)
    assert result.start_up_s == 3.0


def test_one_after_the_other_adds_the_jobs_periods_and_blames_the_order():
    spans = alone("a", 4) + alone("b", 4, begin=8)
    result = break_down(spans, facts("a", "b", steps=4), {0: 16 * S}, in_turn=True)
    assert (result.period_s, result.bound_s, result.efficiency) == (4.0, 2.0, 0.5)
    assert result.s_per_step == 2.0
    assert result.lost_s == pytest.approx({"order": 2.0, **dict.fromkeys(set(result.lost_s) - {"order"}, 0.0)})
    assert result.hidden_share == 0


def test_one_job_is_bound_by_its_own_chain():
    result = break_down(alone("a", 5, compute=2, exchange=1, nbytes=64), facts("a"), {0: 15 * S})
    (job,) = result.jobs
    assert (result.bottleneck, result.period_s, result.bound_s) == ("chain", 3.0, 3.0)
    assert (job.compute_s, job.exchange_s, job.bytes_per_step) == (2.0, 1.0, 64.0)


def test_a_gap_before_ready_work_is_dispatch():
    spans = alone("a", 5, gap=0.25)
    # the next step's inputs are there when the exchange ends
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
        spans += [piece("input", "a", step + 1, end, end + 0.5), piece("vote", "", -1, end + 0.5, end + 0.6)]
    result = break_down(spans, facts("a"), {0: 14 * S})
    assert result.lost_s["input"] == pytest.approx(0.5)
    assert result.lost_s["votes"] == pytest.approx(0.1)
    assert result.lost_s["other"] == pytest.approx(0.15)
    assert sum(result.lost_s.values()) == pytest.approx(result.period_s - result.bound_s)


def test_the_rank_that_arrives_early_waits_for_its_peer():
    # rank 0 computes 1 s, rank 1 computes 1.5 s; the exchange itself takes 1 s; clocks differ by 100 s
    early = alone("a", 5, compute=1.0, exchange=1.5, rank=0)
    late = alone("a", 5, compute=1.5, exchange=1.0, rank=1, begin=100)
    result = break_down(early + late, facts("a"), {0: 13 * S, 1: 13 * S})
    assert result.jobs[0].exchange_s == 1.0
    assert result.jobs[0].compute_s == 1.25
    assert (result.period_s, result.bound_s) == (2.5, 2.25)
    # the slower rank decides the period: what it computes beyond the mean is imbalance, and nothing else is lost
    assert result.lost_s["imbalance"] == pytest.approx(0.25)
    assert result.lost_s["peer"] == result.lost_s["other"] == 0


def test_jitter_between_equal_ranks_is_waiting_for_a_peer():
    # each rank is late in every other step by 0.5 s, so each computes 1.25 s on average, and the pair 1.5
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
    # one job, c = 1, m = 1.5: a vote of 0.2 s delays each exchange by 0.1 s,
    # and another one passes unnoticed beside the compute
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
    # exchange-bound, c = 0.5, m = 1: a vote of 0.1 s stands before each of the round's two exchanges
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
def test_a_vote_that_waits_for_a_late_rank_is_waiting_for_a_peer(ready):
    """Rank 0 votes for 1 s, of which rank 1, whose batch is late, takes part in 0.1 s; there may be ready work."""
    early, late = [], []
    for step in range(5):
        t = 3.0 * step
        late += [piece("compute", "a", step, t, t + 1.0, rank=1), piece("input", "a", step, t + 1.0, t + 1.9, rank=1)]
        late += [
            piece("vote", "", 0, t + 1.9, t + 2.0, rank=1),
            piece("collective", "a", step, t + 2.0, t + 3.0, rank=1),
        ]
        early += [piece("compute", "a", step, t, t + 1.0), piece("vote", "", 0, t + 1.0, t + 2.0)]
        early.append(piece("collective", "a", step, t + 2.0, t + 3.0, ready=t + ready))
    kept = [piece("vote", "", 0, -1.0, -0.5, rank=1)]  # an early one, which rank 0 has dropped
    result = break_down([*kept, *early, *late], facts("a"), {0: 16 * S, 1: 16 * S})
    assert (result.period_s, result.bound_s) == (3.0, 2.0)
    assert result.lost_s["peer"] == pytest.approx(0.9)
    assert result.lost_s["votes"] == pytest.approx(0.1)


def test_enqueued_compute_begins_when_its_forerunner_ends():
    spans = [
        piece("compute", "a", 0, 0, 1),
        piece("compute", "a", 1, 0.1, 2),
        piece("compute", "a", 2, 0.2, 3),
    ]
    result = break_down(spans, facts("a", steps=3), {0: 3 * S})
    assert result.jobs[0].compute_s == 1.0
    assert (result.period_s, result.bottleneck) == (1.0, "compute")


def test_an_exchange_beside_its_own_backward_pass_shortens_the_chain():
    # segments 0, 1 (exchange of 0), 2: the exchange of 1 s runs beside the second compute of 2 s
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
    assert (result.period_s, result.bound_s, result.efficiency, result.hidden_share) == (None, None, None, 0)
    assert result.start_up_s == 1.0


def test_a_single_step_is_no_steady_state():
    result = break_down(alone("a", 1, begin=5), facts("a", steps=1), {0: 8 * S})
    assert (result.period_s, result.bound_s, result.lost_s) == (None, None, {})
    (job,) = result.jobs
    assert (job.compute_s, job.exchange_s, job.period_s) == (1.0, 1.0, 0.0)


def test_jobs_that_were_never_in_steady_state_together_have_no_round():
    """b compiles for as long as a trains."""
    spans = [*alone("a", 4), piece("compile", "b", 0, 0, 10), *alone("b", 4, begin=10)]
    result = break_down(spans, facts("a", "b", steps=4), {0: 20 * S})
    assert result.period_s is result.bound_s is result.efficiency is result.s_per_step is result.examples_per_s is None
    assert (result.lost_s, result.bottleneck, result.steady_share) == ({}, "", 0)
    assert result.shared_share == 0.4  # 8 of 20 s
    assert [(job.period_s, job.compute_s, job.steps_per_round) for job in result.jobs] == [(2.0, 1.0, 0)] * 2


def test_less_than_a_round_together_is_none():
    # a ends with the step that it makes while b makes its first one
    spans = [*alone("a", 4), *alone("b", 4, begin=5)]
    assert break_down(spans, facts("a", "b", steps=4), {0: 20 * S}).period_s is None


def test_a_job_without_a_second_step_has_no_part_in_the_round():
    spans = [*crossed(5), piece("compute", "c", 1, 4, 4.5)]
    result = break_down(spans, facts("a", "b", "c"), {0: 12 * S})
    assert (result.period_s, result.s_per_step) == (2.0, 1.0)
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]


def test_the_tail_of_one_job_is_not_measured():
    """b goes on alone, and faster: the rows are of the time when both ran, and add up."""
    spans = [*crossed(5), *alone("b", 20, begin=20)]
    renumbered = [replace(s, step=s.step + 5) if s.start_ns >= 20 * S else s for s in spans]
    result = break_down(renumbered, facts("a", "b", examples_per_step=8), {0: 60 * S})
    assert result.period_s == 2.0
    assert sum(job.examples_per_s for job in result.jobs) == result.examples_per_s == 8.0


def test_an_evaluation_is_no_step():
    """An evaluation before the training, and one that exchanges, in the middle of it."""
    spans = [replace(piece("compute", "a", 0, 0, 1), in_step=False)]
    spans += [replace(s, step=s.step + 1) for s in alone("a", 2, begin=10)]
    spans += [replace(s, step=3, in_step=False) for s in alone("a", 1, begin=14)]
    spans += [replace(s, step=s.step + 4) for s in alone("a", 2, begin=16)]
    result = break_down(spans, facts("a", steps=4), {0: 20 * S})
    assert result.rounds == 3
    assert result.period_s == pytest.approx(8 / 3)  # from 12 to 20 s, the evaluation included
    assert result.bound_s == result.period_s


def test_exchanges_with_parameter_servers_overlap():
    """Each job has a lane of its own, and a rank's n-th step has nothing to do with that of another one. A step is one
    stretch of computing and waiting, its own bound, so that an efficiency would say nothing.
    """
    spans = []
    for rank, pace in ((0, 1), (1, 3)):
        for lane, job in enumerate("ab"):
            steps = alone(job, 6, compute=1.0 * pace, exchange=3.0 * pace, rank=rank)
            spans += [replace(s, lane=1 + lane, label=PARAMETER_SERVER) for s in steps]
    result = break_down(spans, facts("a", "b", steps=6), {0: 80 * S, 1: 80 * S})
    assert result.period_s == 12.0
    assert (result.bound_s, result.efficiency, result.bottleneck, result.lost_s) == (None, None, "", {})
    assert [job.exchange_s for job in result.jobs] == [6.0, 6.0]  # the mean of 3 and 9 s


def test_jobs_in_steady_state_have_a_round_though_a_third_left_early():
    """c has ended before a and b pass their first steps; the round is one of a and b, on both ranks."""
    spans = [s for rank in (0, 1) for s in (*crossed(8, rank=rank, begin=20), *alone("c", 4, rank=rank))]
    result = break_down(spans, facts("a", "b", "c", steps=8), {0: 40 * S, 1: 40 * S})
    assert (result.period_s, result.bound_s, result.efficiency, result.s_per_step) == (2.0, 2.0, 1.0, 1.0)
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    assert [job.period_s for job in result.jobs] == [2.0, 2.0, 2.0]  # c's own steady state


def test_a_job_that_leaves_just_after_another_begins_leaves_the_round_to_the_others():
    """a and c are in steady state together for less than a round, c and b for eight."""
    spans = [*alone("a", 4), *(replace(s, job={"a": "b", "b": "c"}[s.job]) for s in crossed(10, begin=5))]
    result = break_down(spans, facts("a", "b", "c", steps=10), {0: 40 * S})
    assert [job.steps_per_round for job in result.jobs] == [0, 1, 1]
    assert result.period_s == 2.0


def test_bytes_per_step_are_those_of_training_steps():
    spans = alone("a", 5, nbytes=64)
    spans += [replace(s, step=6, in_step=False) for s in alone("a", 1, begin=10, nbytes=1000)]
    (job,) = break_down(spans, facts("a"), {0: 15 * S}).jobs
    assert job.bytes_per_step == 64


def test_two_of_three_jobs_share_a_part_of_the_run():
    """The share of the run in which at least two are at work: a and b from 3 to 6 s, none with c."""
    spans = [*alone("a", 3), *alone("b", 3, begin=3), *alone("c", 2, begin=12)]
    assert break_down(spans, facts("a", "b", "c", steps=3), {0: 16 * S}).shared_share == 3 / 16


def test_a_job_that_leaves_after_two_rounds_does_not_set_the_round():
    """a, b and c make two rounds of 3 s after their first steps; then a and b make thirty of 2 s."""
    spans = [piece("compute", job, n, 3 * n + k, 3 * n + k + 1) for n in range(3) for k, job in enumerate("abc")]
    spans += [
        piece("compute", job, n + 3, 9 + 2 * n + k, 10 + 2 * n + k) for n in range(30) for k, job in enumerate("ab")
    ]
    result = break_down(spans, facts("a", "b", "c", steps=33), {0: 70 * S})
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    assert 2.0 <= result.period_s < 2.2  # two of the 32 rounds with c
    assert result.steady_share > 0.9


@pytest.mark.parametrize("kind", ["compile", "host"])
def test_compiling_in_the_steady_state_is_named(kind):
    """A second program is compiled for 3 s, as that of a step that exchanges after steps that do not."""
    spans = [*alone("a", 3), piece(kind, "a", 3, 6, 9), *(replace(s, step=s.step + 3) for s in alone("a", 3, begin=9))]
    result = break_down(spans, facts("a", steps=6), {0: 15 * S})
    assert result.lost_s["host"] == pytest.approx(3 / 5)
    assert result.lost_s["other"] == 0


def test_a_step_that_does_not_count_is_none():
    """A job stops, or fails, in its sixth step, which has computed and exchanged nothing."""
    spans = [*alone("a", 5, nbytes=64), piece("compute", "a", 5, 10, 10.5)]
    result = break_down(spans, facts("a", how="stopped"), {0: 11 * S})
    assert (result.period_s, result.rounds, result.jobs[0].bytes_per_step) == (2.0, 4, 64)


def test_a_step_that_failed_hands_over_no_bytes():
    spans = alone("a", 6, nbytes=64)
    (job,) = break_down(spans, facts("a", how="ejected"), {0: 12 * S}).jobs
    assert job.bytes_per_step == 64


def test_the_hidden_share_of_all_is_that_of_the_jobs_in_the_round():
    """c exchanges alone, before: it has no row of numbers, and no part in the last row."""
    spans = [*alone("c", 4, exchange=9), *crossed(8, begin=60)]
    result = break_down(spans, facts("a", "b", "c", steps=8), {0: 90 * S})
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    assert result.hidden_share == 1.0


def test_steps_that_end_at_one_time_are_no_steady_state():
    spans = [piece("compute", "a", step, 1, 1) for step in (1, 2)]
    result = break_down(spans, facts("a", steps=2), {0: 2 * S})
    assert (result.period_s, result.rounds) == (None, 0)


def test_one_step_that_ends_among_many_short_ones_is_no_round():
    """While a makes two steps of 60 s, b makes ten of 6 s and ends."""
    spans = [piece("collective", "a", n, 60 * n, 60 * n + 60) for n in range(4)]
    spans += [piece("compute", "b", n, 61 + 6 * n, 67 + 6 * n) for n in range(11)]
    assert (
        break_down(spans, [JobSummary(name="a", steps=4), JobSummary(name="b", steps=11)], {0: 240 * S}).period_s
        is None
    )


def test_jobs_next_to_one_that_makes_no_whole_step_have_a_round():
    """c's second step takes as long as all steps of a and b."""
    spans = [
        *crossed(8, begin=10),
        *(piece("collective", "c", n, *at) for n, at in enumerate(((0, 9), (9, 40), (40, 41)))),
    ]
    result = break_down(spans, [*facts("a", "b", steps=8), JobSummary(name="c", steps=3)], {0: 50 * S})
    assert [job.steps_per_round for job in result.jobs] == [1, 1, 0]
    assert result.period_s == 2.0


def test_idle_votes_beside_work_on_the_host_cost_nothing():
    """Compiling for 3 s; meanwhile nothing is ready, and the exchange lane votes all the time."""
    spans = [
        *alone("a", 3),
        piece("compile", "a", 3, 6, 9),
        *(replace(s, step=s.step + 3) for s in alone("a", 3, begin=9)),
    ]
    spans += [piece("vote", "", 0, 6 + n, 7 + n) for n in range(3)]
    lost = break_down(spans, facts("a", steps=6), {0: 15 * S}).lost_s
    assert (lost["host"], lost["votes"]) == (pytest.approx(3 / 5), 0)


@pytest.mark.parametrize("ready", [6, 9])
def test_what_a_job_does_on_all_ranks_at_once_is_no_vote(ready):
    """Saving for 3 s on the exchange lane, whether or not an exchange is ready and waits for it."""
    spans = [*alone("a", 3), *(replace(s, step=s.step + 3) for s in alone("a", 3, begin=9, compute=0))]
    spans = [replace(s, ready_ns=ready * S) if s.start_ns == 9 * S and s.kind == "collective" else s for s in spans]
    spans.append(replace(piece("vote", "a", 0, 6, 9), label=TOGETHER))
    lost = break_down(spans, facts("a", steps=6), {0: 15 * S}).lost_s
    assert (lost["host"], lost["votes"], lost["peer"]) == (pytest.approx(3 / 5), 0, 0)


def test_measured_time_and_the_rest_are_the_run():
    """Ranks leave one after the other."""
    result = break_down(crossed(5), facts("a", "b"), {0: 12 * S, 1: 15 * S})
    assert result.wall_s == 15.0
    assert result.start_up_s == 15.0 - 9.0  # the first steps of a and b end after 2 and 3 s, the last after 10 and 11


def test_turns_with_rounds_of_other_jobs_are_not_averaged():
    """In one turn all three jobs share rounds of 3 s, in another, where c had left, two share rounds of 2 s."""

    def turn(spans):
        return Report.build(spans, jobs=facts("a", "b", "c", steps=8), start_ns=0, end_ns=40 * S)

    every = [piece("compute", job, n, 3 * n + k, 3 * n + k + 1) for n in range(8) for k, job in enumerate("abc")]
    turns = [turn([*crossed(8, begin=20), *alone("c", 4)]), turn(every)]
    pooled = Comparison.of(turns, turns).first
    assert ([job.steps_per_round for job in pooled.jobs], pooled.period_s) == ([1, 1, 1], 3.0)
