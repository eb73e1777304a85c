"""Loops that exchange, and whose number of iterations differs between ranks, over MPI."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.integration


def passed(finished: Any) -> int:
    return finished.stdout.count("passed ")


# One row for each kind of loop. tests/cpu/program/test_loops.py has all rows, and
# tests/mpi/program/test_four_ranks.py has two axes and groups.
ROWS = ["frozen carry", "nested", "predicate exchanges", "gathers"]
ALONE = [
    "callbacks",
    "each_rank_makes_its_own_number_of_iterations",
    "own_numbers_in_the_code",
    "with_calls_of_mpi4jax",
    "a_branch_that_no_rank_takes",
]


def test_loops_equal_vmap(mpirun: Any, quick_compiler: dict[str, str]) -> None:
    done = mpirun(2, "loops_table.py", *ROWS, *ALONE, timeout=900, env=quick_compiler).check()
    assert passed(done) == 1 + len(ALONE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "x64"), [(2, "0"), (2, "1"), (4, "0")])
def test_all_loops_equal_vmap(
    mpirun: Any, ranks: int, x64: str, quick_compiler: dict[str, str]
) -> None:
    env = {"JAX_ENABLE_X64": x64, **quick_compiler}
    assert passed(mpirun(ranks, "loops_table.py", timeout=900, env=env).check()) == 9


def test_loops_alongside_a_job_whose_threads_are_late(
    mpirun: Any, quick_compiler: dict[str, str]
) -> None:
    cases = [
        "crossover_equals_alone",
        "a_rank_that_fails_ends_the_loop_of_the_others",
        "an_inner_loop_that_no_rank_ends",
    ]
    env = {"JAXCROSS_CHAOS": "1", **quick_compiler}
    assert passed(mpirun(2, "loops_table.py", *cases, timeout=900, env=env).check()) == 3
