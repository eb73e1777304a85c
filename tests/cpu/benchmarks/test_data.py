"""`benchmarks/data.py` runs and writes what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "data.py"


@pytest.mark.integration
def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "data.json"
    subprocess.run([sys.executable, str(BENCHMARK), "--smoke", "--json", str(out)], check=True, timeout=240)
    result = json.loads(out.read_text())
    assert result["question"].startswith("How many images a second")
    assert len(result["images_per_second"]) == 4
    assert all(len(rates["raw"]) == 2 and rates["median"] > 0 for rates in result["images_per_second"].values())
