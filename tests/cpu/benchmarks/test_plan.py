"""Predictions are judged by rows whose repeats agree; a miss splits by cause, with no remainder."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import carried_show
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
    assert {case.part for case in CASES.values()} | {"pair"} == set(PARTS)
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
