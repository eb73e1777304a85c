"""A stopped run reports what it saved, and a restarted run reports where each job resumes.

Only rank 0 reports, and only once.
"""

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import itertools, os, signal, sys
import jax.numpy as jnp, jaxcross
from jax import lax

world = jaxcross.initialize(stall_timeout_s=60)
step = jaxcross.crossover(lambda w, x: w + lax.pmean(x, "batch"), axes="batch")

def train(job, stops):
    w = job.restore(jnp.zeros(()))
    # Without an end of its own: the signal is looked at up to 0.2 s after it came, and tiny steps
    # are soon over.
    for x in job.batches(itertools.repeat(jnp.ones(()), *map(int, sys.argv[3:]))):
        w = step(w, x)
        if stops and job.step == 3 and world.rank == 1:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return w

checkpoints = jaxcross.Checkpoints(sys.argv[2]) if len(sys.argv) > 2 else None
runner = jaxcross.Runner(world, checkpoints=checkpoints, progress=False)
jobs = [runner.add(name, train, {"stops": sys.argv[1] != "none"}) for name in "ab"]
try:
    runner.run()
finally:
    if world.rank == 0:
        print([job.step for job in jobs], flush=True)
"""


def lines(done):
    return [
        line
        for line in done.stderr.splitlines()
        if line.startswith(("Job `", "jaxcross: job", "Start the same"))
    ]


@pytest.mark.parametrize(
    ("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.exhaustive)]
)
def test_stop_says_what_was_saved_and_a_restart_resumes(mpirun, tmp_path, name, code):
    folder = tmp_path / "ck"
    done = mpirun(2, SCRIPT, name, str(folder))
    assert done.returncode == code
    a, b = eval(done.stdout.splitlines()[-1])
    assert lines(done) == [
        f"Job `a`: saved at step {a} in {folder}.",
        f"Job `b`: saved at step {b} in {folder}.",
        "Start the same command again to resume.",
    ]
    assert done.stderr.count("jaxcross: the run has stopped.") == 1
    steps = max(a, b) + 5
    again = mpirun(2, SCRIPT, "none", str(folder), str(steps)).check()
    assert sorted(lines(again)) == [
        f"jaxcross: job `{n}` resumes after step {step}."
        for n, step in zip("ab", (a, b), strict=True)
    ]
    assert again.stdout.splitlines()[-1] == f"[{steps}, {steps}]"


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), pytest.param("SIGTERM", 143, marks=pytest.mark.exhaustive)]
)
def test_without_checkpoints_a_stop_says_so(mpirun, name, code):
    done = mpirun(2, SCRIPT, name)
    a, b = eval(done.stdout.splitlines()[-1])
    said = (
        f"jaxcross: the run has stopped: job `a` after step {a}, job `b` after step {b}. Nothing "
        "was saved, because"
    )
    assert done.stderr.count(said) == 1
    assert done.returncode == code
