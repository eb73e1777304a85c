"""The watchdog names a rank that hangs in its own code, but not a rank that waits for a reason."""

import re

import pytest

# The watchdogs here are short. So whatever takes different times on different ranks, such as
# imports, comes before the watchdogs start.
HANGS = """
import os, threading, jaxcross
from jax import lax
from jaxcross import Runner, crossover
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
world = jaxcross.initialize(stall_timeout_s=12, heartbeat_timeout_s=0)

step = crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def data(hangs):
    for n in range(10_000):
        if hangs and n == 3:
            threading.Event().wait()
        yield float(n)

def continues(job):
    w = job.restore(0.0)
    for x in job.batches(data(False)):
        w = step(w, x)

def hangs(job):
    w = job.restore(0.0)
    for x in {loop}:
        w = step(w, x)
        {then}

runner = Runner(world, {checkpoints})
runner.add("good", continues)
runner.add("bad", hangs)
runner.run()
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("loop", "then", "said"),
    [
        (  # its own loop, alongside a job that continues
            "data(world.rank == 1)",
            "pass",
            (
                r"step 4 \(call of the step\).\n"
                "  rank 1 has not arrived: its job 'bad' has not reached that point; "
            ),
        ),
        pytest.param(
            "job.batches(data(world.rank == 1))",
            "pass",
            "rank 1 is late itself: its own batch 4 of data 1 takes this long",
            marks=pytest.mark.exhaustive,
        ),
        (  # and on all ranks
            "job.batches(data(True))",
            "pass",
            r"s in job 'bad', step 4 \(own batch 4 of data 1\).\n  rank (\d) is late itself",
        ),
    ],
    ids=["own-loop", "data", "data-on-all"],
)
def test_hanging_job_is_named_although_votes_continue(mpirun, loop, then, said):
    done = mpirun(
        2, HANGS.replace("{loop}", loop).replace("{then}", then).replace("{checkpoints}", "")
    )
    assert done.returncode != 0
    assert re.search(said, done.stderr), done.stderr


AFTER_THE_COMMIT = """
import threading, jax, jaxcross, numpy as np
from jax import lax
from jaxcross import Runner, crossover
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
world = jaxcross.initialize(stall_timeout_s=12, heartbeat_timeout_s=0)

def last(total):
    if world.rank == 1 and total >= 6:
        threading.Event().wait()
    return np.float32(total)

def step(w, x):
    total = lax.psum(x, "batch")
    return w + jax.pure_callback(last, jax.ShapeDtypeStruct((), np.float32), total)

step = crossover(step, axes="batch")

def work(job):
    w = job.restore(np.float32(0))
    for n in range(10):
        w = step(w, np.float32(n))
        if job.step == 4 and world.rank == 0:
            raise ValueError("no more")

runner = Runner(world)
runner.add("a", work)
runner.run()
"""


@pytest.mark.integration
def test_hang_after_commit_is_named_despite_a_failure(mpirun):
    done = mpirun(2, AFTER_THE_COMMIT)
    assert done.returncode != 0
    said = (
        r"rank 1 has waited \d+ s in job 'a', step 4 \(own end of the step\).\n"
        "  rank 1 is late itself"
    )
    assert re.search(said, done.stderr), done.stderr


LONG = """
import time, jaxcross
from jax import lax
from jaxcross import Runner, crossover
world = jaxcross.initialize(stall_timeout_s=3, heartbeat_timeout_s=0)

step = crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def steps(job, count, pause_s):
    w = job.restore(0.0)
    for _ in range(count):
        w = step(w, 1.0)
        time.sleep(pause_s)
    return w

def evaluates(job):
    steps(job, 3, 0)
    with job.measure("host", "evaluation"):
        time.sleep(6 if world.rank == 0 else 0)
    return step(0.0, 1.0)

def every_second_step(job):
    job.every(2, lambda w: time.sleep(6) or 1.0, rank=0)
    w = job.restore(0.0)
    for x in job.batches([1.0] * 3):
        job.state = w = step(w, x)
    assert job.history[-1] == (2, {"eval": 1.0})

def in_pieces(job):
    steps(job, 3, 0)
    for _ in range(3 if world.rank == 0 else 0):
        with job.measure("host", "evaluation"):
            time.sleep(2.4)
        time.sleep(1.6)
    return step(0.0, 1.0)

def rests(job):
    other.pause()
    steps(job, 15, 0.4)
    other.resume()

def ends_early(job):
    steps(job, 2, 0)
    time.sleep(0 if world.rank else 6)

def continues(job):
    steps(job, 20, 0.4)

for policy, functions in (
    (jaxcross.Sequential(), (continues, continues)),
    (None, (rests, continues)),
    (None, (evaluates,)),
    (None, (every_second_step,)),
    (None, (in_pieces,)),
    (None, (ends_early, continues)),
):
    runner = Runner(world, policy)
    jobs = [runner.add(f"job-{n}", function) for n, function in enumerate(functions)]
    other = jobs[-1]
    runner.run()
    print(f"rank {world.rank}: {[job.status for job in jobs]}", flush=True)
"""


@pytest.mark.integration
@pytest.mark.exhaustive
def test_waits_that_are_right_are_not_taken_for_hangs(mpirun):
    """The watchdog must tolerate legitimate waits, here of twice its time limit.

    A job waits for the policy, while it's paused, during evaluations (one of which is in several
    parts), or for the other ranks to reach the job's end.
    """
    done = mpirun(2, LONG).check()
    for rank in (0, 1):
        assert done.stdout.count(f"rank {rank}: ['ended', 'ended']") == 3
        assert done.stdout.count(f"rank {rank}: ['ended']") == 3


IDLE = """
import threading, jaxcross
from jax import lax
from jaxcross import Runner, crossover
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
world = jaxcross.initialize(stall_timeout_s=12, heartbeat_timeout_s=0)

step = crossover(lambda w, x: w + lax.psum(x, "batch"), axes="batch")

def trains(job):
    w = job.restore(0.0)
    for _ in range(3):
        w = step(w, 1.0)
    if world.rank == 1:
        threading.Event().wait()

def waits(job):
    jobs[0].done.wait()

runner = Runner(world, {policy})
jobs = [runner.add("a", trains), runner.add("b", {other})]
runner.run()
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("policy", "other"), [("jaxcross.Sequential()", "trains"), ("None", "waits")]
)
def test_hang_at_the_end_of_an_idle_job_is_named(mpirun, policy, other):
    """No other job continues in the meantime."""
    done = mpirun(2, IDLE.format(policy=policy, other=other))
    assert done.returncode != 0
    said = (
        r"rank 0 has waited \d+ s in job 'a', step 4 \(end of the job\).\n"
        "  rank 1 has not arrived: its job 'a' has not"
    )
    assert re.search(said, done.stderr), done.stderr


@pytest.mark.integration
def test_a_disk_that_hangs_is_named(mpirun, tmp_path):
    """`fsync` never returns, as if the file system were gone."""
    script = HANGS.replace("{loop}", "job.batches(data(False))").replace("{then}", "job.save(w)")
    script = script.replace("{checkpoints}", f"checkpoints=jaxcross.Checkpoints({str(tmp_path)!r})")
    gone = "if world.rank == 1:\n    os.fsync = lambda file: threading.Event().wait()\n"
    done = mpirun(2, script.replace("runner =", f"{gone}runner ="))
    assert done.returncode != 0
    assert (
        "(own checkpoint).\n  rank 1 is late itself: its disk has not taken the last checkpoint"
        in done.stderr
    ), done.stderr
