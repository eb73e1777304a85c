"""The table of exchanges over MPI: one `mpirun` a world size runs every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TABLE = str(Path(__file__).parent.parent / "cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_exchanges_equal_vmap_and_their_formulas_and_crossover_is_solo(
    mpirun: Any, ranks: int, quick_compiler: dict[str, str]
) -> None:
    done = mpirun(ranks, "exchanges.py", timeout=540, env={"PYTHONPATH": TABLE, **quick_compiler}).check()
    for rank in range(ranks):
        assert f"rank {rank}: exchanges done" in done.stdout, done.stdout + done.stderr
