"""A killed launcher leaves no ranks behind: `mpirun` gets SIGTERM, so the ranks save and end."""

import os
import signal
import subprocess
import sys

import pytest

from jaxcross.commands.end_with import tied
from jaxcross.commands.launch import find_mpirun

CHILD = "import signal; print('ready', flush=True); signal.pause()"
PARENT = """
import os, signal, subprocess, sys, threading
from jaxcross.commands.end_with import tied
child = subprocess.Popen(tied([sys.executable, "-c", sys.argv[1]], os.getpid()))
print(child.pid, flush=True)
signal.pause()
"""
SCRIPT = """
import sys, jaxcross
world = jaxcross.initialize()

import jax
import jax.numpy as jnp

@jaxcross.crossover(axes="batch")
def step(state, batch):
    return state + jax.lax.psum(batch, "batch")

def train(job):
    state = job.restore(jnp.float32(0))
    while True:
        state = step(state, jnp.float32(1))
        if job.step == 3 and world.rank == 0:
            print("training", flush=True)

runner = jaxcross.Runner(world, checkpoints=jaxcross.Checkpoints(sys.argv[1]), progress=False)
runner.add("a", train)
runner.run()
"""


def lines_of(process):
    assert process.stdout is not None
    return (line.strip() for line in process.stdout)


def test_a_child_gets_sigterm_when_its_launcher_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    ) as launcher:  # fmt: skip
        lines = lines_of(launcher)
        assert {next(lines).isdigit(), next(lines).isdigit()} == {True, False}
        launcher.kill()
        assert list(lines) == []  # the child holds the pipe as well, so it has ended


def test_a_child_of_a_launcher_that_is_gone_does_not_start():
    child = subprocess.Popen(tied([sys.executable, "-c", CHILD], os.getpid() + 1))
    assert child.wait(60) == 128 + signal.SIGTERM


@pytest.mark.integration
def test_ranks_of_a_killed_launcher_save_and_end(tmp_path):
    """The ranks end with both MPI vendors, but only MPICH gives them the time to save."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = [
        sys.executable,
        "-m",
        "jaxcross.cli",
        "launch",
        "-n",
        "2",
        str(script),
        str(tmp_path / "ck"),
    ]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:  # fmt: skip
        lines = lines_of(launcher)
        assert any(each == "training" for each in lines)
        launcher.kill()
        rest = list(lines)  # until all ranks have ended, because they hold the pipe as well
    mpirun = find_mpirun()
    assert mpirun is not None
    if mpirun.vendor == "mpich":  # Open MPI's `mpirun` kills the ranks a second later
        assert any(each.startswith("Job `a`: saved at step ") for each in rest), rest
