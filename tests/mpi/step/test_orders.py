"""Ranks that trace exchanges of equal shape in different orders."""

import pytest


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_exchanges_in_different_orders(mpirun, ranks, quick_compiler):
    finished = mpirun(
        ranks, "orders.py", timeout=900, env=quick_compiler if ranks == 2 else {}
    ).check()
    for rank in range(ranks):
        assert f"rank {rank}: orders done" in finished.stdout
