"""The table of exchanges over MPI. One `mpirun` per world size runs every row."""

from __future__ import annotations

from typing import Any

import pytest


def check(mpirun: Any, ranks: int, *names: str, env: dict[str, str]) -> None:
    done = mpirun(ranks, "exchanges.py", *names, timeout=3600, env=env).check()
    for rank in range(ranks):
        assert f"rank {rank}: exchanges done" in done.stdout, done.stdout + done.stderr


@pytest.mark.integration
def test_two_strategies_alone_and_in_one_crossover(
    mpirun: Any, quick_compiler: dict[str, str]
) -> None:
    """One strategy with dependent exchanges, and one whose steps don't all exchange."""
    check(mpirun, 2, "power_sgd", "local_sgd", env=quick_compiler)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_exchanges_equal_vmap_formulas_and_solo(
    mpirun: Any, ranks: int, quick_compiler: dict[str, str]
) -> None:
    check(mpirun, ranks, env=quick_compiler)


@pytest.mark.exhaustive
def test_all_at_full_optimisation(mpirun: Any) -> None:
    """As users run it: XLA fuses and contracts, so different programs may round differently."""
    check(mpirun, 3, env={"XLA_FLAGS": ""})
