"""Gradient accumulation over MPI: counts what twelve steps exchange."""

from typing import Any

import pytest

pytestmark = pytest.mark.integration


def test_accumulate_exchanges_3_times_in_12_steps(
    mpirun: Any, quick_compiler: dict[str, str]
) -> None:
    """`optax.MultiSteps`, and a mean before accumulating, exchange twelve times.

    All ways, and `top_k`, match `vmap`.
    """
    done = mpirun(2, "accumulate.py", env=quick_compiler).check()
    assert done.stdout.count("accumulated") == 2
