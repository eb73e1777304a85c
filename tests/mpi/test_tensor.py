"""Tensor parallelism over MPI: one `mpirun` on four ranks trains the table's model on every mesh of four."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLE = os.pathsep.join([str(ROOT / "tests" / "cpu"), str(ROOT)])


@pytest.mark.exhaustive  # the usual run has examples/gpt.py on two ranks
def test_every_mesh_of_four_equals_vmap_and_crossover_equals_solo(mpirun: Any, quick_compiler: dict[str, str]) -> None:
    done = mpirun(4, "tensor_table.py", timeout=540, env={"PYTHONPATH": TABLE, **quick_compiler}).check()
    for rank in range(4):
        assert f"rank {rank}: tensor done" in done.stdout, done.stdout + done.stderr
