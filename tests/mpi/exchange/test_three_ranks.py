"""The table of exchanges on three ranks, which are no power of two: a ring as users compile it, and
what is refused.
"""

from typing import Any

import pytest


@pytest.mark.integration
def test_a_ring_at_full_optimisation_and_what_is_refused(mpirun: Any) -> None:
    """Sums of 16 bits, under every policy. Worlds that an exchange cannot serve are refused on
    every rank.

    tests/cpu/exchange/test_table.py has all rows on ranks of one process, and `-m exhaustive` has
    them over MPI.
    """
    done = mpirun(
        3, "exchanges.py", "mean, ring, bfloat16", timeout=900, env={"XLA_FLAGS": ""}
    ).check()
    for rank in range(3):
        assert f"rank {rank}: exchanges done" in done.stdout, done.stdout + done.stderr
        assert f"rank {rank}: 9 refused" in done.stdout, done.stdout + done.stderr
