"""Runs each example as a user would, on one rank and at toy size.

In CI, these are the examples whose ranks all do the same; `tests/mpi/examples` runs the others, on
several ranks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxcross.data import synthesise
from tests.support import toy_sizes, warm_python

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(env: Mapping[str, str], *arguments: object, timeout: float = 240) -> str:
    """Runs an example and returns its output; fails with all of it if the example fails."""
    command = [*warm_python.COMMAND, str(EXAMPLES / str(arguments[0])), *map(str, arguments[1:])]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.integration
def test_mnist_sweep(tmp_path: Path, quick_compiler: dict[str, str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("optuna")
    out = run(quick_compiler, "mnist_sweep.py", "--steps", 50, "--trials", 6, "--folder", tmp_path)
    assert "Sweep of 6 trials by accuracy (max)" in out and "Best: lr" in out


@pytest.mark.integration
def test_nnx_mlp(quick_compiler: dict[str, str]) -> None:
    assert "in both idioms" in run(quick_compiler, "nnx_mlp.py", "--steps", 50, "--hidden", 16)


@pytest.mark.exhaustive
def test_lora(quick_compiler: dict[str, str]) -> None:
    out = run(quick_compiler, "lora.py", *toy_sizes.LORA)
    assert "All 4 adapters use one copy" in out and "bit for bit the one" in out


@pytest.mark.exhaustive
def test_gpt(quick_compiler: dict[str, str]) -> None:
    arguments = (
        "--steps",
        40,
        "--features",
        24,
        "--layers",
        1,
        "--length",
        16,
        "--lr",
        0.003,
        0.01,
        "--letters",
        20,
    )
    out = run(quick_compiler, "gpt.py", "--mesh", "serial", *arguments, "--loss", 3.5)
    assert out.count("in crossover and alone the same bits") == 2 and out.count("\nThe ") >= 2


@pytest.mark.integration
def test_imagenet_resnet(tmp_path: Path, quick_compiler: dict[str, str]) -> None:
    synthesise(tmp_path / "data", images=64, classes=4, width=64, height=48)
    out = run(
        quick_compiler,
        *(
            "imagenet_resnet.py",
            "--data-dir",
            tmp_path / "data",
            "--model",
            "resnet8",
            "--image-size",
            24,
        ),
        *("--batch-size", 16, "--steps", 20, "--job", "lr=0.1,seed=0", "--job", "lr=0.2,seed=1"),
        *("--policy", "compare", "--output", tmp_path / "out", "--json", tmp_path / "result.json"),
    )
    assert "all final states are equal, bit for bit" in out
    result = json.loads((tmp_path / "result.json").read_text())
    runs = {"sequential", "crossover", "sequential-2", "crossover-2"}  # two turns per mode
    assert set(result["runs"]) == runs
    jobs = result["runs"]["crossover-2"]["jobs"]
    assert [job["name"] for job in jobs] == ["job0 lr=0.1,seed=0", "job1 lr=0.2,seed=1"]
    assert [job["steps"] for job in jobs] == [10, 10]
    # With four classes, chance is 0.25. The classes are visible in the images, so twenty steps
    # clearly beat it.
    assert all(score["accuracy"] > 0.5 for score in result["evaluation"].values())
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {f"{run}.{kind}" for run in runs for kind in ("json", "png", "trace.json")}


@pytest.mark.integration
def test_missing_data_folder(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "imagenet_resnet.py"),
        "--data-dir",
        str(tmp_path / "nowhere"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "nowhere` does not exist." in done.stderr
    assert "jaxcross data synth DIR" in done.stderr
