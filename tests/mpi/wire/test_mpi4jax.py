"""Steps that call mpi4jax: each call as under `jit`, alone and in jobs, and errors where calls do not fit together."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_call_alone_is_as_under_jit(mpirun: Any, quick_compiler: dict[str, str], ranks: int) -> None:
    done = mpirun(ranks, "mpi4jax_table.py", "alone", env=quick_compiler).check()
    assert done.stdout.count("alone done") == ranks, done.stdout + done.stderr


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_call_in_jobs_is_as_alone(mpirun: Any, quick_compiler: dict[str, str], ranks: int) -> None:
    """In chaos mode, next to a job of named axes."""
    env = {**quick_compiler, "JAXCROSS_CHAOS": "1"}
    done = mpirun(ranks, "mpi4jax_table.py", "jobs", env=env, timeout=900).check()
    assert done.stdout.count("jobs done") == ranks, done.stdout + done.stderr


@pytest.mark.mostly_integration("3-a_rank_fails_before_its_calls")
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (4, "opposite_orders"),
        (2, "a_shorter_message"),
        (3, "a_rank_fails_before_its_calls"),
        (3, "a_rank_without_calls"),
        (2, "eager_calls_in_another_job"),
        (2, "communicators_that_look_alike"),
        (2, "batches_of_other_shapes"),
        (2, "values_that_are_not_finite"),
        (2, "numbers_that_mpi_does_not_have"),
        (3, "conditionals_of_both_kinds"),
        (2, "a_shorter_batch_where_calls_differ"),
        (4, "groups_with_steps_of_their_own"),
        (4, "a_chain_through_all_ranks"),
    ],
)
def test_faults(mpirun: Any, quick_compiler: dict[str, str], ranks: int, case: str) -> None:
    done = mpirun(ranks, "mpi4jax_faults.py", case, env=quick_compiler).check()
    assert done.stdout.count("case done") == ranks, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_its_own_tests_pass(mpirun: Any, ranks: int) -> None:
    """With a folder of mpi4jax's source in `MPI4JAX_SOURCE`."""
    source = os.environ.get("MPI4JAX_SOURCE")
    if source is None:
        pytest.skip("MPI4JAX_SOURCE is not set")
    done = mpirun(ranks, "mpi4jax_suite.py", source, timeout=900).check()
    assert done.stdout.count("suite passed") == ranks, done.stdout + done.stderr
