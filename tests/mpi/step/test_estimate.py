"""Estimates over MPI, of a given step, and of the first step that a script calls."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_python

EXAMPLES = Path(__file__).parents[3] / "examples"

SCRIPT = """
import argparse, sys
from pathlib import Path
import jax, jax.numpy as jnp
import jaxcross

world = jaxcross.initialize()
folder, jobs = Path(sys.argv[1]), sys.argv[2:]


@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(state, batch):
    return state - jax.lax.pmean(batch, "batch"), {"loss": state.sum()}


@jaxcross.crossover(axes="batch")
def norm(state):
    return jax.lax.pmax(jnp.abs(state).max(), "batch")


def train(job):
    state = job.restore(jnp.ones((64, 64)))
    norm(state)
    for batch in job.batches([jnp.ones((64, 64))] * 5):
        state, metrics = train_step(state, batch)
        (folder / f"step-{job.name}").touch()
        job.log(metrics)
    return state


runner = jaxcross.Runner(
    world,
    checkpoints=jaxcross.Checkpoints(folder / "checkpoints", every=1),
    metrics=folder / "metrics",
)
for name in jobs:
    runner.add(name, train)
if jobs:
    runner.run()
    (folder / "trained").touch()
"""


def estimated(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    line = [*warm_python.COMMAND, "-m", "jaxcross.cli", "estimate", "-n", "2", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, env=env, check=False)


@pytest.fixture
def environ(quick_compiler: dict[str, str], mpirun: object) -> dict[str, str]:
    """The environment of a command that starts ranks. Skips the test without MPI."""
    return {**os.environ, **quick_compiler}


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_estimates(mpirun: Callable[..., Any], quick_compiler: dict[str, str], ranks: int) -> None:
    done = mpirun(ranks, "estimates.py", env=quick_compiler).check()
    assert done.stdout.count("estimates done") == ranks


@pytest.mark.integration
def test_a_script_ends_at_its_first_step(environ: dict[str, str], tmp_path: Path) -> None:
    """The chosen step of the first job is measured, and none of the user's files is written."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    contention = tmp_path / "contention.json"
    contention.write_text('[{"mbps": 300, "compute": 1.1, "exchange": 1.0}]')
    words = (
        "--contention",
        str(contention),
        "--mbps",
        "300",
        "--step",
        "train_step",
        "--jobs",
        "3",
        "--json",
        str(tmp_path / "out.json"),
        str(script),
        str(tmp_path),
    )
    done = estimated(*words, "a", "b", env=environ)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    shown = lines[[line.startswith("`train_step`") for line in lines].index(True) :]
    assert shown[0].startswith("`train_step` of job `a` on 2 ranks: 3 steps timed on copies")
    assert "Job `a`, the first of 2, is measured. The others are not run." in done.stderr
    names = ["contention.json", "out.json", "script.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["jobs"] == 3
    assert written["recommendation"] == shown[-1].strip()
    assert written["cost"]["wire_bytes"] == 64 * 64 * 4
    assert written["cost"]["contention"] == [{"mbps": 300.0, "compute": 1.1, "exchange": 1.0}]


@pytest.mark.integration
def test_a_script_without_a_step_is_an_error(environ: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = estimated(str(script), str(tmp_path), env=environ)
    assert done.returncode == 1
    assert "the script ended without calling a `crossover` step" in done.stderr


@pytest.mark.integration
def test_a_script_that_exits_before_its_step_is_an_error(
    environ: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\n\nsys.exit(3)\n")
    done = estimated(str(script), env=environ)
    assert done.returncode == 3
    words = (
        "jaxcross estimate: the script ended with exit code 3 before it called a `crossover` step, "
        "so nothing was"
    )
    assert words in done.stderr


@pytest.mark.integration
def test_the_sweep_of_the_examples(environ: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = (str(EXAMPLES / "mnist_sweep.py"), "--folder", str(tmp_path / "sweep"))
    done = estimated("--mbps", "500", *words, env=environ)
    assert done.returncode == 0, done.stderr
    assert "`train_step` of job `0 lr=" in done.stdout
    assert "test accuracy" not in done.stdout
    assert not (tmp_path / "sweep").exists()
