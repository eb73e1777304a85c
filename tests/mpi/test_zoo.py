"""The zoo over MPI: one `mpirun` a world size runs every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ZOO = str(Path(__file__).parent.parent / "cpu")


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 3, 4))])
def test_zoo_equals_vmap_and_one_fused_executable(mpirun: Any, ranks: int, quick_compiler: dict[str, str]) -> None:
    # Compiling is nearly all of the time. Two ranks see what users get; more of them, other exchanges of those steps.
    env = {"PYTHONPATH": ZOO, **(quick_compiler if ranks != 2 else {})}
    done = mpirun(ranks, "zoo_table.py", timeout=540, env=env).check()
    for rank in range(ranks):
        assert f"rank {rank}: zoo done" in done.stdout, done.stdout + done.stderr


def test_mpi4jax_steps_are_cut_in_the_order_they_are_written(mpirun: Any) -> None:
    """Point-to-point calls that differ by rank keep their order, whatever depends on what."""
    done = mpirun(2, "zoo_mpi4jax.py", timeout=120).check()
    assert done.stdout.count("mpi4jax done") == 2, done.stdout + done.stderr
