"""Exchanges on three ranks, which isn't a power of two: those that work, and those that are
refused.

One ring is compiled with the same options that users have.
"""

from typing import Any

import pytest


@pytest.mark.integration
def test_a_ring_at_full_optimisation_and_what_is_refused(mpirun: Any) -> None:
    """16-bit sums under every policy. Every rank refuses an exchange that this world can't run.

    tests/cpu/exchange/test_table.py runs all rows on ranks in one process, and `-m exhaustive` runs
    them over MPI.
    """
    done = mpirun(
        3, "exchanges.py", "mean, ring, bfloat16", timeout=900, env={"XLA_FLAGS": ""}
    ).check()
    for rank in range(3):
        assert f"rank {rank}: exchanges done" in done.stdout, done.stdout + done.stderr
        assert f"rank {rank}: 9 refused" in done.stdout, done.stdout + done.stderr
