"""Each example as a user runs it on one rank, at toy size. `tests/mpi` runs them on two, with every `pytest`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcross.data import synthesise

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(*words: object, timeout: float = 240) -> str:
    """Runs an example to its end and returns what it printed; fails with all of it if the example fails."""
    command = [sys.executable, str(EXAMPLES / str(words[0])), *map(str, words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.exhaustive
def test_mnist_sweep(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    out = run("mnist_sweep.py", "--steps", 50, "--trials", 8, "--folder", tmp_path)
    assert "Sweep of 8 trials by accuracy (max)" in out and "Best: lr" in out


@pytest.mark.exhaustive
def test_nnx_mlp() -> None:
    assert "in both idioms" in run("nnx_mlp.py", "--steps", 50, "--hidden", 16)


@pytest.mark.exhaustive
def test_gpt() -> None:
    words = ("--steps", 40, "--features", 24, "--layers", 1, "--length", 16, "--lr", 0.003, 0.01, "--letters", 20)
    out = run("gpt.py", "--mesh", "serial", *words, "--loss", 3.5)
    assert out.count("in crossover and alone the same bits") == 2 and out.count("\nThe ") >= 2


@pytest.mark.exhaustive
def test_imagenet_resnet(tmp_path: Path) -> None:
    synthesise(tmp_path / "data", images=64, classes=4, width=64, height=48)
    out = run(
        *("imagenet_resnet.py", "--data-dir", tmp_path / "data", "--model", "resnet8", "--image-size", 24),
        *("--batch-size", 16, "--steps", 20, "--job", "lr=0.1,seed=0", "--job", "lr=0.2,seed=1"),
        *("--policy", "compare", "--output", tmp_path / "out", "--json", tmp_path / "result.json"),
    )
    assert "all final states are equal, bit for bit" in out
    result = json.loads((tmp_path / "result.json").read_text())
    runs = {"sequential", "crossover", "sequential-2", "crossover-2"}  # each way in two turns
    assert set(result["runs"]) == runs
    jobs = result["runs"]["crossover-2"]["jobs"]
    assert [job["name"] for job in jobs] == ["job0 lr=0.1,seed=0", "job1 lr=0.2,seed=1"]
    assert [job["steps"] for job in jobs] == [10, 10]
    # Four classes: chance is 0.25. The images tell their class, so twenty steps are enough to beat it clearly.
    assert all(score["accuracy"] > 0.5 for score in result["evaluation"].values())
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {f"{run}.{kind}" for run in runs for kind in ("json", "png", "trace.json")}


@pytest.mark.integration
def test_missing_data_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "imagenet_resnet.py"), "--data-dir", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "nowhere` does not exist." in done.stderr
    assert "jaxcross data synth DIR" in done.stderr
