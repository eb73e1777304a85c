"""`jaxcross sweep` over real ranks: a grid, a trial that fails alone, and a second start."""

import json
import subprocess

import pytest

from tests.support import warm_python

SCRIPT = """
import jaxcross

world = jaxcross.initialize(stall_timeout_s=60)

import jax
import jax.numpy as jnp


@jaxcross.crossover(axes="batch", donate_argnums=0)
def step(w, x):
    return w + jax.lax.pmean(x, "batch")


def train(job, gain, fails=False):
    w = job.restore(jnp.zeros(2))
    for x in job.batches([jnp.full(2, float(gain))] * 4):
        w = step(w, x)
        if fails and world.rank == 1 and job.step == 2:
            raise ValueError("the trial failed")
        job.log({"score": w[0]})
    return w
"""


@pytest.mark.integration
def test_command_sweeps_a_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def start():
        options = [
            "--set",
            "gain=1,3,2",
            "--set",
            "fails=false,true",
            "--metric",
            "score",
            "--mode",
            "max",
            "--concurrent",
            "3",
            "-n",
            "2",
        ]
        line = [*warm_python.COMMAND, "-m", "jaxcross", "sweep", "train.py", *options]
        done = subprocess.run(
            line, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = start()
    assert "Sweep of 6 trials by score (max): 3 finished, 3 failed" in first
    assert "Best: gain 3, fails False, with score 12 after 4 steps." in first
    assert "failed on rank 1" in first
    trials = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
    assert [each["value"] for each in trials if each["status"] == "finished"] == [4.0, 12.0, 8.0]
    assert first.partition("Sweep of")[2] == start().partition("Sweep of")[2]
