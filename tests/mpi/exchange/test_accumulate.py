"""Gradient accumulation over MPI: what is exchanged in twelve steps, counted."""

from typing import Any

import pytest

pytestmark = pytest.mark.integration


def test_accumulate_exchanges_3_times_in_12_steps(
    mpirun: Any, quick_compiler: dict[str, str]
) -> None:
    """`optax.MultiSteps`, and a mean in front, twelve times; all of them, and `top_k`, equal
    `vmap`.
    """
    done = mpirun(2, "accumulate.py", env=quick_compiler).check()
    assert done.stdout.count("accumulated") == 2
