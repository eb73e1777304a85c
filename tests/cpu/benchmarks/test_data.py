"""`benchmarks/data.py` and `benchmarks/data_cache.py` run and write what they measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcross.lab import available

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "data.py"


@pytest.mark.integration
def test_smoke(tmp_path: Path) -> None:
    out = tmp_path / "data.json"
    subprocess.run([sys.executable, str(BENCHMARK), "--smoke", "--json", str(out)], check=True, timeout=240)
    result = json.loads(out.read_text())
    assert result["question"].startswith("How many images a second")
    assert len(result["images_per_second"]) == 4
    assert all(len(rates["raw"]) == 2 and rates["median"] > 0 for rates in result["images_per_second"].values())


@pytest.mark.integration
def test_smoke_of_the_cache(tmp_path: Path) -> None:
    """Over the link of a lab; counts of bytes are exact at any size, rates mean nothing here."""
    if reason := available():
        pytest.skip(reason)
    out = tmp_path / "data_cache.json"
    command = [sys.executable, str(BENCHMARK.with_name("data_cache.py")), "--smoke", "--json", str(out)]
    ways = ["--ways", "cache, fits, 2 jobs;cache, half fits, 1 job"]
    subprocess.run([*command, *ways, "--png", str(tmp_path / "levels.png")], check=True, timeout=240)
    result = json.loads(out.read_text())
    assert result["question"].startswith("Does training from slow storage run at full speed")
    first, second = result["raw"]["cache, fits, 2 jobs"][0]["passes"]
    assert first["origin_bytes"] > second["origin_bytes"] == 0
    assert result["raw"]["cache, fits, 2 jobs"][0]["levels"]["origin"] == result["images"]
    assert len(result["ways"]) == 3
    assert (tmp_path / "levels.png").stat().st_size > 0
