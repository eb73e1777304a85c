"""Evaluations of real steps over MPI, in a run that fails in an evaluation and is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_a_resumed_job_stops_early_in_the_same_bits(
    mpirun: Any, tmp_path: Path, quick_compiler: dict[str, str]
) -> None:
    done = mpirun(2, "evaluations_table.py", str(tmp_path / "c"), env=quick_compiler).check()
    assert done.stdout.count("passed on rank") == 2
