"""Tests the twin of a run against measured runs and against itself."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import jaxcross
from jaxcross.interleave.contention import Contention
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.plan.machine_contention import TWO_CORES, MachineContention
from jaxcross.plan.twin import predict
from jaxcross.step.profile import Profile

AT_THE_RACE = MachineContention(measured=TWO_CORES.measured[3:])
"""The contention measured in the weeks of the stored race, at 500 Mbit/s and above."""
RACE = Path(__file__).parents[3] / "benchmarks" / "results" / "race.json"


def _rows() -> list[dict[str, Any]]:
    """Returns the stored race's rows for the crossover of whole steps."""
    return [row for row in json.loads(RACE.read_text())["rows"] if row["rival"] == "crossover"]


def _error(row: dict[str, Any], contention: MachineContention | None) -> float:
    """Returns the relative error of the twin's seconds per job-step."""
    costs = zip(row["own_c_s"], row["m_s"], strict=True)
    jobs = [Profile.whole(f"job{i}", compute_s=c, exchange_s=m) for i, (c, m) in enumerate(costs)]
    there = contention and contention.at(row["rate_bits_per_s"] / 1e6)
    twin = predict(jobs, contention=there, steps=[8] * len(jobs))
    return twin.s_per_step / row["s_per_job_step"] - 1


def test_the_kept_race_is_replayed() -> None:
    """The mean error is at most 3.5%, and four rows in five are within 5%.

    The twin gets each job's costs when running alone, and the contention that another benchmark has
    measured in the same weeks. With the later measurements on slower links, when there was less
    contention, three rows in four are within 5%. If we leave out the contention, the mean error is
    at least 8%.
    """
    rows = _rows()
    assert len(rows) == 20
    for contention, within in ((AT_THE_RACE, 17), (TWO_CORES, 15)):
        errors = [abs(_error(row, contention)) for row in rows]
        assert mean(errors) <= 0.035
        assert sum(error <= 0.05 for error in errors) == within
    assert mean(abs(_error(row, None)) for row in rows) >= 0.08


def test_equal_jobs_reach_their_bound() -> None:
    """Two jobs with c = m, without contention or votes, so a round takes 2c."""
    jobs = [Profile.whole(name, compute_s=0.1, exchange_s=0.1) for name in "ab"]
    rounds = predict(jobs, vote_s=0.0).rounds
    assert rounds.period_s == pytest.approx(0.2, rel=1e-6)
    assert rounds.bound_s == pytest.approx(0.2, rel=1e-6)


def test_the_slowest_job_makes_the_steps_asked_for() -> None:
    """Rounding doesn't add a step, although 6 * 0.1 / 0.1 is above 6 in floating point."""
    jobs = [
        Profile.whole(name, compute_s=seconds, exchange_s=seconds)
        for name, seconds in (("a", 0.05), ("b", 0.02))
    ]
    assert predict(jobs[:1], steps=6).steps == (6,)
    assert predict(jobs, steps=6).steps == (6, 15)


def test_one_after_the_other_takes_the_sum() -> None:
    jobs = [Profile.whole(name, compute_s=0.1, exchange_s=0.05) for name in "ab"]
    rounds = predict(jobs, policy=jaxcross.Sequential(), vote_s=0.0).rounds
    assert rounds.in_turn
    assert rounds.period_s == pytest.approx(0.3, rel=1e-6)


def test_time_between_steps_is_in_the_period() -> None:
    job = Profile.whole("a", compute_s=0.1, exchange_s=0.05)
    busy = Profile(name="a", graph=job.graph, seconds=job.seconds, host_s=0.02)
    assert predict([busy], vote_s=0.0).rounds.jobs[0].period_s == pytest.approx(0.17, rel=1e-6)


def test_a_cut_step_overlaps_with_itself() -> None:
    """The backward pass has two halves. The first half's exchange runs while the second half
    computes.
    """
    graph = StepGraph(
        kinds=("compute", "collective", "compute", "collective", "compute"),
        needs=((), (0,), (0,), (2,), (1, 3)),
        after_commit=frozenset({4}),
    )
    cut = Profile(name="a", graph=graph, seconds=(0.1, 0.1, 0.1, 0.1, 0.0))
    assert predict([cut], vote_s=0.0).rounds.jobs[0].period_s == pytest.approx(0.3, rel=1e-6)


def test_contention_slows_both_lanes() -> None:
    """Two jobs with c = m keep both lanes busy all the time, so the slower lane sets the period."""
    jobs = [Profile.whole(name, compute_s=0.1, exchange_s=0.1) for name in "ab"]
    both = Contention(compute=1.3, exchange=1.1)
    period = predict(jobs, contention=both, vote_s=0.0, steps=200).rounds.period_s
    # Compute always overlaps with an exchange, except in the gaps that the slower lane causes in
    # the exchange lane.
    assert period == pytest.approx(2 * (0.1 * 1.3 - 0.3 * (0.1 * 1.3 - 0.1 * 1.1) / 1.3), rel=0.03)


def test_depth_is_the_policys() -> None:
    """With more segments on the device at once, two jobs compute in a different order."""
    jobs = [Profile.whole(name, compute_s=0.1, exchange_s=0.3) for name in "ab"]
    found = [predict(jobs, policy=jaxcross.RoundRobin(depth=d), vote_s=0.0) for d in (1, 2)]
    assert found[0].spans != found[1].spans


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        ([], {}, "at least one job"),
        (["a", "a"], {}, "two jobs have the name `a`"),
        (["a"], {"steps": 1}, "at least 2 steps"),
        (["a", "b"], {"steps": [3]}, "each of the 2 jobs"),
        (["a", "b"], {"policy": jaxcross.Weighted((1,))}, "1 shares, but there are 2 jobs"),
        (["a"], {"steps": 200_000}, "200000 steps"),
    ],
)
def test_what_cannot_be_predicted_is_an_error(
    jobs: list[str], options: dict[str, Any], message: str
) -> None:
    profiles = [Profile.whole(name, compute_s=0.1, exchange_s=0.1) for name in jobs]
    with pytest.raises(ValueError, match=message):
        predict(profiles, **options)
