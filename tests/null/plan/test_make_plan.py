"""Tests `of`: which jobs run together, and why others run alone."""

from dataclasses import replace
from typing import Any

import pytest

import jaxcross
from jaxcross.interleave.contention import Contention
from jaxcross.jobs.memory import JobMemory
from jaxcross.plan.machine_contention import TWO_CORES
from jaxcross.plan.make_plan import make, predict_group
from jaxcross.plan.plan import Plan
from jaxcross.step.profile import Profile


def _profile(name: str, compute_s: float, exchange_s: float, **fields: Any) -> Profile:
    whole = Profile.whole(
        name, compute_s=compute_s, exchange_s=exchange_s, nbytes=max(1, int(1e8 * exchange_s))
    )
    return replace(whole, **fields)


UNLIKE = [
    _profile("large", 0.6, 0.1),
    _profile("small", 0.04, 0.1),
    _profile("other", 0.2, 0.1, ranks=4),
]


def _groups(plan: Plan) -> list[tuple[str, ...]]:
    return [tuple(job.name for job in group.jobs) for group in plan.groups]


@pytest.mark.integration
def test_unlike_jobs_share_ranks_and_none_starves() -> None:
    plan = jaxcross.plan.make(UNLIKE)
    assert _groups(plan) == [("large", "small"), ("other",)]
    pair, single = plan.groups
    assert (pair.ranks, single.ranks) == (1, 4)
    assert all(job.speed >= 0.5 for job in pair.jobs) and pair.progress > 1.05
    assert pair.jobs[0].pieces > 1 and pair.jobs[0].estimated
    assert single.jobs[0].speed == 1.0
    assert "do not slow each other down" in str(plan)


@pytest.mark.integration
def test_the_prediction_of_a_group_is_the_plan_s() -> None:
    plan = make(UNLIKE)
    (pair, _) = plan.groups
    found = predict_group(pair, UNLIKE)
    assert found.rounds.period_s == pytest.approx(pair.period_s)
    for job, timing in zip(pair.jobs, found.rounds.jobs, strict=True):
        assert timing.period_s == pytest.approx(job.step_s, rel=0.15)
    with pytest.raises(ValueError, match="no profile of `large` with the planned cut"):
        predict_group(pair, UNLIKE[1:])
    with pytest.raises(
        ValueError, match="planned for 1 ranks, but the job's profile was measured on 3"
    ):
        predict_group(pair, [replace(profile, ranks=3) for profile in UNLIKE])


@pytest.mark.mostly_integration("1e-05")
@pytest.mark.parametrize("step_s", [1e-300, 1e-5])
def test_a_group_too_unlike_is_not_predicted(step_s: float) -> None:
    """A plan may come from any file. Predicting it takes no longer than predicting a plan made by
    `make`.
    """
    (pair, _) = make(UNLIKE).groups
    loaded = replace(pair, jobs=(pair.jobs[0], replace(pair.jobs[1], step_s=step_s)))
    with pytest.raises(
        ValueError, match="differ too much for a prediction .*, which would have more than 20000"
    ):
        predict_group(loaded, UNLIKE)


@pytest.mark.integration
def test_jobs_that_would_starve_run_alone() -> None:
    """Both jobs compute all the time, and need more than the other one leaves free."""
    plan = make([_profile("a", 0.613, 0.023), _profile("b", 0.731, 0.129)], floor=0.5)
    assert _groups(plan) == [("b",), ("a",)]
    assert "alongside `a`, `b` would run at 0.4" in plan.groups[0].why
    assert plan.progress == 1.0


def test_jobs_too_unlike_for_a_prediction_run_alone() -> None:
    """They neither slow the plan down nor make it fail. The job that's unlike the others is
    separated first.
    """
    plan = make([_profile("a", 0.5, 0.5), _profile("b", 0.5, 0.5), _profile("tiny", 1e-5, 1e-5)])
    assert _groups(plan) == [("a", "b"), ("tiny",)]
    assert plan.groups[1].why.startswith("with `a` and `b`, the longest step takes ")
    assert plan.groups[1].why.endswith(
        " times as long as the shortest: too unlike for a prediction"
    )


@pytest.mark.integration
def test_jobs_that_gain_nothing_run_alone() -> None:
    slow = Contention(compute=2.0, exchange=2.0)
    plan = make([_profile("a", 0.1, 0.1), _profile("b", 0.1, 0.1)], contention=slow, floor=0.1)
    assert len(plan.groups) == 2
    assert "times as many steps together" in plan.groups[0].why


def test_groups_of_like_jobs_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxcross.plan import make_plan

    made: list[int] = []
    choose = make_plan.choose_rates
    monkeypatch.setattr(
        make_plan,
        "choose_rates",
        lambda *args, **options: made.append(1) or choose(*args, **options),
    )
    plan = make([_profile(f"lr-{n}", 0.1, 0.1) for n in range(8)], most=2)
    assert [len(group.jobs) for group in plan.groups] == [2] * 4
    assert len(made) == 1


@pytest.mark.integration
def test_memory_keeps_jobs_apart() -> None:
    memory = JobMemory(peak_bytes=50 * 10**9, boundary_bytes=40 * 10**9)
    jobs = [_profile(name, 0.1, 0.1, memory=memory) for name in "ab"]
    assert _groups(make(jobs, memory="90GB")) == [("a", "b")]
    assert make(jobs, memory="90GB").groups[0].memory_bytes == 90 * 10**9
    assert len(make(jobs, memory="80GB").groups) == 2
    assert "memory of 1 jobs is not known" in str(
        make([*jobs, _profile("c", 0.1, 0.1)], memory="90GB")
    )


@pytest.mark.integration
def test_measured_cuts_are_not_estimated() -> None:
    cut = _profile("large", 0.6, 0.1).cut_evenly(16)
    plan = make([_profile("large", 0.6, 0.1), cut, _profile("small", 0.04, 0.1)])
    (job, *_) = plan.group_of("large").jobs
    assert (job.pieces, job.estimated) == (16, False)


@pytest.mark.integration
def test_contention_is_that_of_the_link_s_rate() -> None:
    jobs = [_profile(name, 0.1, 0.1, mbps=1000.0) for name in "ab"]
    at_rate = make(jobs, contention=TWO_CORES.at(1000), floor=0.1)
    assert make(jobs, contention=TWO_CORES, floor=0.1) == at_rate
    unnamed = make([_profile(name, 0.1, 0.1) for name in "ab"], contention=TWO_CORES)
    assert any("without contention" in note for note in unnamed.notes)


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        ([], {}, "at least one job"),
        ([UNLIKE[0]] * 2, {}, r"two profiles of `large` have the same cut \(`cut=1`\)"),
        ([UNLIKE[0], replace(UNLIKE[0].cut_evenly(2), ranks=2)], {}, "different numbers of ranks"),
        ([_profile("a", 0, 0)], {}, "`a` takes no time"),
        (UNLIKE, {"memory": "many"}, "`memory` must be a number of bytes"),
        (UNLIKE, {"floor": 0}, r"`floor` must be in \(0, 1\]"),
        (UNLIKE, {"floor": float("nan")}, r"`floor` must be in \(0, 1\]"),
        (UNLIKE, {"most": 0}, "at least 1 job"),
        (UNLIKE, {"steps": {"large": 1}}, "no others, but job `other` is missing"),
        (UNLIKE, {"steps": {"large": 1, "small": 1, "other": float("nan")}}, "must be finite"),
        ([_profile("a", 1, 1, memory=JobMemory(peak_bytes=9))], {"memory": 8}, "`a` needs 9 bytes"),
        (UNLIKE, {"vote_s": -1}, "`vote_s` must be finite and not negative, got -1"),
        (UNLIKE, {"vote_s": float("nan")}, "`vote_s` must be finite"),
    ],
)
def test_what_cannot_be_planned_is_an_error(jobs: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(jobs, **options)


@pytest.mark.parametrize(
    ("jobs", "options", "message"),
    [
        (UNLIKE[0], {}, "`profiles` must be an iterable, got <Profile of"),
        (["a"], {}, "each of `profiles` must be a `Profile`, got 'a'"),
        (UNLIKE, {"vote_s": "1"}, "`vote_s` must be a number, got '1'"),
        (UNLIKE, {"most": 2.0}, "`most` must be a whole number, got 2.0"),
        (UNLIKE, {"floor": "1"}, "`floor` must be a number or None, got '1'"),
        (UNLIKE, {"steps": [1]}, "`steps` must be a mapping or None"),
        (UNLIKE, {"steps": {"large": "1"}}, "`steps` of `large` must be a number, got '1'"),
        (UNLIKE, {"contention": 1.5}, "`contention` must be a `Contention` or a `MachineCont"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(jobs: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(jobs, **options)
