"""Runs benchmarks/imagenet_resnet.py at toy size, directly and under mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxcross.data import synthesise

pytestmark = pytest.mark.integration


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BENCHMARK = BENCHMARKS / "imagenet_resnet.py"


def check(result: dict[str, Any]) -> None:
    assert result["question"].startswith("How fast do several ImageNet jobs train")
    assert result["throughput"]["equal_to_the_bit"] is True
    for cache in ("cold", "warm"):
        for policy in ("sequential", "crossover"):
            (run,) = result["throughput"][cache][policy]["runs"]
            assert list(run["images_per_s_by_job"]) == ["job0 lr=0.1,seed=0", "job1 lr=0.2,seed=1"]
            assert all(rate > 0 for rate in run["images_per_s_by_job"].values())
            assert set(run["input_wait_s"]) == set(run["images_per_s_by_job"])
            assert {job["steps"] for job in run["account"]["jobs"]} == {result["steps"]}
    sequential, crossover = (result["accuracy"][policy] for policy in ("sequential", "crossover"))
    # The states are bit for bit identical, so the accuracies are too, however long the steps took.
    for name, job in sequential["jobs"].items():
        curve, other = job["step_s_accuracy"], crossover["jobs"][name]["step_s_accuracy"]
        assert [(step, accuracy) for step, _, accuracy in curve] == [
            (step, accuracy) for step, _, accuracy in other
        ]
        assert (
            curve[-1][2] >= result["accuracy"]["goal"]
            or curve[-1][0] == result["accuracy"]["steps_at_most"]
        )


@pytest.mark.exhaustive
def test_by_itself(tmp_path: Path, quick_compiler: dict[str, str]) -> None:
    out = tmp_path / "out.json"
    line = [sys.executable, str(BENCHMARK), "--smoke", "--accuracy", "0.5", "--json", str(out)]
    subprocess.run(line, check=True, timeout=900, env={**os.environ, **quick_compiler})
    result = json.loads(out.read_text())
    check(result)
    assert result["data"] == "synthetic"
    assert result["command"] == ["python", "imagenet_resnet.py", *line[2:]]
    assert result["accuracy"]["crossover"]["s"] > 0
    link = result["throughput"]["link"]
    assert link.startswith("real link 500mbit") or ("emulated" in link and "speedup" not in result)


def test_by_mpirun_with_a_data_set(
    mpirun: Callable[..., Any], tmp_path: Path, quick_compiler: dict[str, str]
) -> None:
    synthesise(tmp_path / "data", images=64, classes=4, width=64, height=48)
    options: dict[str, Any] = {
        "--data-dir": tmp_path / "data",
        "--json": tmp_path / "out.json",
        "--steps": 6,
        "--accuracy": 1.1,
        "--accuracy-steps": 4,
        "--evaluate-every": 2,
        "--emulate-link": "500mbit",
    }
    arguments = ["--smoke", *(str(word) for pair in options.items() for word in pair)]
    done = mpirun(2, str(BENCHMARK), *arguments, timeout=900, env=quick_compiler).check()
    result = json.loads((tmp_path / "out.json").read_text())
    check(result)
    assert "speedup" not in result
    assert result["accuracy"]["crossover"]["s"] is None
    assert result["accuracy"]["crossover"]["reason"].startswith(
        "not reached by job0 lr=0.1,seed=0, job1"
    )
    assert "page cache" in done.stdout
