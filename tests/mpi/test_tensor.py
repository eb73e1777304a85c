"""Tensor parallelism over MPI: one `mpirun` on four ranks trains the table's model on meshes of four."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE = os.pathsep.join([str(ROOT / "tests" / "cpu"), str(ROOT)])


@pytest.mark.parametrize(
    "names",
    [("[2,2,1]",), pytest.param((), marks=pytest.mark.exhaustive)],
    ids=["a grid", "all"],
)
def test_meshes_of_four_equal_vmap_and_crossover_equals_solo(
    mpirun: Any, quick_compiler: dict[str, str], names: tuple[str, ...]
) -> None:
    done = mpirun(4, "tensor_table.py", *names, timeout=540, env={"PYTHONPATH": TABLE, **quick_compiler}).check()
    for rank in range(4):
        assert f"rank {rank}: tensor done" in done.stdout, done.stdout + done.stderr
