"""Fixtures of the tests of checkpoints: a folder of whole checkpoints, and the run without any."""

import pytest

from tests.support.checkpoint_jobs import train


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two jobs' checkpoints after steps 3, 6 and 8, of 2 ranks that each had leaves of its own."""
    folder = tmp_path_factory.mktemp("saved")
    train(2, folder, own=True, steps=8, keep=3)
    return folder


@pytest.fixture(scope="module")
def whole():
    return train(2, None, own=True)
