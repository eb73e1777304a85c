"""Which records a level keeps: against the optimum, brute force, and its limit of pages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross.data.cache.next_use import (
    NEVER,
    PAGE_BYTES,
    NextUse,
    Room,
    groups,
    pages_of,
    simulate,
)
from tests.support.examples import scaled

quick = settings(max_examples=scaled(60), deadline=None)


def passes(seed, records, length):
    """Returns a stream of `length` of the records, in a different random order each pass."""
    return lambda epoch: np.random.default_rng((seed, epoch)).permutation(records)[:length]


def optimal_hits(sequence, capacity):
    """Belady's algorithm for one-page records, extended so that a new record may be rejected."""
    following, last = [], {}
    for place in range(len(sequence) - 1, -1, -1):
        following.append(last.get(sequence[place], NEVER))
        last[sequence[place]] = place
    following.reverse()
    resident: dict[int, int] = {}
    hits = 0
    for place, record in enumerate(sequence):
        hits += record in resident
        resident[record] = following[place]
        if len(resident) > capacity:
            del resident[max(resident, key=lambda each: resident[each])]
    return hits


@quick
@given(st.integers(0, 99), st.integers(2, 40), st.integers(1, 45), st.integers(1, 5))
def test_hits_of_small_levels_are_optimal(seed, records, capacity, epochs):
    """With fewer than 64 records, this is Belady's algorithm.

    A level then considers every new record and drops one record at a time.
    """
    order = passes(seed, records, records)
    sizes = np.full(records, PAGE_BYTES)
    found = simulate([order], sizes, [capacity * PAGE_BYTES], length=records, epochs=epochs)
    sequence = [int(record) for epoch in range(epochs) for record in order(epoch)]
    assert sum(sum(tally.hits) for tally in found) == optimal_hits(sequence, capacity)


@quick
@given(st.integers(0, 99), st.integers(100, 400), st.floats(0.1, 0.9), st.integers(1, 3))
def test_hits_of_large_levels_are_near_the_optimum(seed, records, share, streams):
    """A batch is a 64th of a level, and batching loses at most part of that."""
    orders = [passes((seed, stream), records, records) for stream in range(streams)]
    capacity = int(share * records)
    budgets, sizes = [capacity * PAGE_BYTES], np.full(records, PAGE_BYTES)
    found = simulate(orders, sizes, budgets, length=records, epochs=3)
    lru = simulate(orders, sizes, budgets, length=records, epochs=3, policy="lru")
    turns = (
        np.array([[order(e) for order in orders] for e in range(3)])
        .transpose(0, 2, 1)
        .ravel()
        .tolist()
    )
    hits = sum(sum(tally.hits) for tally in found)
    assert 0 <= optimal_hits(turns, capacity) - hits <= 0.05 * len(turns)
    assert hits >= sum(sum(tally.hits) for tally in lru)


@quick
@given(st.integers(0, 99), st.integers(1, 30), st.data())
def test_next_use_is_the_next_use(seed, records, data):
    """Compares with brute force up to the end of the next pass.

    A pass may leave out records, as with several ranks.
    """
    length = data.draw(st.integers(1, records))
    start = data.draw(st.integers(0, 2 * length))
    stop = data.draw(st.integers(start, start + 3 * length))
    order = passes(seed, records, length)
    sequence = [int(record) for epoch in range(stop // length + 3) for record in order(epoch)]
    stream = NextUse(np.empty(records, np.int64), order, length, start, stop)
    for position in range(start, stop):
        assert stream.take(position) == sequence[position]
        known = min(stop, (position // length + 2) * length)
        later = {
            record: at
            for at, record in reversed(list(enumerate(sequence[:known])))
            if at > position
        }
        assert stream.table.tolist() == [later.get(record, NEVER) for record in range(records)]


@quick
@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=60),
    st.data(),
)
def test_victims_make_room_and_are_needed_later(capacity, residents, data):
    numbers = np.arange(len(residents))
    distances = np.array([distance for distance, _ in residents], np.int64)
    pages = np.array([size for _, size in residents], np.int64)
    needed, distance = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 50))
    victims = Room(capacity).victims(needed, distance, lambda: (numbers, distances, pages))
    if victims is not None:
        assert len(set(victims)) == len(victims)
        assert pages[victims].sum() >= needed
        assert distances[victims].min() > distance
        assert distances[victims].min() >= np.delete(distances, victims).max(initial=0)


@quick
@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 20), st.integers(1, 9))
def test_groups_hold_each_position_once(start, more, length, size):
    found = list(groups(start, start + more, length, size))
    assert [position for group in found for position in group] == list(range(start, start + more))
    assert all(len(group) <= size and group[0] // length == group[-1] // length for group in found)


def test_a_set_that_fits_is_read_once():
    orders = [passes(seed, 50, 50) for seed in range(4)]
    found = simulate(orders, np.full(50, 5000), [50 * 2 * PAGE_BYTES], length=50, epochs=3)
    assert [tally.origin for tally in found] == [50, 0, 0]
    assert [tally.hit_share for tally in found] == [0.75, 1, 1]
    assert found[0].origin_bytes == 50 * 5000


def test_copies_replace_nothing_for_one_stream():
    """After a rejection, copies aren't offered for a while, a 64th of the level.

    The pause ends early if a copy is taken or there are several streams.
    """
    room, offers = Room(128), []

    def put(taken):
        return lambda evict_needed: offers.append(evict_needed) or taken

    assert [room.offer_copy(put(False), several_streams=False) for _ in range(7)] == [False] * 7
    assert offers == [False, False, False]  # the first, fourth and seventh
    assert room.offer_copy(put(True), several_streams=True)
    assert offers.pop() is True
    room.offer_copy(put(False), several_streams=False)
    room.offer_copy(put(False), several_streams=False)
    assert room.offer_copy(put(True), several_streams=False) and room.offer_copy(
        put(True), several_streams=False
    )
    assert offers == [False] * 5


@quick
@given(st.integers(0, 99), st.integers(16, 200), st.floats(0.1, 0.3))
def test_a_small_level_gives_its_share_of_hits(seed, records, share):
    """After the first pass, a small level before a complete one has as many hits as records."""
    order, capacity = passes(seed, records, records), int(share * records)
    budgets, sizes = [capacity * PAGE_BYTES, records * PAGE_BYTES], np.full(records, PAGE_BYTES)
    found = simulate([order], sizes, budgets, length=records, epochs=4)
    assert [tally.hits for tally in found[1:]] == [(capacity, records - capacity)] * 3


def test_simulate_refuses_unknown_policies():
    with pytest.raises(ValueError, match="^`policy` must be `next_use` or `lru`, got `fifo`"):
        simulate([passes(0, 4, 4)], np.ones(4), [8192], length=4, epochs=1, policy="fifo")


def test_pages_are_counted_up():
    assert [pages_of(nbytes) for nbytes in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [0, 1, 1, 2]
