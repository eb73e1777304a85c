"""Selecting the largest elements: both methods find the same ones, and the faster one is used."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.exchange import select as selection
from jaxcross.exchange.select import select
from jaxcross.exchange.top_k import top_k
from tests.support.exchange_ranks import normal

pytestmark = pytest.mark.integration


def vectors(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    x = rng.normal(size=size).astype(np.float32)
    return {
        "normal": x,
        "equal": 2 * np.sign(x),
        "mostly zero": np.where(rng.random(size) < 0.999, 0, x).astype(np.float32),
        "zero": np.zeros_like(x),
        "heavy tails": (rng.standard_cauchy(size) ** 3).astype(np.float32),
        "ascending": np.arange(size, dtype=np.float32),
        "NaN and infinity": np.where(
            np.arange(size) == size // 2, np.nan, np.where(x > 2.5, np.inf, x)
        ),
        "what the sample does not see": np.where(
            np.arange(size) % selection.sample_stride(size), x, x / 1e6
        ),
    }


@pytest.mark.parametrize(
    ("size", "k"), [(1, 1), (31, 3), (33, 33), (5000, 50), (5000, 2500), (70001, 70)]
)
def test_a_threshold_selects_what_sorting_does(
    size: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        selection, "_SAMPLE", 512
    )  # makes the sample a part, which misleads where possible
    monkeypatch.setattr(selection, "_FLOAT_COUNTS", 20_000)  # makes it count long vectors in parts
    chosen = jax.jit(functools.partial(select, k=k, selection="threshold"))
    for name, x in vectors(size).items():
        values, indices = map(np.asarray, chosen(x))
        taken = indices < size
        assert taken.sum() == min(k, (x != 0).sum()) == len({*indices[taken]}), name
        np.testing.assert_array_equal(
            values, np.where(taken, x[np.where(taken, indices, 0)], 0), err_msg=name
        )
        order = lambda v: np.sort(np.where(np.isnan(v), np.inf, np.abs(v)))  # noqa: E731
        np.testing.assert_array_equal(order(values), order(x)[size - k :], err_msg=name)
        assert np.isnan(values).sum() == np.isnan(x).sum(), name


@pytest.mark.parametrize(
    "size", [147456, 262144, 589824, 768000, 2048000, 2359296, 4096000, 25600000]
)
def test_the_sample_has_elements_of_all_columns(size: int) -> None:
    """Weights have rows of these lengths, with columns that differ in scale."""
    stride = selection.sample_stride(size)
    assert 8_000 <= size / stride <= selection._SAMPLE
    for columns in (64, 96, 384, 512, 1000, 1536, 4096):
        assert len({n % columns for n in range(0, size, stride)}) == columns


def test_faster_measured_selection_is_used() -> None:
    kept = Path(__file__).parents[3] / "benchmarks" / "results" / "selection.json"
    if not kept.exists():
        pytest.skip("no result is kept")
    # Data that misleads the search are kept to show its worst case; the choice can't be based on
    # that.
    rows = [row for row in json.loads(kept.read_text())["rows"] if row["data"] != "misleading"]
    for row in rows:
        raw = {way: found["s"]["raw"] for way, found in row["ways"].items()}
        taken = raw.pop(selection.faster_selection(row["size"], row["k"]))
        (other,) = raw.values()
        assert min(taken) <= max(other), row  # if their runs overlap, noise decides
    # The library sorts only where sorting was faster in the benchmark: never for vectors longer
    # than the longest of these, and never if four times as many elements have to be found.
    sorted_faster = [row for row in rows if row["faster"] == "exact"]
    longest, most = (max(row[key] for row in sorted_faster) for key in ("size", "k"))
    assert selection.faster_selection(longest, most) == "exact"
    assert (
        selection.faster_selection(longest + 1, 1)
        == selection.faster_selection(1 << 12, 4 * most)
        == "threshold"
    )


def test_selection_by_size_takes_the_largest_both_ways() -> None:
    for k in (10, 2000):
        x = normal(3000)
        values, _ = select(x, k)
        np.testing.assert_array_equal(jnp.sort(jnp.abs(values)), jnp.sort(jnp.abs(x))[-k:])
    with pytest.raises(
        ValueError, match="^`selection` must be one of 'auto', 'exact', 'threshold', got 'sorted'"
    ):
        top_k(0.1, "batch", selection="sorted")  # type: ignore[arg-type]
