"""Output of real ranks: `--tag`, `--log-dir`, and folders named after the time of the start."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

# Both ranks print the same lines at the same time, in pieces, while they exchange messages. Then
# rank 1 is killed in the middle of a line.
PRINTS = """
import os, signal, sys
from mpi4py import MPI

world = MPI.COMM_WORLD
mark = "ab"[world.rank]
for n in range(200):
    for piece in ("<", mark * (40 * n), ">", "\\n"):
        world.Barrier()
        os.write(1, piece.encode())
    os.write(2, f"error {mark}\\n".encode())
sys.stdout.write(f"the end of {mark}")
world.Barrier()
if world.rank == 1 and "crash" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def launch(folder, *options, script, timeout=300):
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, "-m", "jaxcross.cli", "launch", "-n", "2", *options]
    arguments = [str(path), "crash"] if "--log-dir" in options else [str(path)]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        timeout=timeout,
        check=False,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def lines(rank):
    mark = "ab"[rank]
    return [*(f"<{mark * (40 * n)}>" for n in range(200)), f"the end of {mark}"]


def pieces(rank):
    """The lines as they're shown, i.e. with the tag, and broken up if they are too long."""
    width = 4096 - len("[0] \r\n")
    return [
        f"[{rank}] {line[n : n + width]}"
        for line in lines(rank)
        for n in range(0, len(line), width)
    ]


def test_lines_of_ranks_are_never_mixed(tmp_path):
    done = launch(tmp_path, "--tag", script=PRINTS)
    assert done.returncode == 0, done.stderr
    _, *shown = done.stdout.decode().splitlines()  # the first is the launcher's own
    for rank in range(2):
        assert [line for line in shown if line.startswith(f"[{rank}] ")] == pieces(rank)
    assert len(shown) == len(pieces(0)) + len(pieces(1))
    errors = [line for line in done.stderr.decode().splitlines() if "error" in line]
    assert sorted(errors) == ["[0] error a"] * 200 + ["[1] error b"] * 200


def test_a_killed_rank_loses_no_output(tmp_path):
    """What the ranks print is shown as well as written. A second launch overwrites nothing."""
    for attempt in (1, 2):
        done = launch(tmp_path, "--tag", "--log-dir", "logs", script=PRINTS)
        assert done.returncode != 0
        shown = done.stdout.decode().splitlines()
        assert [line for line in shown if line.startswith("[1] ")] == pieces(1)
        folder = tmp_path / "logs" / f"attempt-{attempt}"
        assert f"is also written to `{folder}`." in done.stderr.decode()
        kept = (folder / "rank-1.log").read_bytes().replace(b"error b\n", b"")
        assert kept.decode() == "\n".join(lines(1))
        kept = (folder / "rank-0.log").read_bytes().replace(b"error a\n", b"")
        assert kept.decode().startswith("\n".join(lines(0)))
    assert len(list((tmp_path / "logs").glob("*/*"))) == 4


JOB = """
import os, signal, jaxcross
from pathlib import Path

world = jaxcross.initialize(heartbeat_timeout_s=8)

import jax
import jax.numpy as jnp

@jaxcross.crossover(axes="batch")
def step(state, batch):
    return state + jax.lax.psum(batch, "batch")

def train(job):
    state = job.restore(jnp.float32(0))
    print(f"rank {world.rank} starts after step {job.step}")
    for batch in job.batches([jnp.float32(1)] * 10, 10):
        if job.step == 7 and world.rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state = step(state, batch)
        if job.step in (3, 5):  # the second call waits until the first checkpoint is complete
            job.save(state)
    return state

checkpoints = jaxcross.Checkpoints("runs/{time}/checkpoints")
with jaxcross.Runner(world, checkpoints=checkpoints, metrics="runs/{time}/metrics") as runner:
    job = runner.add("a", train)
    runner.run()
print(f"rank {world.rank} ends with {job.state} in {os.environ['JAXCROSS_TIME']}")
"""


def test_a_restarted_run_finds_the_folder_of_its_start(tmp_path):
    options = ["--max-restarts", "1", "--log-dir", "runs/{time}", "--events", "runs/{time}/events"]
    done = launch(tmp_path, *options, script=JOB)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        *("attempt-1", "attempt-2", "checkpoints", "events", "metrics")
    }
    for rank in range(2):
        first = (folder / "attempt-1" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} starts after step 0\n" in first and "ends with" not in first
        second = (folder / "attempt-2" / f"rank-{rank}.log").read_text()
        assert re.search(f"^rank {rank} starts after step [35]$", second, re.MULTILINE)
        assert f"rank {rank} ends with 20.0 in {folder.name}\n" in second


AGREED = """
import os, sys, jaxcross
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["JAXCROSS_EVENTS"] = sys.argv[1] + "/{time}"
if rank == "1":
    os.environ["JAXCROSS_TIME"] = "a different time"
world = jaxcross.initialize()
print("time", os.environ["JAXCROSS_TIME"], flush=True)
for check in (
    lambda: jaxcross.Checkpoints("{date}"),
    lambda: jaxcross.Runner(world, metrics="{date}"),
    lambda: jaxcross.Runner(world, events="{date}"),
):
    try:
        check()
        print("accepted")
    except ValueError as error:
        assert "`{date}` contains `{date}`" in str(error), error
"""


def test_ranks_that_mpirun_starts_agree_on_rank_0s_time(mpirun, tmp_path):
    done = mpirun(2, AGREED, str(tmp_path), env={"JAXCROSS_TIME": ""}).check()
    (folder,) = tmp_path.iterdir()
    assert sorted(done.stdout.splitlines()) == [f"time {folder.name}"] * 2
    assert {path.name for path in folder.iterdir()} >= {"rank-0.jsonl", "rank-1.jsonl"}


MISSPELT = """
import os, jaxcross
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    os.environ["JAXCROSS_EVENTS"] = "{date}"
world = jaxcross.initialize()
print("joined", flush=True)
"""


def test_a_folder_of_events_that_one_rank_misspells_holds_up_no_rank(mpirun, tmp_path):
    done = mpirun(2, MISSPELT).check()
    assert done.stdout.split() == ["joined"] * 2
    assert "rank 1 does not record its events in `{date}`, but training continues" in done.stderr
