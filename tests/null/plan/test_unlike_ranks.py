"""Tests predictions for ranks of unlike speed against schedules that were worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxcross.interleave.step_graph import StepGraph
from jaxcross.jobs.memory import JobMemory
from jaxcross.plan import Plan, make
from jaxcross.plan.speedup import StepCost, estimate_of
from jaxcross.plan.twin import MOST_RANKS, predict
from jaxcross.report import SlowRank
from jaxcross.step.profile import Profile

M = 0.1
IN_TWO = StepGraph(
    kinds=("compute", "collective", "compute", "collective", "compute"),
    needs=((), (0,), (1,), (2,), (3,)),
    after_commit=frozenset({4}),
)


def unlike(name: str, *compute_s: float, m: float = M) -> Profile:
    """Returns the profile of a job whose ranks compute for this long, and exchange once."""
    like = Profile.whole(name, compute_s=max(compute_s), exchange_s=m, nbytes=10**7)
    times = tuple((c, m, 0.0) for c in compute_s)
    return replace(like, ranks=len(times), rank_seconds=times)


def _check(found: SlowRank | None, *, rank: int, factor: float, cost_share: float) -> None:
    assert found is not None
    assert found.rank == rank
    assert (found.factor, found.cost_share) == (pytest.approx(factor), pytest.approx(cost_share))


def test_an_exchange_begins_when_the_slowest_rank_arrives() -> None:
    """Rank 0 computes for 0.1 s, rank 1 for 0.2 s. Both then exchange for 0.1 s."""
    twin = predict([unlike("a", 0.1, 0.2)], vote_s=0.0)
    assert twin.rounds.period_s == pytest.approx(0.3)
    assert twin.rounds.bound_s == pytest.approx(0.25), "the bound is that of the mean rank"
    assert twin.rounds.lost_s["imbalance"] == pytest.approx(0.05)
    first = {s.rank: s for s in twin.spans if s.kind == "collective" and s.step == 1}
    assert [(s.start_ns / 1e9, s.end_ns / 1e9) for _, s in sorted(first.items())] == [
        (pytest.approx(0.1), pytest.approx(0.3)),
        (pytest.approx(0.2), pytest.approx(0.3)),
    ]
    _check(twin.slow_rank, rank=1, factor=2.0, cost_share=1 / 3)
    assert twin.report.ranks == (0, 1)


def test_two_jobs_are_held_up_by_the_slow_ranks_compute_lane() -> None:
    """Rank 1 always computes, 0.2 s per step. On rank 0, an exchange and a computation alternate.

    If both ranks were as fast as rank 0, a round would take 0.2 s, because then both lanes would
    always be busy.
    """
    twin = predict([unlike(name, 0.1, 0.2) for name in "ab"], vote_s=0.0, steps=200)
    assert twin.rounds.period_s == pytest.approx(0.4)
    assert twin.slow_rank is not None
    assert twin.slow_rank.cost_share == pytest.approx(0.5, abs=0.01)
    _check(twin.rounds.slow_rank, rank=1, factor=2.0, cost_share=0.5)
    assert "Rank 1 computes 2.00 times as long as the median rank: that costs 50% of a round." in (
        str(twin.report)
    )


def test_every_segment_waits_for_its_own_slowest_rank() -> None:
    """Rank 0 is slow in the first segment, and rank 1 in the second: 0.3 + 0.1 + 0.2 + 0.1 s."""
    times = ((0.3, M, 0.1, M, 0.0), (0.1, M, 0.2, M, 0.0))
    slowest = tuple(map(max, zip(*times, strict=True)))
    job = Profile(name="a", graph=IN_TWO, seconds=slowest, ranks=2, rank_seconds=times)
    assert predict([job], vote_s=0.0).rounds.period_s == pytest.approx(0.7)


def test_ranks_that_are_slow_in_different_segments_are_simulated_separately() -> None:
    """Both ranks compute for 0.4 s per step, and two jobs keep each rank busy all the time."""
    times = ((0.3, M, 0.1, M, 0.0), (0.1, M, 0.3, M, 0.0))
    slowest = (0.3, M, 0.3, M, 0.0)
    jobs = [
        Profile(name=name, graph=IN_TWO, seconds=slowest, ranks=2, rank_seconds=times)
        for name in "ab"
    ]
    assert predict(jobs, vote_s=0.0, steps=50).rounds.period_s == pytest.approx(0.8)


def test_a_slow_rank_that_hides_behind_the_link_costs_nothing() -> None:
    """Both jobs together exchange for 1 s per round, and even the slow rank computes for 0.4 s."""
    twin = predict([unlike(name, 0.1, 0.2, m=0.5) for name in "ab"], vote_s=0.0, steps=100)
    assert twin.rounds.period_s == pytest.approx(1.0)
    assert twin.slow_rank is None and twin.rounds.slow_rank is None


def test_ranks_that_differ_by_noise_are_simulated_as_one() -> None:
    like = predict([replace(unlike("a", 0.1, 0.1), rank_seconds=())])
    twin = predict([unlike("a", 0.1, 0.098)])
    assert twin.spans == like.spans
    assert twin.slow_rank is None and twin.rounds.slow_rank is None


def test_of_many_ranks_the_slowest_and_the_fastest_are_simulated() -> None:
    compute_s = [0.1 + 0.001 * rank for rank in range(64)]
    twin = predict([unlike("a", *reversed(compute_s))], vote_s=0.0)
    assert len(twin.report.ranks) == MOST_RANKS
    assert {0, 63} <= set(twin.report.ranks)
    assert twin.rounds.period_s == pytest.approx(max(compute_s) + M)
    assert twin.slow_rank is not None and twin.slow_rank.rank == 0


def test_profiles_of_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="times of different numbers of ranks: 2, 3"):
        predict([unlike("a", 0.1, 0.2), unlike("b", 0.1, 0.1, 0.1)])


def test_a_profile_with_its_ranks_is_read_back(tmp_path: Path) -> None:
    profile = unlike("a", 0.1, 0.2)
    assert Profile.load(profile.to_json(tmp_path / "a.json")) == profile
    assert profile.rank_compute_s == (0.1, 0.2)
    assert (profile.on_rank(0), profile.on_rank(1)) == ((0.1, M, 0.0), (0.2, M, 0.0))
    data = profile.as_data()
    del data["rank_seconds"]
    assert Profile.from_data(data) == replace(profile, rank_seconds=())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 3}, "for each of its 3 ranks, one per segment, got rows of"),
        (
            {"rank_seconds": ((0.1, M), (0.2, M))},
            "must have 3 times for each of its 2 ranks, one per segment, got rows of 2, 2",
        ),
        ({"seconds": (0.3, M, 0.0)}, "`seconds` of `a` must be the maximum of `rank_seconds`"),
        ({"rank_seconds": ((-0.1, M, 0.0), (0.2, M, 0.0))}, "finite and not negative"),
    ],
)
def test_rank_times_that_contradict_the_rest_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(unlike("a", 0.1, 0.2), **change)


def test_pieces_keep_each_ranks_speed() -> None:
    cut = unlike("a", 0.3, 0.6).cut_evenly(2)
    assert cut.on_rank(0) == pytest.approx((0.2, M / 2, 0.1, M / 2, 0.0))
    assert cut.on_rank(1) == pytest.approx((0.4, M / 2, 0.2, M / 2, 0.0))
    assert cut.seconds == cut.on_rank(1)


def test_the_median_of_two_ranks_is_the_faster() -> None:
    assert unlike("a", 0.1, 0.2).evened().rank_compute_s == (0.1, 0.1)
    assert unlike("a", 0.1, 0.2, 0.3).evened().rank_compute_s == (0.1, 0.2, 0.2)
    like = replace(unlike("a", 0.1, 0.2), rank_seconds=())
    assert like.evened() == like


def test_a_profile_of_a_run_has_the_times_of_its_ranks() -> None:
    job = unlike("a", 0.1, 0.2)
    run = predict([job], vote_s=0.0).report
    program = {"graph": job.graph.as_data(), "steps": 20, "memory": None}
    memory = {"peak_bytes": 3, "boundary_bytes": 2, "exchange_temporary_bytes": 1}
    run = replace(run, jobs=(replace(run.jobs[0], program={**program, "memory": memory}),))
    profile = Profile.of(run, "a")
    assert profile.rank_seconds == tuple(pytest.approx(own) for own in job.rank_seconds)
    assert profile.memory == JobMemory(peak_bytes=3, boundary_bytes=2, exchange_temporary_bytes=1)


def test_a_run_as_predicted_differs_in_nothing() -> None:
    twin = predict([unlike(name, 0.1, 0.2) for name in "ab"])
    found = twin.report.against(twin)
    assert found.achieved_ns == found.predicted_ns and not any(found.parts_ns.values())


def test_a_run_on_another_number_of_ranks_needs_a_profile_without_the_times_of_each_rank() -> None:
    run = predict([unlike(name, 0.1, 0.2) for name in "ab"]).report
    profiles = [unlike(name, 0.1, 0.2, 0.1) for name in "ab"]
    with pytest.raises(ValueError, match="has the times of 3 ranks, but the run had 2") as error:
        run.against(predict(profiles))
    assert "`dataclasses.replace(profile, rank_seconds=())`" in str(error.value)
    alike = predict([replace(profile, rank_seconds=()) for profile in profiles])
    assert run.against(alike).predicted_ns == round(1e9 * (alike.rounds.period_s or 0.0))


def test_a_plan_names_the_slow_rank_and_keeps_it(tmp_path: Path) -> None:
    plan = make([unlike("a", 0.1, 0.2)])
    (group,) = plan.groups
    assert group.slow_rank is not None and group.slow_rank.rank == 1
    assert group.jobs[0].rank_compute_s == pytest.approx((0.1, 0.2))
    assert "Group 0: Rank 1 computes 2.00 times as long as the median rank" in str(plan)
    assert Plan.load(plan.to_json(tmp_path / "plan.json")) == plan
    several = make([unlike("a", 0.1, 0.2, 0.1, 0.15)])
    found = several.groups[0].slow_rank
    assert found is not None and (found.rank, found.other_ranks) == (1, (3,))
    assert "Group 0: Ranks 1 and 3 compute up to 2.00 times as long" in str(several)
    assert Plan.load(several.to_json(tmp_path / "several.json")) == several
    like = make([unlike("a", 0.1, 0.1)])
    assert like.groups[0].slow_rank is None and "median rank" not in str(like)


def test_an_estimate_names_the_slow_rank() -> None:
    """Two jobs are bound by 2 * 0.2 s of computation, and would be by 2 * 0.1 s of exchange."""
    whole = unlike("step", 0.1, 0.2)
    cost = StepCost(whole=whole, steps=3, wire_bytes=10**7, narrow_wire_bytes=10**7 // 2)
    made = estimate_of(replace(cost, shares_processor=False))
    _check(made.slow_rank, rank=1, factor=2.0, cost_share=0.5)
    lines = str(made).splitlines()
    assert len(lines) == 11
    assert lines[-2].strip() == (
        "Rank 1 computes 2.00 times as long as the median rank: that costs 50% of the predicted "
        "time."
    )
    assert json.loads(json.dumps(made.as_dict()))["slow_rank"]["rank"] == 1
    short = estimate_of(replace(cost, whole=unlike("step", 0.001, 0.002, m=0.001)))
    assert short.slow_rank is None, "steps this short aren't measured well enough"
    like = estimate_of(replace(cost, whole=unlike("step", 0.2, 0.19)))
    assert like.slow_rank is None and len(str(like).splitlines()) == 10


@pytest.mark.parametrize(
    "change",
    [{"rank": -1}, {"factor": float("nan")}, {"cost_share": 1.5}, {"other_ranks": (1, -1)}],
)
def test_a_slow_rank_of_impossible_numbers_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a slow rank must have"):
        replace(SlowRank(rank=0, factor=2.0, cost_share=0.1), **change)
