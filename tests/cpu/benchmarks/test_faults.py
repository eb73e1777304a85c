"""The fault benchmarks run at toy size and record what they found."""

import pytest


@pytest.mark.integration
def test_flight(smoke):
    result = smoke("flight.py")
    assert result["question"].startswith("What does the flight recorder cost per event")
    assert result["without_file_us"]["min"] > 0 and result["with_file_us"]["min"] > 0
    assert result["ranks"] == 1


@pytest.mark.exhaustive
def test_faults(smoke):
    result = smoke("faults.py")
    assert result["cases"] == result["as_expected"] == 2
    assert {(row["fault"], row["point"], row["outcome"]) for row in result["rows"]} == {
        ("kill", "exchange", "ends"), ("term", "compute", "stops"),
    }  # fmt: skip
    assert all(result["longest_s"][outcome] > 0 for outcome in ("ends", "stops"))
