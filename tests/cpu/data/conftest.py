"""Fixtures for the data cache tests: a small data set, uncached batches, caches in one folder."""

import pytest

from jaxcross.data import train_batches
from tests.support.data_caches import STREAM, caches_in, digests, write_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def plain(folder):
    """Digests of 20 batches read without a cache."""
    return digests(train_batches(folder, steps=20, **STREAM))


@pytest.fixture
def open_cache(tmp_path):
    with caches_in(tmp_path) as call:
        yield call
