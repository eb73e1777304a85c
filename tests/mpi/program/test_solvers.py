"""Solvers whose operator exchanges, over MPI."""

from typing import Any

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_solvers_that_exchange_equal_vmap(mpirun: Any, ranks: int, quick_compiler: dict[str, str]) -> None:
    done = mpirun(ranks, "solvers_table.py", env=quick_compiler if ranks == 2 else {}).check()
    assert done.stdout.count("solved") == ranks
