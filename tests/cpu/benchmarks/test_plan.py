"""Predictions are judged by rows whose repeats agree; a miss splits by cause, with no remainder."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import carried_show
import pages.plan
import plan_show
from plan_cases import CASES, ESTIMATED, KINDS, PARTS, kind_of

from jaxcross.plan.twin import predict
from jaxcross.report import JobSummary, Report
from jaxcross.step.profile import Profile

RACE = Path(__file__).parents[3] / "benchmarks" / "results" / "race.json"


def _two(seconds: float = 0.3) -> list[Profile]:
    return [Profile.whole(name, compute_s=0.2, exchange_s=seconds) for name in ("job0", "job1")]


def test_causes_sum_to_the_difference_of_rounds():
    twin, slower = predict(_two()), predict(_two(0.36))
    jobs = tuple(
        JobSummary(name=job.facts.name, steps=job.facts.steps) for job in slower.rounds.jobs
    )
    wall_ns = {0: (0, round(slower.wall_s * 1e9))}
    run = Report(spans=slower.spans, jobs=jobs, policy=slower.policy.name, wall_ns=wall_ns)
    causes = plan_show.attribution(twin, run)
    assert causes.keys() == {"exchange"} and causes["exchange"] == pytest.approx(0.2, abs=0.01)
    assert twin.rounds.period_s is not None and slower.rounds.period_s is not None
    assert sum(causes.values()) == pytest.approx(slower.rounds.period_s / twin.rounds.period_s - 1)


def test_time_of_a_step_is_without_first_steps():
    twin = predict(_two(), steps=(10, 10))
    steady = twin.rounds.s_per_step
    assert steady is not None
    assert plan_show.s_per_step(twin.spans) == pytest.approx(steady, rel=0.03)
    slow = [  # the first step takes 1 s longer and delays everything after it
        replace(span, start_ns=span.start_ns + late, end_ns=span.end_ns + late)
        for span in twin.spans
        for late in [10**9 if span.end_ns > min(s.end_ns for s in twin.spans if s.step == 1) else 0]
    ]
    assert plan_show.s_per_step(slow) == pytest.approx(plan_show.s_per_step(twin.spans), rel=1e-3)


def test_solo_runs_are_pooled_under_a_name():
    one, two = (Profile.whole("x", compute_s=c, exchange_s=0.1) for c in (0.2, 0.4))
    mean = plan_show.pooled([one, two], "job7")
    assert (mean.name, mean.compute_s, mean.exchange_s) == ("job7", pytest.approx(0.3), 0.1)


def test_ranks_are_pooled_before_the_slowest_is_chosen():
    """Each rank is the slower one once, so on average they're equally fast."""
    one = Profile.whole("x", compute_s=0.4, exchange_s=0.1, ranks=2)
    runs = [
        replace(one, rank_seconds=tuple((c, 0.1, 0.0) for c in of_ranks))
        for of_ranks in ((0.4, 0.2), (0.2, 0.4))
    ]
    mean = plan_show.pooled(runs, "job0")
    assert mean.rank_compute_s == pytest.approx((0.3, 0.3))
    assert mean.compute_s == pytest.approx(0.3)


def test_contention_is_the_median_of_rounds():
    """It's at least 1: work doesn't get faster because other work runs alongside it."""
    rounds = [
        {
            "compute_s": 1.0,
            "compute_beside_s": c,
            "exchange_s": 2.0,
            "exchange_beside_s": 1.9,
            "megabytes": 3,
        }
        for c in (1.3, 1.1, 1.2)
    ]
    row = plan_show.contention_row(25, rounds)
    assert (row["rate"], row["compute"], row["exchange"]) == (25, 1.2, 1.0)
    assert row["compute_ratios"] == [1.1, 1.2, 1.3] and row["exchange_ratios"] == [0.95] * 3


def test_tables_of_slow_links_and_slow_ranks():
    slow = {"rank": 1, "factor": 1.9, "cost_share": 0.4}
    facts = {"ratio": 1.05, "spread": 0.01, "slow_rank": None, "reported_slow_rank": None}
    rows = [
        {**facts, "case": "two, batch 64", "rate": 25, "predicted_s": 2.1, "achieved_s": 2.0},
        {**facts, "case": "two, like ranks", "rate": 1000, "predicted_s": 0.3, "achieved_s": 0.3},
        {
            **facts,
            "case": "two, rank 1 slower",
            "rate": 1000,
            "predicted_s": 0.5,
            "achieved_s": 0.5,
            "slow_rank": slow,
            "reported_slow_rank": {**slow, "cost_share": 0.41},
        },
    ]
    estimated = {"predicted": 1.8, "achieved": 1.68, "ratio": 1.071}
    kept = {
        "rows": rows,
        "estimates": [{**estimated, "case": "two, batch 64", "rate": 25}],
        "contention": [{"rate": 25, "compute_ratios": [1.0, 1.1], "exchange_ratios": [1.0]}],
    }
    tables = {
        name: [*pages.plan.TABLES[f"plan-{name}"](lambda _: kept, "")]
        for name in ("contention", "slow", "unlike")
    }
    assert tables["contention"][1] == ("25", "1.05 (1.00 to 1.10)", "1.00")
    assert tables["slow"][1] == ("25", "1.80", "1.60", "1.68", "1.0%", "1.071")
    like, unlike = tables["unlike"][1:]
    assert like[6:] == ("none", "", "", "")
    assert unlike[6:] == ("1, 1.90 times as long", "40%", "40%", "41%")


def test_rates_are_of_the_time_in_which_all_run():
    slow, fast = [1.0, 2.0, 3.0, 4.0], [0.5 * n for n in range(1, 21)]
    assert plan_show.rates({"slow": slow, "fast": fast}) == {"slow": 1.0, "fast": 2.0}


def test_rows_whose_repeats_differ_do_not_count():
    row = {"spread": 0.01, "ratio": 1.04, "covered": True}
    rows = [row, {**row, "ratio": 1.06}, {**row, "spread": 0.04}]
    found = plan_show.verdict({"rows": rows, "estimates": [{"ratio": 0.91}, {"ratio": 1.11}]})
    assert (found["rows"], found["count"], found["within"], found["covered"]) == (3, 2, 1, 2)
    assert (found["estimates"], found["estimates_within"]) == (2, 1)


def test_intervals_cover_the_kept_race():
    rows = plan_show.race_rows(json.loads(RACE.read_text()))
    assert len(rows) == 37 and sum(row["covered"] for row in rows) >= 0.9 * len(rows)


def test_new_rows_replace_those_of_the_same_case():
    old = [{"case": "two", "rate": 500, "ratio": 1}, {"case": "two", "rate": 1000, "ratio": 2}]
    result = {"rows": old}
    plan_show.keep(result, {"rows": [{"case": "two", "rate": 500, "ratio": 3}]})
    assert [(row["rate"], row["ratio"]) for row in result["rows"]] == [(1000, 2), (500, 3)]


def test_cases_name_kinds_that_exist():
    assert {kind for case in CASES.values() for kind in case.kinds} <= KINDS.keys()
    assert {case.part for case in CASES.values()} | {"pair", "contention"} == set(PARTS)
    for name, kind in ESTIMATED.items():
        assert set(CASES[name].kinds) == {kind}
    assert all(kind_of(name, smoke=True).spec.model in ("resnet8", "transformer") for name in KINDS)


def test_plan_is_drawn_from_its_rows(tmp_path):
    row = {
        "case": "two",
        "rate": 500,
        "predicted_s": 0.5,
        "achieved_s": 0.52,
        "ratio": 0.5 / 0.52,
        "spread": 0.01,
        "interval_s": [0.47, 0.55],
        "covered": True,
        "raw_s": [0.51, 0.52],
    }
    plan_show.draw(
        {"rows": [row, {**row, "rate": 1000, "spread": 0.1}], "estimates": []},
        tmp_path / "plan.png",
    )
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_carried_is_drawn_from_its_rows(tmp_path):
    raw = {"jit": [0.6], "compute": [0.6], "blocking": [0.9], "carried": [0.64]}
    row = {
        "part": "alone",
        "rate": 25,
        "raw": raw,
        "s": {way: each[0] for way, each in raw.items()},
    }
    carried_show.draw({"rows": [row]}, tmp_path / "carried.png")
    assert (tmp_path / "carried.png").stat().st_size > 10_000
    assert "   0.667 of computation alone" in "\n".join(carried_show.lines(row))
