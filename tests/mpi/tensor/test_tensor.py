"""Tensor parallelism over MPI. One `mpirun` on four ranks and one on eight train a model on every
mesh of that size.
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
