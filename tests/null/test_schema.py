"""Tests that plain data becomes a record, or an error that says what is wrong and where."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcross import _schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    km: float
    stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.km < 0:
            raise ValueError("`km` is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    name: str
    legs: tuple[Leg, ...]
    notes: dict[str, str] = field(default_factory=dict)


def test_nested_data_becomes_records() -> None:
    data = {"name": "a", "legs": [{"km": 1, "stops": [2, 3]}], "more": None}
    found = _schema.record(data, Trip)
    assert found == Trip(name="a", legs=(Leg(km=1.0, stops=(2, 3)),))
    assert type(found.legs[0].km) is float


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected `object`, got `array`"),
        ({"name": "a"}, "object missing required field `legs`"),
        ({"name": "a", "legs": [{}]}, "object missing required field `km` at `legs[0]`"),
        ({"name": "a", "legs": [{"km": True}]}, "expected `float`, got `bool` at `legs[0].km`"),
        ({"name": "a", "legs": [{"km": 10**400}]}, "number out of range at `legs[0].km`"),
        (
            {"name": "a", "legs": [{"km": 1, "stops": [1.0]}]},
            "expected `int`, got `float` at `legs[0].stops[0]`",
        ),
        ({"name": "a", "legs": [{"km": -1}]}, "`km` is negative at `legs[0]`"),
    ],
)
def test_the_error_says_where(data: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        _schema.record(data, Trip)
    assert str(error.value) == message


def test_nan_and_surrogates_are_read() -> None:
    """Older files have `NaN`, and errors about paths may contain lone surrogates."""
    found = _schema.record(json.loads('{"name": "\\udcff", "legs": [{"km": NaN}]}'), Trip)
    assert found.name == "\udcff"
    assert math.isnan(found.legs[0].km)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "legs", "km", "stops", "notes"]), inner)
    ),
)


@given(JSON)
def test_any_other_data_is_a_value_error(data: Any) -> None:
    with suppress(ValueError):
        assert isinstance(_schema.record(data, Trip), Trip)
