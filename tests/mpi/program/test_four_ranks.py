"""What two ranks can't show: two axes of size two, and groups of two, with and without loops of
different lengths.
"""

from typing import Any

import pytest


@pytest.mark.integration
def test_axes_and_groups_of_two_equal_vmap(mpirun: Any, quick_compiler: dict[str, str]) -> None:
    done = mpirun(4, "four_ranks.py", "two axes", "groups", timeout=900, env=quick_compiler).check()
    assert sorted(line for line in done.stdout.splitlines() if line.endswith("zoo done")) == [
        f"rank {rank}: zoo done" for rank in range(4)
    ]
    assert done.stdout.count("passed rows") == 1, done.stdout
