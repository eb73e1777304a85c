"""Membership over real exchanges. One `mpirun` per world size runs the whole table."""

import pytest

CASES = [
    "jobs_join_and_leave",
    "jobs_begin_together",
    "one_is_stopped",
    "one_rests",
    "one_is_ejected",
    "one_raises_for_it",
    "one_skips",
    "jobs_are_submitted",
    "memory_is_freed",
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_membership_over_mpi(mpirun, ranks, quick_compiler):
    finished = mpirun(ranks, "membership_table.py", timeout=900, env=quick_compiler).check()
    assert [line for line in finished.stdout.splitlines() if line.startswith("passed")] == [
        f"passed {c}" for c in CASES
    ]
