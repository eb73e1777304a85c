"""Admission by memory over real exchanges. One `mpirun` runs the whole table."""

import pytest

CASES = [
    "a_job_too_many_fails_alone",
    "the_last_of_equal_jobs_is_refused",
    "a_job_that_joins_is_refused",
    "a_job_that_leaves_makes_room",
    "ranks_with_other_limits_agree",
    "a_base_that_jobs_share_is_booked_once",
]


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.integration)])
def test_jobs_book_memory_over_mpi(mpirun, ranks, quick_compiler):
    finished = mpirun(ranks, "memory_table.py", timeout=900, env=quick_compiler).check()
    assert [line for line in finished.stdout.splitlines() if line.startswith("passed")] == [
        f"passed {c}" for c in CASES
    ]
