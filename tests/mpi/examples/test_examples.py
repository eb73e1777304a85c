"""Each example as a user runs it on two or four ranks, at toy size.

CI runs the examples that show how ranks affect each other. `tests/cpu/examples` runs the others on
one rank.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxcross.data import synthesise
from tests.support import toy_sizes
from tests.support.optional import NEEDS_MPI4JAX

pytestmark = pytest.mark.integration


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.exhaustive
def test_mnist_sweep(
    mpirun: Callable[..., Any], quick_compiler: dict[str, str], tmp_path: Path
) -> None:
    """A second start has nothing left to do and prints the same."""
    pytest.importorskip("sklearn")
    pytest.importorskip("optuna")
    arguments = ("--steps", "50", "--trials", "6", "--folder", str(tmp_path / "sweep"))
    first, second = (
        mpirun(
            2, str(EXAMPLES / "mnist_sweep.py"), *arguments, timeout=900, env=quick_compiler
        ).check()
        for _ in "ab"
    )
    assert "Sweep of 6 trials by accuracy (max)" in first.stdout
    assert second.stdout == first.stdout


@pytest.mark.exhaustive
def test_nnx_mlp(mpirun: Callable[..., Any], quick_compiler: dict[str, str]) -> None:
    arguments = ("--steps", "50", "--hidden", "16")
    done = mpirun(2, str(EXAMPLES / "nnx_mlp.py"), *arguments, env=quick_compiler).check()
    assert done.stdout.count("in both idioms") == 1


def test_lora(mpirun: Callable[..., Any], quick_compiler: dict[str, str]) -> None:
    """The example itself compares each adapter with the one that its job trains alone."""
    done = mpirun(2, str(EXAMPLES / "lora.py"), *toy_sizes.LORA, env=quick_compiler).check()
    assert done.stdout.count("Each adapter is bit for bit the one") == 1


@NEEDS_MPI4JAX
@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4))]
)
def test_basin(mpirun: Callable[..., Any], quick_compiler: dict[str, str], ranks: int) -> None:
    """mpi4jax calls that differ by rank, alongside a training job, in chaos mode."""
    env = {**quick_compiler, "JAXCROSS_CHAOS": "1"}
    done = mpirun(
        ranks, str(EXAMPLES / "basin.py"), "--size", "24", "--steps", "40", env=env
    ).check()
    assert done.stdout.count("alongside another job: the same bits") == 1


@pytest.mark.parametrize(
    "staleness", [("0", "2"), pytest.param(("inf", "inf"), marks=pytest.mark.exhaustive)]
)
def test_parameter_servers(
    mpirun: Callable[..., Any], quick_compiler: dict[str, str], staleness: tuple[str, ...]
) -> None:
    arguments = ("--steps", "60", "--hidden", "16", "--staleness", *staleness)
    done = mpirun(2, str(EXAMPLES / "parameter_servers.py"), *arguments, env=quick_compiler).check()
    assert [done.stdout.count(f"staleness {s}: test accuracy") for s in staleness] == [
        staleness.count(s) for s in staleness
    ]


@pytest.mark.parametrize(
    ("ranks", "mesh"), [(2, "1d"), pytest.param(4, "2d", marks=pytest.mark.exhaustive)]
)
def test_gpt(
    mpirun: Callable[..., Any],
    quick_compiler: dict[str, str],
    tmp_path: Path,
    ranks: int,
    mesh: str,
) -> None:
    (tmp_path / "own.txt").write_text("The network waits while one job computes. " * 50)
    arguments = (
        ["--data", str(tmp_path / "own.txt")] if ranks == 4 else []
    )  # else the documentation
    arguments += [
        "--steps",
        "40",
        "--features",
        "24",
        "--layers",
        "1",
        "--length",
        "16",
        "--lr",
        "0.003",
        "0.01",
    ]
    arguments += ["--letters", "20", "--loss", "3.5"]
    script = str(EXAMPLES / "gpt.py")
    done = mpirun(
        ranks, script, "--mesh", mesh, *arguments, timeout=900, env=quick_compiler
    ).check()
    assert done.stdout.count("in crossover and alone the same bits") == 2


@pytest.mark.exhaustive
def test_imagenet_resnet(
    mpirun: Callable[..., Any], tmp_path: Path, quick_compiler: dict[str, str]
) -> None:
    synthesise(tmp_path / "data", images=64, classes=4, width=64, height=48)
    options = {
        "--data-dir": tmp_path / "data",
        "--model": "resnet8",
        "--image-size": 24,
        "--batch-size": 8,
        "--steps": 20,
        "--policy": "compare",
        "--json": tmp_path / "result.json",
    }
    arguments = [str(word) for pair in options.items() for word in pair]
    arguments += ["--job", "lr=0.1,seed=0", "--job", "lr=0.2,seed=1"]
    done = mpirun(
        2, str(EXAMPLES / "imagenet_resnet.py"), *arguments, timeout=900, env=quick_compiler
    ).check()
    assert done.stdout.count("all final states are equal, bit for bit") == 1
    result = json.loads((tmp_path / "result.json").read_text())
    for run in ("sequential", "crossover", "sequential-2", "crossover-2"):  # each way has two turns
        assert [job["steps"] for job in result["runs"][run]["jobs"]] == [10, 10]
    assert all(score["accuracy"] > 0.5 for score in result["evaluation"].values())
