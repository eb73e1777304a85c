"""Steps that call mpi4jax: each call as under `jit`, alone and in jobs, and wrong calls."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.optional import NEEDS_MPI4JAX

pytestmark = NEEDS_MPI4JAX


@pytest.mark.integration
@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4))]
)
def test_every_call_alone_is_as_under_jit(
    mpirun: Any, quick_compiler: dict[str, str], ranks: int
) -> None:
    done = mpirun(ranks, "mpi4jax_table.py", "alone", env=quick_compiler).check()
    assert done.stdout.count("alone done") == ranks, done.stdout + done.stderr


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_call_in_jobs_is_as_alone(
    mpirun: Any, quick_compiler: dict[str, str], ranks: int
) -> None:
    """In chaos mode, alongside a job that exchanges over named axes."""
    env = {**quick_compiler, "JAXCROSS_CHAOS": "1"}
    done = mpirun(ranks, "mpi4jax_table.py", "jobs", env=env, timeout=900).check()
    assert done.stdout.count("jobs done") == ranks, done.stdout + done.stderr


FAULTS = {
    2: (
        "a_shorter_message",
        "eager_calls_in_another_job",
        "communicators_that_look_alike",
        "batches_of_other_shapes",
        "values_that_are_not_finite",
        "numbers_that_mpi_does_not_have",
        "a_shorter_batch_where_calls_differ",
    ),
    3: ("a_rank_without_calls", "conditionals_of_both_kinds"),
    4: ("opposite_orders", "groups_with_steps_of_their_own", "a_chain_through_all_ranks"),
}


def check_faults(mpirun: Any, env: dict[str, str], ranks: int, *names: str) -> None:
    done = mpirun(ranks, "mpi4jax_faults.py", *names, timeout=900, env=env).check()
    assert [done.stdout.count(f"{name} done") for name in names] == [ranks] * len(names), (
        done.stdout + done.stderr
    )


def test_a_rank_that_fails_makes_its_calls(mpirun: Any, quick_compiler: dict[str, str]) -> None:
    check_faults(mpirun, quick_compiler, 3, "a_rank_fails_before_its_calls")


@pytest.mark.integration
@pytest.mark.parametrize("ranks", FAULTS)
def test_faults(mpirun: Any, quick_compiler: dict[str, str], ranks: int) -> None:
    """Cases run in turn on the same ranks, so a failure must not affect the next run."""
    check_faults(mpirun, quick_compiler, ranks, *FAULTS[ranks])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_its_own_tests_pass(mpirun: Any, ranks: int) -> None:
    """Needs a folder of mpi4jax's source in `MPI4JAX_SOURCE`."""
    source = os.environ.get("MPI4JAX_SOURCE")
    if source is None:
        pytest.skip("MPI4JAX_SOURCE is not set")
    done = mpirun(ranks, "mpi4jax_suite.py", source, timeout=900).check()
    assert done.stdout.count("suite passed") == ranks, done.stdout + done.stderr
