"""The zoo over MPI. One `mpirun` per world size runs the rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.optional import NEEDS_MPI4JAX

# A network, branches, and objects changed by a step. tests/cpu/program/test_zoo.py has all rows.
QUICK = ("linen pmap-style", "cond by data", "nnx in place")


def check(mpirun: Any, ranks: int, *names: str, env: dict[str, str]) -> None:
    done = mpirun(ranks, "zoo_table.py", *names, timeout=900, env=env).check()
    for rank in range(ranks):
        assert f"rank {rank}: zoo done" in done.stdout, done.stdout + done.stderr


@pytest.mark.integration
def test_rows_equal_vmap_and_one_fused_executable(
    mpirun: Any, quick_compiler: dict[str, str]
) -> None:
    check(mpirun, 2, *QUICK, env=quick_compiler)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_zoo_equals_vmap_and_one_fused_executable(
    mpirun: Any, ranks: int, quick_compiler: dict[str, str]
) -> None:
    # Nearly all of the time is spent on compiling, so only the case with two ranks uses the
    # compiler's default options, as users do. The other cases run the same steps and differ only in
    # their exchanges, so they compile with fewer optimisations.
    check(mpirun, ranks, env=quick_compiler if ranks != 2 else {})


@NEEDS_MPI4JAX
@pytest.mark.integration
def test_mpi4jax_steps_are_cut_in_program_order(mpirun: Any) -> None:
    """Point-to-point calls that differ by rank keep their order, whatever the data dependencies."""
    done = mpirun(2, "zoo_mpi4jax.py").check()
    assert done.stdout.count("mpi4jax done") == 2, done.stdout + done.stderr
