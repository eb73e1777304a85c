"""Tests when a job stops early, and which value counts as the best so far. Pure decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross.jobs.early_stopping import Best, EarlyStopping

NAN, INF = math.nan, math.inf


def stops_at(
    values: list[float], *, mode: Any = "max", min_delta: float = 0.0, **limits: int
) -> int | None:
    """Returns the number of the evaluation that stops the job. There's one every 10 steps."""
    early = EarlyStopping(best=Best(metric="m", mode=mode, min_delta=min_delta), **limits)
    for n, value in enumerate(values, 1):
        early = EarlyStopping(best=early.best.update(10 * n, value), **limits)
        if early.reason(10 * n):
            return n
    return None


@pytest.mark.parametrize(
    ("values", "limits", "expected"),
    [
        ([1, 2, 2, 1], {"patience": 2}, 4),
        ([1, 2, 1, 3, 1, 1], {"patience": 2}, 6),
        ([1, 2, 3, 4], {"patience": 1}, None),
        ([2, 1], {"patience": 1}, 2),
        ([2, 1, 0.5], {"mode": "min", "patience": 1}, None),
        # Only 2 improves by more than `min_delta`.
        ([1, 1.25, 1.25, 2], {"min_delta": 0.25, "patience": 2}, 3),
        ([1, 2, 1, 1, 1], {"patience_steps": 20}, 4),
        ([1, 2, 1, 1, 1], {"patience_steps": 25}, 5),
        ([NAN, NAN], {"patience": 2}, 2),
        ([NAN, 1, NAN, 2, INF], {"patience": 2}, None),
        ([INF, 3, 2], {"patience": 1, "mode": "max"}, 1),
        ([NAN, NAN, NAN], {"patience_steps": 30}, 3),
    ],
)
def test_stops_after_its_patience(
    values: list[float], limits: dict[str, Any], expected: int | None
) -> None:
    assert stops_at(values, **limits) == expected


@given(st.lists(st.floats(), max_size=8), st.sampled_from(["min", "max"]))
def test_the_best_is_the_first_finite_optimum(values: list[float], mode: Any) -> None:
    best = Best(metric="m", mode=mode)
    for step, value in enumerate(values):
        best = best.update(step, value)
    finite = [value for value in values if math.isfinite(value)]
    expected = (min(finite) if mode == "min" else max(finite)) if finite else None
    assert best.value == expected
    if finite:
        assert best.step == values.index(expected)


@given(st.lists(st.floats(), max_size=8), st.integers(0, 8))
def test_a_text_brings_back_value_and_counters(values: list[float], cut: int) -> None:
    best = Best(metric="m", mode="min")
    for step, value in enumerate(values):
        if step == cut:
            best = Best(metric="m", mode="min").resumed(best.to_text())
        best = best.update(step, value)
    whole = Best(metric="m", mode="min")
    for step, value in enumerate(values):
        whole = whole.update(step, value)
    assert best == whole


@pytest.mark.parametrize(
    "text", ["", "[]", "[1, 2]", '["nan", 1, 2]', '["0x1p0", true, 2]', "[" * 5000, "null"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match="the best value of `m` in a checkpoint's notes must be a JSON list"
    ):
        Best(metric="m", mode="min").resumed(text)


def test_a_reason_says_what_was_best() -> None:
    best = Best(metric="eval/loss", mode="min").update(10, 0.5).update(20, 0.75)
    assert EarlyStopping(best=best, patience=1).reason(20) == (
        "`eval/loss` has not been better than 0.5, its value at step 10, for 1 evaluation"
    )
    assert "was not finite in 10 steps" in EarlyStopping(
        best=Best(metric="m", mode="min").update(10, NAN), patience_steps=10
    ).reason(10)
