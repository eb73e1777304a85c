"""Ranks that would cut one step differently, because of their devices or their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_cuts_that_differ(
    mpirun: Callable[..., Any], quick_compiler: dict[str, str], ranks: int
) -> None:
    done = mpirun(ranks, "cuts.py", env=quick_compiler).check()
    assert done.stdout.count("cuts done") == ranks
