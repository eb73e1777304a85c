"""Finds the k largest elements of an array by absolute value, without sorting it.

A sparse exchange only sends the k largest elements of each gradient. That saves most of the bytes,
and finding those elements becomes the main cost. For the largest 1% of 25.6 million elements,
`lax.top_k` takes 0.6 s on a CPU core, whereas our threshold search takes less than 0.05 s
(benchmarks/results/exchanges.md). For a small selection from a short vector,
`lax.top_k` is faster.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Selection = Literal["auto", "exact", "threshold"]

# For each backend, the longest vector and the largest k for which `lax.top_k` still wins, as
# measured by `benchmarks/selection.py`. Since the cost of both selections grows with D and k, two
# limits can only give a rough idea of where the curves cross. An H100 sorts 20 elements per
# nanosecond, so on a GPU we always sort. Any other backend is treated like a CPU.
_INT32_MAX = (1 << 31) - 1
_EXACT_UP_TO = {
    "cpu": (1 << 15, 1 << 7),
    "gpu": (_INT32_MAX, _INT32_MAX),
}
# The threshold search starts with a sample of every seventh element, or fewer if that would yield
# more than this many. We have to limit the sample because the search scans it 31 times, once for
# each bit of the threshold.
_SAMPLE = 1 << 15
_STRIDE = 7
_KEY_BITS = 31
_FLOAT_COUNTS = 1 << 24  # float32 counts exactly up to here


def select(x: jax.Array, k: int, *, selection: Selection = "auto") -> tuple[jax.Array, jax.Array]:
    """Returns the values and indices of a vector's `k` largest elements by absolute value.

    `"exact"` sorts, whereas `"threshold"` searches for the k-th largest magnitude without sorting.
    Both return the same elements, but possibly in a different order and with ties broken
    differently. NaN counts as infinity or above. Does not communicate.

    The threshold search is inspired by MSTopK (Shi et al., arXiv 2010.10458), which finds a
    threshold and then collects the elements above it. Unlike MSTopK, whose threshold is
    approximate, we return exactly the k largest elements, in three steps:

    - Sample the vector to estimate a threshold that slightly more than k elements should exceed.
    - Compare all elements with this threshold in one pass over the vector, packing the outcomes
      into bits.
    - Use these bits to locate the elements above the threshold, and search only those for the exact
      threshold.

    If the sample turns out to be misleading and too few or too many elements exceed the threshold,
    we fall back to searching the whole vector for the exact threshold. `"threshold"` never returns
    elements that are 0. If fewer than k elements are nonzero, the remaining slots have index D and
    value 0.

    Args:
        x: A vector of D floats.
        k: How many elements to select; static, 1 to D.
        selection: `"exact"` for `lax.top_k`, `"threshold"` for the search above, or `"auto"` for
            whichever is faster on this backend, given D and k.

    Returns:
        `k` values of x's type and their int32 indices, in no particular order.

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
        # Sort floats and not integers: XLA's fast path on CPUs only supports float32, and integers
        # take a hundred times as long.
        size = jnp.abs(x.astype(jnp.float32))
        _, indices = jax.lax.top_k(jnp.where(jnp.isnan(size), jnp.inf, size), k)
        return x[indices], indices.astype(jnp.int32)
    indices = _threshold_select(x, k)
    return jnp.where(indices < x.size, x.at[indices].get(mode="clip"), 0), indices


def faster_selection(size: int, k: int) -> Selection:
    """Returns the selection that measured faster for `k` of `size` elements."""
    longest, most = _EXACT_UP_TO.get(jax.default_backend(), _EXACT_UP_TO["cpu"])
    return "exact" if size <= longest and k <= most else "threshold"


def check_selection(selection: str) -> None:
    """Raises a ValueError if `selection` is unknown."""
    if selection not in get_args(Selection):
        raise ValueError(
            f"`selection` must be one of {', '.join(map(repr, get_args(Selection)))}, got "
            f"{selection!r}."
        )


def _keys(x: jax.Array) -> jax.Array:
    """Returns integers that sort like the absolute values: 0 for zeros, NaN above infinity."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & jnp.int32(0x7FFFFFFF)


def _threshold_select(x: jax.Array, k: int) -> jax.Array:
    size = x.size
    # A representative sample contains `expected` of the vector's k largest keys. Pick a threshold
    # that a few more sampled keys reach (four standard deviations of that count), which makes it
    # unlikely that fewer than k elements of the whole vector reach it.
    sample = _keys(x[:: sample_stride(size)])
    expected = sample.size * k / size
    rank = min(sample.size, math.ceil(expected + 4 * math.sqrt(expected) + 1))
    capacity = min(size, math.ceil(k * (rank + 5 * math.sqrt(rank)) / expected))
    bracket = jnp.maximum(_kth(sample, rank), 1)
    words = _pack(_keys(x) >= bracket)
    count = jnp.sum(jax.lax.population_count(words), dtype=jnp.int32)

    # Recompute keys wherever they're needed, because storing them all would cost two more passes
    # over memory.
    def near(_: None) -> jax.Array:
        found = _positions(words, size, capacity)
        mine = jnp.where(found < size, _keys(x.at[found].get(mode="clip")), 0)
        slots = _positions(_pack(_exactly(mine, k)), capacity, k)
        return jnp.where(slots < capacity, found.at[slots].get(mode="clip"), size)

    def far(_: None) -> jax.Array:
        return _positions(_pack(_exactly(_keys(x), k)), size, k)

    # The quick search only works if at least k elements reached the threshold (`bracket`). The
    # exception is the minimum threshold of 1, which every nonzero element reaches: if there are
    # fewer than k, then that's simply all of them.
    fits = (count <= capacity) & ((count >= k) | (bracket == 1))
    return jax.lax.cond(fits, near, far, None)


def sample_stride(size: int) -> int:
    """Returns the stride of the threshold search's sample.

    The columns of a weight matrix can differ in scale, so the sample should cover all of them. A
    stride that shares a factor with the row length would skip some columns. Since nearly all row
    lengths are products of 2, 3 and 5, we choose a stride that's coprime to these.
    """
    return next(
        n for n in itertools.count(max(_STRIDE, -(-size // _SAMPLE))) if math.gcd(n, 30) == 1
    )


def _kth(keys: jax.Array, k: int) -> jax.Array:
    """Finds the k-th largest key bit by bit, starting from the highest bit.

    Equivalently, that's the largest number that at least `k` keys reach or exceed.
    """

    def bit(i: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | jnp.left_shift(jnp.int32(1), _KEY_BITS - 1 - i)
        return jnp.where(_reaching(keys, tried) >= k, tried, found)

    # A zero that varies across ranks, for `shard_map` with `check_vma`.
    return jax.lax.fori_loop(0, _KEY_BITS, bit, keys[0] & 0)


def _reaching(keys: jax.Array, key: jax.Array) -> jax.Array:
    """Counts the keys that are at least `key`.

    Sums floats, which XLA's CPU backend vectorises, whereas it adds up integers one by one.
    """
    parts = (keys[start : start + _FLOAT_COUNTS] for start in range(0, keys.size, _FLOAT_COUNTS))
    return sum(
        (jnp.sum((part >= key).astype(jnp.float32)).astype(jnp.int32) for part in parts),
        jnp.int32(0),
    )


def _exactly(keys: jax.Array, k: int) -> jax.Array:
    """Returns a mask of the `k` largest nonzero keys. Earlier keys win ties at the threshold."""
    kth = jnp.maximum(_kth(keys, k), 1)
    above = keys > kth
    equal = keys == kth
    room = k - jnp.sum(above, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room))


def _pack(mask: jax.Array) -> jax.Array:
    """Packs a mask into 32-bit words.

    The first 32 W elements are packed into W words, and any leftover elements into one more word.
    Bit b of word w is element b W + w, so the bits of a word come from elements that are W apart.
    In return, neighbouring words hold neighbouring elements, which lets the CPU compute several
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
    """Returns the positions of the first `slots` set bits among `size` packed bits.

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
    # The grid's set bits fill the slots of the result column by column. To find each slot's column,
    # have every column write its number to the first slot it fills, and let a running maximum
    # spread it to the rest.
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
