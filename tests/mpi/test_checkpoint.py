"""Training that is killed at a random moment, started again until it is through, ends in the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/kill_resume.py"


def killed(tmp_path, *options, timeout):
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, str(BENCHMARK), "--json", str(out), *options], check=True, timeout=timeout)
    return json.loads(out.read_text())


def test_a_run_that_is_killed_while_it_writes_goes_on(mpirun, tmp_path):
    result = killed(tmp_path, "--smoke", "--ranks", "2", "--seed", "14", timeout=280)
    (trial,) = result["rows"]
    assert [kill["at"] for kill in trial["kills"]] == ["write"]
    assert trial["equal"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_killed_runs_go_on(mpirun, ranks, tmp_path):
    result = killed(tmp_path, "--trials", "10", "--seed", "100", "--ranks", str(ranks), timeout=3000)
    assert result["trials"] == result["survived"] == 10
