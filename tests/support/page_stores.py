"""One level of the data cache and its records' bytes, for tests and their child processes."""

import numpy as np

from jaxcross.data.cache.next_use import PAGE_BYTES
from jaxcross.data.cache.page_store import PageStore

BUDGET = 40 * PAGE_BYTES
RECORDS = 64


def by_number(numbers):
    return np.asarray(numbers, np.int64)


def open_store(folder, budget=BUDGET, distances=by_number, records=RECORDS, several=lambda: True):
    store = PageStore(
        folder, name="disk", budget_bytes=budget, distances=distances, several_streams=several
    )
    store.grow(records)
    return store


def content(number, pages=3):
    return np.random.default_rng(number).bytes(int(pages * PAGE_BYTES) - number - 1)
