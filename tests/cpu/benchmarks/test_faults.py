"""The benchmarks of faults run at toy size and keep what they found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def smoke(name, tmp_path):
    out = tmp_path / "out.json"
    line = [sys.executable, str(BENCHMARKS / name), "--smoke", "--json", str(out)]
    subprocess.run(line, check=True, timeout=300, env=os.environ)
    return json.loads(out.read_text())


def test_flight(tmp_path):
    result = smoke("flight.py", tmp_path)
    assert result["question"].startswith("What does the flight recorder cost an event")
    assert result["without_file_us"]["min"] > 0 and result["with_file_us"]["min"] > 0
    assert result["ranks"] == 1


@pytest.mark.exhaustive
def test_faults(tmp_path):
    result = smoke("faults.py", tmp_path)
    assert result["cases"] == result["as_expected"] == 2
    assert {(row["fault"], row["point"], row["outcome"]) for row in result["rows"]} == {
        ("kill", "exchange", "ends"), ("term", "compute", "stops"),
    }  # fmt: skip
    assert all(result["longest_s"][outcome] > 0 for outcome in ("ends", "stops"))
