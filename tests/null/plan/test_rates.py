"""Tests pieces and shares: either no job starves, or the plan refuses and says why."""

from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from jaxcross.interleave.contention import Contention
from jaxcross.interleave.policy import RoundRobin, Weighted
from jaxcross.jobs.memory import JobMemory
from jaxcross.plan.rates import Cuts, Rates, choose_rates, cuts_of
from jaxcross.plan.twin import step_rates
from jaxcross.step.profile import Profile


def _cuts(name: str, compute_s: float, exchange_s: float, **memory: int) -> Cuts:
    whole = Profile.whole(
        name, compute_s=compute_s, exchange_s=exchange_s, nbytes=int(1e9 * exchange_s)
    )
    cuts = cuts_of(whole)
    return (
        {n: Profile(**{**_fields(p), "memory": JobMemory(**memory)}) for n, p in cuts.items()}
        if memory
        else cuts
    )


def _fields(profile: Profile) -> dict[str, Any]:
    return {"name": profile.name, "graph": profile.graph, "seconds": profile.seconds}


def _random(seed: int) -> list[Cuts]:
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 5))
    return [_cuts(f"job{i}", *map(float, random.lognormal(-2, 1, 2))) for i in range(count)]


def _bound(jobs: list[Cuts], found: Rates) -> float | None:
    """Computes, with a linear program, the most progress that any order of the jobs could achieve.

    Each job must keep at least the share `found.floor` of its own speed. Returns None if that's
    impossible.
    """
    lanes = [[getattr(cuts[1], use) for cuts in jobs] for use in ("compute_s", "exchange_s")]
    use = [
        [seconds / own for seconds, own in zip(lane, found.alone_s, strict=True)] for lane in lanes
    ]
    best = linprog(
        [-1.0] * len(jobs), A_ub=use, b_ub=[1.0, 1.0], bounds=[(found.floor, 1.0)] * len(jobs)
    )
    return -best.fun if best.success else None


def _check(seeds: range) -> None:
    refused = possible = 0
    progress = []
    for seed in seeds:
        jobs = _random(seed)
        found = choose_rates(jobs)
        bound = _bound(jobs, found)
        possible += bound is not None
        refused += bool(found.refusal) and bound is not None
        if not found.refusal:
            assert found.floor == 1 / len(jobs)
            profiles = [cuts[n] for cuts, n in zip(jobs, found.pieces, strict=True)]
            rates = step_rates(
                profiles, policy=found.policy, until_s=15 * len(jobs) * max(found.alone_s)
            )
            assert (
                min(r * own for r, own in zip(rates, found.alone_s, strict=True)) >= found.floor
            ), seed
            assert bound is not None
            progress.append(found.progress / bound)
    print(
        f"{refused} of {possible} refused, progress {np.mean(progress):.3f} of the bound, "
        f"{min(progress):.3f} at least"
    )
    assert refused <= 0.05 * possible
    assert np.mean(progress) >= 0.8


@pytest.mark.integration
def test_no_job_of_a_random_set_starves() -> None:
    _check(range(6))


@pytest.mark.exhaustive
def test_no_job_of_a_thousand_sets_starves() -> None:
    _check(range(1000))


def test_equal_jobs_run_whole_by_turns() -> None:
    found = choose_rates([{1: _cuts(name, 0.1, 0.1)[1]} for name in "ab"])
    assert (found.pieces, found.policy, found.refusal) == ((1, 1), RoundRobin(), "")
    assert found.progress == pytest.approx(2, rel=0.02)


@pytest.mark.integration
def test_a_large_job_is_cut_for_a_small_one() -> None:
    """Whole steps of the large job would slow the small job down to a tenth of its speed."""
    large, small = _cuts("large", 1.0, 1.0), _cuts("small", 0.1, 0.1)
    whole = choose_rates([{1: large[1]}, {1: small[1]}])
    assert "`small` would run at" in whole.refusal and "below the floor of 0.500" in whole.refusal
    found = choose_rates([large, small])
    assert not found.refusal and found.pieces[0] > 8
    assert min(found.speeds) >= 0.5


def test_a_job_with_a_short_exchange_does_not_hold_the_lane() -> None:
    """A job that computes much but hardly exchanges mustn't crowd out the others.

    With equal shares, it would take so much of the compute lane that one of the other jobs would
    run at less than a tenth of its own speed.
    """
    costs = {"computes": (0.8, 0.011), "exchanges": (0.118, 0.373), "both": (0.523, 0.26)}
    jobs = [_cuts(name, *cost) for name, cost in costs.items()]
    found = choose_rates(jobs)
    profiles = [cuts[8] for cuts in jobs]
    equal = step_rates(profiles, policy=Weighted((1, 1, 1)), until_s=30)
    assert min(rate * own for rate, own in zip(equal, found.alone_s, strict=True)) < 0.1
    assert not found.refusal and min(found.speeds) >= 1 / 3


@pytest.mark.integration
def test_jobs_that_leave_no_room_are_refused() -> None:
    """Both jobs compute all the time when alone, so every order slows some job down."""
    found = choose_rates([_cuts("a", 0.6, 0.02), _cuts("b", 0.7, 0.13)])
    assert "below the floor of 0.500, in the fairest way that was found" in found.refusal


def test_contention_costs_speed() -> None:
    jobs = [_cuts(name, 0.1, 0.1) for name in "ab"]
    slow = choose_rates(jobs, contention=Contention(compute=1.3, exchange=1.2), floor=0.3)
    assert slow.progress < 0.9 * choose_rates(jobs, floor=0.3).progress


def test_contention_counts_for_a_job_alone_too() -> None:
    """A job in pieces overlaps with itself, so contention slows it down."""
    job = _cuts("a", 0.1, 0.1)
    (undisturbed,) = choose_rates([job]).alone_s
    (disturbed,) = choose_rates([job], contention=Contention(compute=1.3, exchange=1.2)).alone_s
    assert disturbed > 1.1 * undisturbed


def test_jobs_that_do_not_fit_are_refused() -> None:
    jobs = [_cuts(name, 0.1, 0.1, peak_bytes=100, boundary_bytes=60) for name in "ab"]
    assert "do not fit into the memory" in choose_rates(jobs, memory=159).refusal
    assert not choose_rates(jobs, memory=160).refusal


def test_one_job_takes_its_fastest_cut() -> None:
    found = choose_rates([_cuts("a", 0.1, 0.1)])
    assert found.speeds == (1.0,) and found.pieces[0] > 1
    assert choose_rates([_cuts("a", 0.1, 0.0001)]).pieces == (1,)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([], "at least one job"),
        ([{}], "at least one job"),
        ([_cuts("a", 0.0, 0.0)], "`a` takes no time"),
    ],
)
def test_rates_need_profiles(jobs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_rates(jobs)


def test_an_even_cut_keeps_the_sums() -> None:
    whole = Profile.whole("a", compute_s=0.3, exchange_s=0.2, nbytes=1000)
    for pieces in (1, 2, 4, 8):
        cut = whole.cut_evenly(pieces)
        assert (cut.compute_s, cut.exchange_s) == (pytest.approx(0.3), pytest.approx(0.2))
        assert len(cut.graph.collectives) == pieces and sum(cut.graph.nbytes) == 1000
    with pytest.raises(ValueError, match="`pieces` of `cut_evenly` must be at least 1, got"):
        whole.cut_evenly(0)
    with pytest.raises(ValueError, match="only a step with exactly one"):
        whole.cut_evenly(2).cut_evenly(2)
