"""Measures loss over time on a real link, at toy size. The losses match training under `vmap`."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import convergence
from strategies import STRATEGIES, one_axis


@pytest.mark.integration
@pytest.mark.usefixtures("compiled_quickly", "lab")
def test_losses_over_a_link_are_those_under_vmap(smoke):
    (row,) = smoke("link_loss.py", "--task", "images", "--only", "mean")["rows"]
    made = convergence.plan("images", 2, 1, smoke=True)
    mean = next(s for s in STRATEGIES if s.name == "mean")
    expected = convergence.train(
        made,
        mean.make(made.setting),
        mean.model,
        axes=one_axis(2),
        steps=made.steps,
        every=made.every,
    )
    np.testing.assert_allclose(row["test_loss"], expected["test_loss"], atol=2e-4)
    assert row["seconds"][0] == sorted(row["seconds"][0])
