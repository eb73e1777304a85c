"""Solvers whose operator exchanges, over MPI."""

from typing import Any

import pytest

pytestmark = pytest.mark.integration


# Three rows: by `vjp` and a solve, by `custom_linear_solve` alone, and with a rank-dependent number
# of iterations. tests/cpu/program/test_solver.py has all rows.
QUICK = ("natural gradient", "by hand", "iterations by rank")
ALL = [
    pytest.param(ranks, (), marks=pytest.mark.exhaustive, id=f"all on {ranks}") for ranks in (2, 3)
]


@pytest.mark.parametrize(("ranks", "names"), [pytest.param(2, QUICK, id="few"), *ALL])
def test_solvers_that_exchange_equal_vmap(
    mpirun: Any, ranks: int, names: tuple[str, ...], quick_compiler: dict[str, str]
) -> None:
    done = mpirun(
        ranks, "solvers_table.py", *names, timeout=900, env=quick_compiler if ranks == 2 else {}
    ).check()
    assert done.stdout.count("solved") == ranks
