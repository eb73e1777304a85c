"""The arithmetic of the race: bounds, hidden shares, rates, and a rival's row of numbers."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import race
import race_bounds
import race_show
from race_measure import Calibration
from rivals import cases

from tests.support.race_entrants import cost


@pytest.mark.parametrize(
    ("jobs", "bound"),
    [
        ([cost(2, 1), cost(2, 1)], 2),  # sum c
        ([cost(1, 2), cost(1, 2)], 2),  # sum m
        ([cost(1, 1), cost(5, 4)], 4.5),  # the chain of a single job
        ([cost(2, 1)], 3),
    ],
)
def test_bound_is_the_longest_of_three(jobs, bound):
    assert race_bounds.bound_s(jobs) == bound
    assert race_bounds.taxed_bound_s(jobs) == bound


@pytest.mark.parametrize(
    ("job", "first", "last", "best"),
    [(cost(2, 4), 1.0, 0.1, 5.0), (cost(4, 2), 1.0, 0.1, 4.2), (cost(2, 2), 2.0, 1.0, 4.0)],
)
def test_wait_free_bound_of_one_job(job, first, last, best):
    """However a job is cut, its first bucket and the wire, or its last bucket, are a bound."""
    assert race_bounds.wait_free_s(job, first, last) == best


def test_a_job_that_overlaps_itself_has_no_chain():
    assert race_bounds.bound_s([cost(2, 1)], chain=False) == 2


def test_tax_is_the_compute_time_lost_to_exchanges():
    assert race_bounds.taxed_bound_s([cost(2, 1, 0.5), cost(2, 1, 0.25)]) == 2.375
    # network-bound: the lost compute time still fits alongside the exchange
    assert race_bounds.taxed_bound_s([cost(1, 4, 0.1), cost(1, 4, 0.1)]) == 4


@pytest.mark.parametrize(
    ("measured", "share"), [(3, 0.0), (2.5, 0.5), (2, 1.0), (1.9, 1.0), (4, 0.0)]
)
def test_hidden_share(measured, share):
    assert race_bounds.hidden_share([cost(2, 1)], measured) == share


def test_rate_gives_the_wanted_exchange_time():
    # 100 MB at 500 Mbit/s take 1.6 s plus a constant 0.1 s; there are two of them
    jobs, sent = [cost(1.5, 1.7)] * 2, [100e6] * 2
    rate = race_bounds.rate_for(3.0, jobs, sent, 500e6)
    assert 2 * (0.1 + 8 * 100e6 / rate) == pytest.approx(3.0)
    assert race_bounds.rate_for(0.1, jobs, sent, 500e6) == race_bounds.MAX_RATE
    assert race_bounds.rate_for(1e9, jobs, sent, 500e6) == race_bounds.MIN_RATE


@pytest.mark.parametrize(
    ("text", "bits"),
    [("500mbit", 5e8), ("1.5gbit", 1.5e9), ("10bit", 10), ("2kbps", 16e3), ("8tbit", 8e12)],
)
def test_rates_as_tc_spells_them(text, bits):
    assert race_bounds.bits_a_second(text) == bits


def test_a_row_says_what_was_measured():
    calibration = Calibration(
        compute_s=[9, 9],
        exchange_s={"float32": [1, 1]},
        tax_s={"float32": [0.25, 0.25]},
        beside_s={"float32": [10.8, 9.9]},
        rate_bits_per_s=1e9,
        sent_bytes=[1, 1],
        raw={},
    )
    sample = {"cpu_s": 3.0, "wire_bytes": 8.0, "peak_rss_bytes": 9}
    # Each repeat is judged by its own c, so the rival isn't blamed for the slow machine of the last
    # one.
    own = {"own_c_s": [7, 8]}
    samples = [
        {**sample, **own, "s_per_job_step": s, "c_s": [c, c]}
        for s, c in ((2.4, 2), (2.5, 2), (4, 3.2))
    ]
    facts = {"case": "two", "rate": "compute", "link": "1gbit", "run": 0}
    row = race.row_of(cases.RIVALS["fused-k"], samples, calibration, facts)
    assert row["s_per_job_step"] == 2.5 and row["spread"] == [2.4, 4]
    assert (
        row["c_s"] == [2, 2]
        and row["own_c_s"] == [7, 8]
        and row["m_s"] == [1, 1]
        and row["tax_s"] == [0.25, 0.25]
    )
    assert row["slow_down"] == pytest.approx([1.2, 1.1])
    assert row["bound_s"] == 2 and row["efficiency"] == 0.8
    assert row["bound_with_tax_s"] == 2.25 and row["efficiency_with_tax"] == pytest.approx(
        2.25 / 2.5
    )
    assert row["hidden_share"] == 0.5 and "hidden_share_from_trace" not in row
    assert row["over_own_compute"] == 1.25
    traced = [{**s, "hidden_share_from_trace": 0.9, "steady_s_per_job_step": 2.1} for s in samples]
    row = race.row_of(cases.RIVALS["crossover"], traced, calibration, facts)
    assert (
        row["hidden_share"] == 0.5
        and row["hidden_share_from_trace"] == 0.9
        and row["steady_s_per_job_step"] == 2.1
    )
    assert row["steady_efficiency"] == pytest.approx(2 / 2.1)


def test_costs_are_medians_over_all_repeats():
    def once(c, m, sent):
        taxes = {
            "tax_float32": [[0.5], [0.5]],
            "tax_bfloat16": [[0.25], [0.25]],
            "taxed_c_bfloat16": [[7.5], [7.5]],
        }
        m_raw = {"m_float32": [[m], [m]], "m_bfloat16": [[m / 2], [m / 2]]}
        return {cases.RESNET: {"c": [[c], [c + 1]], **m_raw, **taxes, "sent_bytes": [sent]}}

    found = Calibration.of(
        [cases.RESNET] * 2,
        [once(1.0, 5.0, 10.0), once(9.0, 6.0, 20.0), once(2.0, 7.0, 30.0)],
        "1gbit",
    )
    assert found.rate_bits_per_s == 1e9 and found.ratio == 6.0 / 2.5
    assert found.costs("float32") == [cost(2.5, 6.0, 0.5)] * 2  # of 1, 2, 9 and of 2, 3, 10
    assert found.costs("float32", [7.0, 8.0]) == [cost(7.0, 6.0, 0.5), cost(8.0, 6.0, 0.5)]
    assert found.costs("bfloat16") == [cost(2.5, 3.0, 0.25)] * 2 and found.slow_down(
        "bfloat16"
    ) == [3.0, 3.0]
    assert found.sent_bytes == [20.0, 20.0]
    assert found.raw[cases.RESNET]["c"] == [[1.0, 9.0, 2.0], [2.0, 10.0, 3.0]]


def test_rivals_of_one_framework_share_their_c():
    def sample(*seconds):
        return {
            "c_raw": [
                {"model": "resnet50", "before": [list(seconds)] * 2, "after": [list(seconds)] * 2}
            ]
        }

    slow, quick, torch = sample(3.0), sample(1.0, 1.0), sample(7.0)
    race.share_compute((cases.RESNET,) * 2, [("jax", slow), ("torch", torch), ("jax", quick)])
    assert slow["c_s"] == quick["c_s"] == [1.0, 1.0] and torch["c_s"] == [7.0, 7.0]


def test_bfloat16_is_held_against_bfloat16():
    rows = [
        {"run": 0, "case": "two", "rate": "balanced", "rival": name, "s_per_job_step": s}
        for name, s in (
            ("ddp", 3.0),
            ("ddp-bf16", 2.0),
            ("crossover", 1.5),
            ("crossover-bf16", 1.0),
        )
    ]
    assert [race_show.over_reference(row, rows) for row in rows] == [2, 2, 1, 1]
    assert race_show.over_reference({**rows[0], "run": 1}, rows) is None
