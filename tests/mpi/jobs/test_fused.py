"""Fused jobs over real exchanges. One `mpirun` runs the table."""

import pytest

CASES = [
    "one_ends_first", "one_stops_early", "data_of_one_raise_on_one_rank", "one_is_not_finite",
    "an_error_after_a_step", "unlike_jobs", "conditionals",
]  # fmt: skip
SLOW = ["a_network_keeps_its_bits", "it_is_measured"]
LONG = ["every_network_and_exchange_keeps_its_bits"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="plain"),
        pytest.param(SLOW, id="slow", marks=pytest.mark.integration),
        pytest.param(LONG, id="long", marks=pytest.mark.exhaustive),
    ],
)
def test_fused_jobs_over_mpi(mpirun, cases):
    finished = mpirun(2, "fused_table.py", *cases, timeout=900).check()
    passed = [line for line in finished.stdout.splitlines() if line.startswith("passed")]
    assert sorted(passed) == sorted(f"passed {case}" for case in cases)
