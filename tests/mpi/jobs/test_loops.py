"""Loops that exchange and end after another number of iterations on each rank, over MPI."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.integration


def passed(finished: Any) -> int:
    return finished.stdout.count("passed ")


@pytest.mark.parametrize(
    ("ranks", "x64"), [(2, "0"), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((2, "1"), (4, "0")))]
)
def test_loops_equal_vmap(mpirun: Any, ranks: int, x64: str, quick_compiler: dict[str, str]) -> None:
    env = {"JAX_ENABLE_X64": x64, **quick_compiler}
    assert passed(mpirun(ranks, "loops_table.py", timeout=900, env=env).check()) == 9


def test_loops_over_axes_and_groups_of_four_ranks(mpirun: Any, quick_compiler: dict[str, str]) -> None:
    """What two ranks do not have: two axes of two, groups of two, and an inner loop of three lengths."""
    names = ["two axes", "one of two axes", "groups", "nested"]
    assert passed(mpirun(4, "loops_table.py", *names, timeout=900, env=quick_compiler).check()) == 1


def test_loops_next_to_a_job_whose_threads_are_late(mpirun: Any, quick_compiler: dict[str, str]) -> None:
    cases = [
        "crossover_equals_alone",
        "a_rank_that_fails_ends_the_loop_of_the_others",
        "an_inner_loop_that_no_rank_ends",
    ]
    env = {"JAXCROSS_CHAOS": "1", **quick_compiler}
    assert passed(mpirun(2, "loops_table.py", *cases, timeout=900, env=env).check()) == 3
