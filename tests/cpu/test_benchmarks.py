"""Every benchmark runs at toy size and writes its numbers with the question, the command and the versions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcross.lab import available

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def smoke(tmp_path, quick_compiler):
    def run(name: str, *options: str) -> dict:
        out = tmp_path / "out.json"
        line = [sys.executable, str(BENCHMARKS / name), "--smoke", "--json", str(out), *options]
        subprocess.run(line, check=True, timeout=300, env={**os.environ, **quick_compiler})
        return json.loads(out.read_text())

    return run


def test_overhead(smoke):
    result = smoke("overhead.py")
    assert result["question"].startswith("What does the cut cost")
    assert set(result["versions"]) >= {"python", "jax", "mpi4jax"}
    for case in ("mlp", "resnet50"):
        assert (
            len(result[case]["jit"]["raw"])
            == len(result[case]["jaxcross"]["raw"])
            == len(result[case]["by_hand"]["raw"])
            == 3
        )
    assert result["host_time_mlp"]["segments"] == 3
    # A toy step's memory is exact arithmetic on XLA's figures, not a timing: the whole cut keeps little more alive.
    assert 1 <= result["memory_transformer"]["cut_whole_over_fused"] < 1.05


def test_wire_call(smoke):
    assert "question" in smoke("wire_call.py")


def test_scale(smoke):
    result = smoke("scale.py")
    for part in ("decision_by_jobs", "decision_by_segments", "run_by_jobs", "run_by_segments"):
        assert len(result[part]["rows"]) == 2
        assert "slope_of_total" in result[part]


@pytest.mark.exhaustive
def test_exchange_cost(smoke):
    if (reason := available()) is not None:
        pytest.skip(f"no lab on this machine: {reason}")
    result = smoke("exchange_cost.py")
    for name in ("alone", "at once", "beside"):
        row = result["exchange"][name]
        assert row["s"]["median"] >= 0 < row["fill"]
    assert result["tax_s"] > 0 and set(result["computation_s"]) >= {"alone"}


@pytest.mark.exhaustive
def test_unequal(smoke):
    if (reason := available()) is not None:
        pytest.skip(f"no lab on this machine: {reason}")
    result = smoke("unequal.py")
    for row in result["ways"].values():
        assert set(row["relative"]) == {"large", "small"}
        assert row["progress"] == pytest.approx(sum(row["relative"].values()))


@pytest.mark.slow
def test_crossover(smoke):
    if (reason := available()) is not None:
        pytest.skip(f"no lab on this machine: {reason}")
    result = smoke("crossover.py")
    assert result["equal_to_the_bit"] is True
    assert set(result["s_per_job_step"]) == {"fused", "sequential", "crossover"}
    assert result["link"].startswith("real link 500mbit")
    # At least what the all-reduces of all rivals' steps must send: 2 ranks send each gradient byte once.
    assert result["bytes_crossed"] > 1e6
