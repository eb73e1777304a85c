"""Conditionals with exchanges whose branch differs between ranks."""

import pytest


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_all_ranks_are_told(mpirun, ranks, quick_compiler):
    finished = mpirun(ranks, "decisions.py", timeout=900, env=quick_compiler).check()
    for rank in range(ranks):
        assert f"rank {rank}: decisions done" in finished.stdout
