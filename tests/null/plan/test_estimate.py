"""Tests the arithmetic of an estimate against the stored race and against the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxcross.interleave.contention import Contention
from jaxcross.interleave.policy import RoundRobin
from jaxcross.interleave.simulator import Call, Simulation
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.jobs.memory import JobMemory
from jaxcross.plan.machine_contention import TWO_CORES, MachineContention
from jaxcross.plan.speedup import StepCost, estimate_of, memory_bytes, period_s
from jaxcross.step.profile import Profile

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
WHOLE = StepGraph(
    kinds=("compute", "collective", "compute"), needs=((), (0,), (1,)), after_commit=frozenset({2})
)
IN_TWO = StepGraph(
    kinds=("compute", "collective", "compute", "collective", "compute"),
    needs=((), (0,), (0,), (2,), (1, 3)),
    after_commit=frozenset({4}),
)
GB = 10**9
MEMORY = JobMemory(peak_bytes=4 * GB, boundary_bytes=GB, exchange_temporary_bytes=GB // 2)
CONTENTION = Contention(compute=1.25, exchange=1.1)


def profile(graph: StepGraph, *seconds: float) -> Profile:
    return Profile(name="train_step", graph=graph, seconds=seconds, ranks=2, memory=MEMORY)


def cost(c: float = 0.875, m: float = 1.75, **changes: Any) -> StepCost:
    """Returns the costs of ResNet-50 at about 470 Mbit/s, unless given otherwise."""
    made = StepCost(
        whole=profile(WHOLE, c - 0.0625 * c, m, 0.0625 * c),
        steps=3,
        wire_bytes=102_000_000,
        narrow_wire_bytes=51_000_000,
    )
    return replace(made, **changes)


def race_rows(*cases: str) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / "race.json").read_text())["rows"]
    return [
        row
        for row in rows
        if row["case"] in cases and row["rival"] in ("crossover", "crossover-bf16")
    ]


def errors(rows: list[dict[str, Any]], *, contention: bool) -> list[float]:
    """Returns the relative errors of the predicted seconds per job-step."""
    found = []
    for row in rows:
        mbps = row["rate_bits_per_s"] / 1e6
        assert TWO_CORES.basis(mbps), "the race is within the rates of known contention"
        factors = TWO_CORES.at(mbps) if contention else None
        predicted = period_s(row["c_s"], row["m_s"], factors) / len(row["c_s"])
        found.append(predicted / row["steady_s_per_job_step"] - 1)
    return found


def test_equal_jobs_of_the_race_are_within_a_tenth() -> None:
    """Compares predictions with all 21 kept runs of two or three equal jobs, in steady state.

    These jobs are uncut and exchange in 32 or 16 bits, over links of 305 to 2059 Mbit/s.
    """
    rows = race_rows("two", "three")
    assert len(rows) == 21
    found = np.abs(errors(rows, contention=True))
    assert found.max() < 0.09
    assert found.mean() < 0.05


def test_the_bound_alone_is_further_off_and_below() -> None:
    found = np.array(errors(race_rows("two", "three"), contention=False))
    assert (found < 0).all()
    assert 0.1 < -found.mean() < 0.13
    assert -found.min() > 0.22


def test_predicted_speed_is_near_that_of_the_race() -> None:
    """Compares predicted and measured speed-ups over running one job after the other.

    This is the number that an estimate prints. The measured runs include the time in which the
    lanes fill up.
    """
    rows = json.loads((RESULTS / "race.json").read_text())["rows"]
    alone = {
        (r["case"], r["rate_bits_per_s"], r["run"]): r for r in rows if r["rival"] == "sequential"
    }
    off = []
    for row in race_rows("two", "three"):
        before = alone.get((row["case"], row["rate_bits_per_s"], row["run"]))
        if before is None or row["rival"] != "crossover":
            continue
        made = estimate_of(
            cost(
                row["c_s"][0],
                row["m_s"][0],
                wire_bytes=int(row["m_s"][0] * row["rate_bits_per_s"] / 8),
            )
        )
        expected = made.of(len(row["c_s"])).expected
        assert expected is not None
        off.append(expected * row["s_per_job_step"] / before["s_per_job_step"] - 1)
    assert len(off) == 11
    assert max(map(abs, off)) < 0.1


def measured_contention(mbps: float) -> list[tuple[float, float]]:
    """Returns the stored slowdown factors of a computation and of an exchange at a rate."""
    found = []
    slow = RESULTS / "plan_slow.json"
    if slow.is_file():
        rows = json.loads(slow.read_text())["contention"]
        found += [(row["compute"], row["exchange"]) for row in rows if row["rate"] == mbps]
    cost = RESULTS / f"exchange_cost_mpich_{mbps:.0f}mbit.json"
    if cost.is_file():
        kept = json.loads(cost.read_text())
        compute, exchange = kept["computation_s"], kept["exchange"]
        found.append(
            (
                compute["beside exchanges"]["median"] / compute["alone"]["median"],
                exchange["beside"]["s"]["median"] / exchange["alone"]["s"]["median"],
            )
        )
    return found


def test_contention_is_what_was_measured() -> None:
    """The table holds the stored medians of one of the two benchmarks, rounded."""
    for mbps, contention in TWO_CORES.measured:
        assert any(
            there
            == (
                pytest.approx(contention.compute, abs=0.02),
                pytest.approx(contention.exchange, abs=0.02),
            )
            for there in measured_contention(mbps)
        ), mbps


MEASURED = MachineContention(
    measured=(
        (25.0, Contention(compute=1.05, exchange=1.0)),
        (100.0, Contention(compute=1.10, exchange=1.02)),
        (200.0, Contention(compute=1.12, exchange=1.04)),
    )
)


@pytest.mark.parametrize(
    ("mbps", "basis"),
    [
        (12.4, ""),
        (12.6, "extrapolated from 25 Mbit/s"),
        (24.6, "measured at 25 Mbit/s"),
        (62.5, "interpolated from 25 and 100 Mbit/s"),
        (101.0, "measured at 100 Mbit/s"),
        (150.0, "interpolated from 100 and 200 Mbit/s"),
        (249.0, "extrapolated from 200 Mbit/s"),
        (251.0, ""),
    ],
)
def test_an_estimate_says_what_its_contention_is_based_on(mbps: float, basis: str) -> None:
    """Far outside the measured rates, there's only a bound."""
    made = estimate_of(
        cost(1.0, 1.0, wire_bytes=round(mbps * 1e6 / 8), contention=MEASURED), jobs=7
    )
    assert made.basis == basis
    (row,) = [line for line in str(made).splitlines() if line.startswith("  times as fast, exp")]
    if basis:
        assert row.endswith(f"your contention, {basis}")
        expected = 2.0 / period_s([1.0], [1.0], MEASURED.at(mbps))
        assert made.of(1).expected == expected
        assert made.recommendation.startswith("Yes, run 7 jobs side by side: about 1.")
    else:
        assert row.endswith(f"not known at {mbps:.0f} Mbit/s; run `jaxcross contention`")
        assert made.of(2).expected is None
        assert made.recommendation.startswith("Try 7 jobs side by side: at most 2.00")
    assert max(map(len, str(made).splitlines())) <= 140


def test_contention_is_interpolated_linearly() -> None:
    there = MEASURED.at(62.5)
    assert (there.compute, there.exchange) == (pytest.approx(1.075), pytest.approx(1.01))


def test_measured_contention_also_counts_on_accelerators() -> None:
    given = cost(1.0, 1.0, wire_bytes=12_500_000, shares_processor=False)
    assert estimate_of(given).of(2).expected is None
    made = estimate_of(replace(given, contention=MEASURED))
    assert made.of(2).expected == pytest.approx(2 / 1.098, abs=0.01)
    assert made.as_dict()["cost"]["contention"] == MEASURED.to_json()


def test_contention_far_from_measured_rates_is_unknown() -> None:
    low, high = TWO_CORES.measured[0][0], TWO_CORES.measured[-1][0]
    assert TWO_CORES.basis(low / 1.9) == f"extrapolated from {low:.4g} Mbit/s"
    assert TWO_CORES.at(low / 1.9) == TWO_CORES.measured[0][1]
    assert TWO_CORES.basis(low / 2.1) == TWO_CORES.basis(1.3 * high) == ""


@pytest.mark.parametrize("jobs", [1, 2, 3, 4])
@pytest.mark.parametrize(("c", "m"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (3.0, 0.1)])
def test_interleaver_reaches_the_bound(jobs: int, c: float, m: float) -> None:
    steps, seconds = 16, (c, m, 0.0)

    def script() -> Any:
        for _ in range(steps):
            yield Call(WHOLE, seconds)

    simulation = Simulation(
        [[script() for _ in range(jobs)]],
        policy=RoundRobin(),
        exchange_s=lambda job, step, segment: seconds[segment],
        check=False,
    )
    taken_s, bound_s = simulation.run()[0].end_s, steps * period_s([c] * jobs, [m] * jobs)
    assert bound_s - 1e-9 <= taken_s <= bound_s + c + m, "the lanes are filled and drained once"


def test_under_contention_the_shorter_lane_always_overlaps_the_other() -> None:
    """The exchanges take 1.1 s under contention. Meanwhile 1.1 / 1.25 s of the 2 s of compute get
    done; the rest runs alone.
    """
    assert period_s([1.0, 1.0], [0.5, 0.5], CONTENTION) == pytest.approx(1.1 + 2 - 1.1 / 1.25)
    assert period_s([0.5, 0.5], [1.0, 1.0], CONTENTION) == pytest.approx(1.25 + 2 - 1.25 / 1.1)
    assert period_s([1.0], [0.5], CONTENTION) == 1.5, "one job alone has nothing alongside it"


def test_a_cut_job_hides_its_first_exchange() -> None:
    """The job computes for 0.5 s, exchanges for 2 s without a break, and updates for 0.1 s."""
    cut = profile(IN_TWO, 0.5, 1.0, 0.4, 1.0, 0.1)
    assert estimate_of(cost(1.0, 2.0, cut=cut)).cut_alone == pytest.approx(3 / 2.6)


def test_a_cut_never_beats_the_busier_lane() -> None:
    cut = profile(IN_TWO, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert estimate_of(cost(1.0, 2.0, cut=cut)).cut_alone == pytest.approx(1.5)


def test_memory_of_jobs() -> None:
    """One job is at its peak, the others are between segments, and one exchange has its
    temporaries.
    """
    made = estimate_of(cost(limit_bytes=7 * GB))
    assert [p.memory_bytes / GB for p in made.gains] == [4.5, 5.5, 6.5, 7.5]
    assert [p.fits for p in made.gains] == [True, True, True, False]
    assert made.fitting_jobs == 3
    assert memory_bytes(cost(), 10) == 13.5 * GB
    assert estimate_of(cost(limit_bytes=GB)).fitting_jobs == 0
    assert estimate_of(cost()).fitting_jobs is None


def test_sixteen_bits_are_compared_with_full_exchanges() -> None:
    asked = estimate_of(cost(1.0, 2.0)).of(2)
    assert (asked.most, asked.most_narrow) == (1.5, 3.0)
    assert asked.expected_narrow is not None
    assert 2.5 < asked.expected_narrow < 3.0


@pytest.mark.parametrize(
    ("changes", "jobs", "start"),
    [
        ({}, 2, "Yes, run 2 jobs side by side: about 1.4"),
        ({"shares_processor": False}, 2, "Try 2 jobs side by side: at most 1.50"),
        ({"m": 0.02}, 2, "No: exchanges take only 2% of a step, 2 jobs run"),
        ({"c": 0.1, "m": 2.0}, 2, "No: the network is the limit, 2 jobs run about 1.0"),
        ({"c": 0.004, "m": 0.004}, 2, "Enlarge the batch first: votes and dispatch"),
        ({"m": 0.0}, 2, "One rank exchanges nothing: m = 0."),
        ({"limit_bytes": 6 * GB}, 4, "4 jobs do not fit into memory: run 2 side by side."),
        ({"limit_bytes": 5 * GB}, 2, "2 jobs do not fit into memory: run one job as it is."),
        ({"limit_bytes": GB}, 2, "Not even one job fits into memory"),
        ({}, 1, "Run one job as it is."),
    ],
)  # fmt: skip
def test_recommendations(changes: dict[str, Any], jobs: int, start: str) -> None:
    assert estimate_of(cost(**changes), jobs).recommendation.startswith(start)


@pytest.mark.parametrize("jobs", [1, 2, 7])
@pytest.mark.parametrize(
    "changes", [{}, {"m": 0.0}, {"limit_bytes": 7 * GB, "where": "job `a`", "link_mbps": 500.0}]
)
def test_the_text_has_ten_lines(jobs: int, changes: dict[str, Any]) -> None:
    lines = str(estimate_of(cost(**changes), jobs)).splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 140
    assert lines[-1].strip() == estimate_of(cost(**changes), jobs).recommendation


def test_all_numbers_are_json() -> None:
    made = estimate_of(cost(cut=profile(IN_TWO, 0.5, 1.0, 0.4, 1.0, 0.1)), 5)
    read = json.loads(json.dumps(made.as_dict()))
    assert [p["jobs"] for p in read["gains"]] == [1, 2, 3, 4, 5]
    assert read["cost"]["exchange_s"] == 1.75
    assert read["cost"]["cut"]["seconds"] == [0.5, 1.0, 0.4, 1.0, 0.1]


def test_less_than_one_job_is_an_error() -> None:
    with pytest.raises(ValueError, match="`jobs` must be at least 1, got 0"):
        estimate_of(cost(), 0)
