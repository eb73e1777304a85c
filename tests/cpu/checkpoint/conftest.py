"""Fixtures for the checkpoint tests: a folder of complete checkpoints, and a run without any."""

import pytest

from tests.support.checkpoint_jobs import train


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of two jobs after steps 3, 6 and 8, by 2 ranks with rank-local leaves."""
    folder = tmp_path_factory.mktemp("saved")
    train(2, folder, own=True, steps=8, keep=3)
    return folder


@pytest.fixture(scope="module")
def whole():
    return train(2, None, own=True)
