"""The k largest elements of an array by absolute value, without sorting it.

A sparse exchange sends only the k largest elements of each gradient. That saves most of the bytes,
so finding these elements becomes the main cost. To find the largest 1% of 25.6 million elements,
`lax.top_k` takes 0.6 s on a CPU core, while our search for a threshold takes less than 0.05 s
(benchmarks/results/exchanges.md). `lax.top_k` is faster if the vector is short and few elements are
selected.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Selection = Literal["auto", "exact", "threshold"]

# For each backend, the longest vector and the largest k for which `lax.top_k` is still the faster
# selection, as measured by `benchmarks/selection.py`. The times of both selections grow with D and
# k, so two limits can only say roughly where the curves cross. An H100 sorts 20 elements per
# nanosecond, so on a GPU we always sort. All other backends are treated like a CPU.
_INT32_MAX = (1 << 31) - 1
_EXACT_UP_TO = {
    "cpu": (1 << 15, 1 << 7),
    "gpu": (_INT32_MAX, _INT32_MAX),
}
# The threshold search starts with a sample of the vector: every seventh element, or fewer if that
# would be more than this many elements in total. A limit is needed because the search goes through
# the sample 31 times, once for each bit of the threshold.
_SAMPLE = 1 << 15
_STRIDE = 7
_KEY_BITS = 31
_FLOAT_COUNTS = 1 << 24  # float32 counts exactly up to here


def select(x: jax.Array, k: int, *, selection: Selection = "auto") -> tuple[jax.Array, jax.Array]:
    """Returns values and indices of a vector's `k` largest elements by absolute value.

    There are two selections: `"exact"` sorts, and `"threshold"` searches for the k-th largest
    magnitude without sorting. Both return the same elements, except that they may break ties
    differently and use a different order. NaN counts as infinity or above. Does not communicate.

    The threshold search takes its idea from MSTopK (Shi et al., arXiv 2010.10458): find a
    threshold, then collect the elements above it. But while MSTopK's threshold is approximate, we
    return exactly the k largest elements, in three steps:

    - From a sample of the vector, estimate a threshold that slightly more than k elements should
      exceed.
    - In one pass over the vector, compare all elements with this threshold, and pack the outcomes
      into bits.
    - Use these bits to locate the elements above the threshold, and search for the exact threshold
      among them only.

    If the sample was misleading, so that too few or too many elements exceed the threshold, we
    search for the exact threshold in the whole vector instead. The `"threshold"` selection never
    returns elements that are 0. If fewer than k elements aren't 0, the remaining slots have index D
    and value 0.

    Args:
        x: A vector of D floats.
        k: How many to select; static, 1 to D.
        selection: `"exact"`: `lax.top_k`. `"threshold"`: as above. `"auto"`: the faster of the two
            for this backend, D and k.

    Returns:
        `k` values of x's type, and their int32 indices, in unspecified order.

    Raises:
        ValueError: The vector has 2^31 elements or more.
    """
    if x.size > _INT32_MAX:
        raise ValueError(
            f"the {k} largest of {x.size} elements cannot be selected, because there are too "
            "many for int32 indices. If you use `bucket`, leave it out, so that each leaf is "
            "handled by itself. If a single leaf is so large, exclude it by `skip`."
        )
    if selection == "auto":
        selection = faster_selection(x.size, k)
    if selection == "exact":
        # Sort floats rather than integers: on a CPU, XLA's fast path only supports float32, and
        # integers take a hundred times as long.
        size = jnp.abs(x.astype(jnp.float32))
        _, indices = jax.lax.top_k(jnp.where(jnp.isnan(size), jnp.inf, size), k)
        return x[indices], indices.astype(jnp.int32)
    indices = _threshold_select(x, k)
    return jnp.where(indices < x.size, x.at[indices].get(mode="clip"), 0), indices


def faster_selection(size: int, k: int) -> Selection:
    """Returns the selection that was measured to be faster for `k` of `size` elements."""
    longest, most = _EXACT_UP_TO.get(jax.default_backend(), _EXACT_UP_TO["cpu"])
    return "exact" if size <= longest and k <= most else "threshold"


def check_selection(selection: str) -> None:
    """Raises a ValueError if `selection` is unknown."""
    if selection not in get_args(Selection):
        raise ValueError(
            f"`selection` is {selection!r}: choose one of "
            f"{', '.join(map(repr, get_args(Selection)))}."
        )


def _keys(x: jax.Array) -> jax.Array:
    """Returns integers ordered like the absolute values: 0 for zeros, NaN above infinity."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & jnp.int32(0x7FFFFFFF)


def _threshold_select(x: jax.Array, k: int) -> jax.Array:
    size = x.size
    # If the sample is representative, it contains `expected` of the vector's k largest keys. We
    # choose a threshold that a few more keys of the sample reach, four standard deviations of that
    # count. That makes it unlikely that fewer than k elements of the whole vector reach it.
    sample = _keys(x[:: sample_stride(size)])
    expected = sample.size * k / size
    rank = min(sample.size, math.ceil(expected + 4 * math.sqrt(expected) + 1))
    capacity = min(size, math.ceil(k * (rank + 5 * math.sqrt(rank)) / expected))
    bracket = jnp.maximum(_kth(sample, rank), 1)
    words = _pack(_keys(x) >= bracket)
    count = jnp.sum(jax.lax.population_count(words), dtype=jnp.int32)

    # We recompute keys wherever we need them, because an array of all keys would cost two more
    # passes over memory.
    def near(_: None) -> jax.Array:
        found = _positions(words, size, capacity)
        mine = jnp.where(found < size, _keys(x.at[found].get(mode="clip")), 0)
        slots = _positions(_pack(_exactly(mine, k)), capacity, k)
        return jnp.where(slots < capacity, found.at[slots].get(mode="clip"), size)

    def far(_: None) -> jax.Array:
        return _positions(_pack(_exactly(_keys(x), k)), size, k)

    # The quick search only works if at least k elements have reached the threshold (`bracket`). The
    # exception is a threshold at its minimum of 1: every nonzero element reaches that, so even if
    # they're fewer than k, there are no others.
    fits = (count <= capacity) & ((count >= k) | (bracket == 1))
    return jax.lax.cond(fits, near, far, None)


def sample_stride(size: int) -> int:
    """Returns the distance between the elements of the threshold search's sample.

    The columns of a weight matrix may differ in scale, so the sample should contain elements of all
    columns. It would miss some columns if the stride had a factor in common with the length of a
    row. Nearly all row lengths are products of 2, 3 and 5, so we choose a stride that none of these
    divides.
    """
    return next(
        n for n in itertools.count(max(_STRIDE, -(-size // _SAMPLE))) if math.gcd(n, 30) == 1
    )


def _kth(keys: jax.Array, k: int) -> jax.Array:
    """Returns the k-th largest key, found bit by bit from the highest bit.

    That's the same as the largest number that at least `k` keys reach or exceed.
    """

    def bit(i: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | jnp.left_shift(jnp.int32(1), _KEY_BITS - 1 - i)
        return jnp.where(_reaching(keys, tried) >= k, tried, found)

    # A zero that varies over ranks, for `shard_map` with `check_vma`.
    return jax.lax.fori_loop(0, _KEY_BITS, bit, keys[0] & 0)


def _reaching(keys: jax.Array, key: jax.Array) -> jax.Array:
    """Counts the keys that are at least `key`.

    Sums as floats, because XLA's CPU backend vectorises that sum, but adds integers one by one.
    """
    parts = (keys[start : start + _FLOAT_COUNTS] for start in range(0, keys.size, _FLOAT_COUNTS))
    return sum(
        (jnp.sum((part >= key).astype(jnp.float32)).astype(jnp.int32) for part in parts),
        jnp.int32(0),
    )


def _exactly(keys: jax.Array, k: int) -> jax.Array:
    """Returns a mask of the `k` largest nonzero keys; the first ones win ties at the threshold."""
    kth = jnp.maximum(_kth(keys, k), 1)
    above = keys > kth
    equal = keys == kth
    room = k - jnp.sum(above, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room))


def _pack(mask: jax.Array) -> jax.Array:
    """Packs a mask into 32-bit words.

    The first 32 W elements go into W words, and the remaining ones into an additional last word.
    Bit b of word w is element b W + w, so the bits of one word come from elements that lie W apart.
    In return, neighbouring words come from neighbouring elements, so the CPU can compute several
    words at once in its vector registers.
    """
    per_bit = mask.size // 32
    words = jnp.zeros(per_bit, jnp.uint32)
    for b in range(32):
        words |= mask[b * per_bit : (b + 1) * per_bit].astype(jnp.uint32) << b
    rest = mask[32 * per_bit :]
    last = jnp.sum(
        rest.astype(jnp.uint32) << jnp.arange(rest.size, dtype=jnp.uint32), dtype=jnp.uint32
    )
    return jnp.append(words, last)


def _positions(words: jax.Array, size: int, slots: int) -> jax.Array:
    """Returns the first `slots` positions that are set among `size` packed ones.

    Unused slots hold `size`.
    """
    per_bit = size // 32
    columns = -(-words.size // 32)
    grid = jnp.pad(words, (0, 32 * columns - words.size)).reshape(
        32, columns
    )  # row r of column c: word r columns + c
    until = jnp.cumsum(jax.lax.population_count(grid).astype(jnp.int32), axis=0)
    ends = jnp.cumsum(until[-1])
    slot = jnp.arange(slots, dtype=jnp.int32)
    # The set bits of the grid fill the slots of the result, column by column. To find each slot's
    # column, every column writes its number to the first slot that it fills, and a running maximum
    # copies the number to its other slots.
    marks = (
        jnp.zeros(slots, jnp.int32)
        .at[ends[:-1]]
        .max(jnp.arange(1, columns, dtype=jnp.int32), mode="drop")
    )
    column = jax.lax.cummax(marks)
    left = slot - jnp.where(column > 0, ends[column - 1], 0)
    row = jnp.zeros_like(slot)
    for step in (16, 8, 4, 2, 1):  # the first row whose running count exceeds what is left
        row = jnp.where(until[row + step - 1, column] <= left, row + step, row)
    left -= jnp.where(row > 0, until[row - 1, column], 0)
    row = jnp.minimum(row, 31)
    bits = grid[row, column]
    bit = jnp.zeros_like(slot)
    for step in (16, 8, 4, 2, 1):  # the set bit that has `left` set bits below it
        below = jax.lax.population_count(bits & jnp.uint32((1 << step) - 1)).astype(jnp.int32)
        skip = below <= left
        left = jnp.where(skip, left - below, left)
        bits = jnp.where(skip, bits >> step, bits)
        bit = jnp.where(skip, bit + step, bit)
    word = row * columns + column
    element = jnp.where(word < per_bit, bit * per_bit + word, 32 * per_bit + bit)
    return jnp.where(slot < ends[-1], element, size)
