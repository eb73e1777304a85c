"""Trains models with tensor parallelism over MPI.

A single `mpirun` covers all meshes of four ranks, and another one all meshes of eight ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.exhaustive  # the usual run has examples/gpt.py on two ranks
@pytest.mark.parametrize("ranks", [4, 8])
def test_meshes_equal_serial_model_and_solo(
    mpirun: Any, quick_compiler: dict[str, str], ranks: int
) -> None:
    done = mpirun(ranks, "tensor_table.py", timeout=900, env=quick_compiler).check()
    for rank in range(ranks):
        assert f"rank {rank}: tensor done" in done.stdout, done.stdout + done.stderr
