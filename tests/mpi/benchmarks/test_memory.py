"""benchmarks/memory_booked.py at a quarter of its size: jobs book what they need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from jaxcross.jobs.memory import PROCESS_BYTES

pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def memory_booked() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield import_module("memory_booked")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(("jobs", "cut"), [(1, "whole"), (2, "whole"), (2, 4)])
def test_jobs_book_what_they_need(memory_booked: ModuleType, jobs: int, cut: str | int) -> None:
    row = memory_booked.measure("mlp_2048", jobs, cut)
    assert row["needed_bytes"] > 100_000_000
    assert row["booked_bytes"] >= 0.98 * row["needed_bytes"]
    # Over mpi4py, jobs also book a second set of receive buffers, but these runs use only some.
    second = jobs * row["gradient_bytes"] if row["over"] == "mpi4py" else 0
    # `PROCESS_BYTES` is what we book for the process itself. It doesn't matter for the large arrays
    # of the benchmark, but it would dominate the small arrays of this test, so we subtract it.
    assert row["booked_bytes"] - PROCESS_BYTES <= 1.15 * (row["needed_bytes"] + second)
