"""One rank of two jobs, or of a sweep, whose metrics go to W&B (offline) and to MLflow (SQLite).

    tracked.py jobs FOLDER [STEP wait|now]
    tracked.py sweep FOLDER
    tracked.py unreachable FOLDER
    tracked.py slow FOLDER

With STEP, rank 0 is killed once it has logged that step of job `a`, either right away or when
MLflow has it.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxcross
from jaxcross.report import MLflow, WandB, tracker
from jaxcross.report.tracker import Tracker

FOLDER = Path(sys.argv[2])
FOLDER.mkdir(exist_ok=True)
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_DIR": str(FOLDER),
    "MLFLOW_TRACKING_URI": f"sqlite:///{FOLDER / 'mlflow.db'}",
}
# Importing MLflow and creating its database takes more than a minute on a busy machine, and the end
# of a run only waits for half of the stall timeout.
WORLD = jaxcross.initialize(stall_timeout_s=1200)
tracker._PATIENCE_S = 600
SENT = threading.Event()
UNSENT = {"a", "b", "fails"}


@jaxcross.crossover(axes="batch")
def step(w, x):
    return w + jax.lax.pmean(x, "batch"), {"loss": jnp.sum(w)}


def train(job, lr, steps=12, **_):
    w = job.restore(jnp.full(2, lr))
    job.every(4, lambda w: {"norm": jnp.sum(w)})
    for x in job.batches([jnp.ones(2)] * steps):
        w, metrics = step(w, x)
        job.state = w
        job.log(metrics)
        if job.step % 3 == 0:
            job.save(w)
        if job.name == "a" and job.step == LAST and WORLD.rank == 0:
            if HOW == "wait":
                job._engine.read_back()
                assert SENT.wait(120)
            os.kill(os.getpid(), signal.SIGKILL)
    if lr == 7.0:
        raise RuntimeError("on purpose")
    return w


def watched(open_run):
    """Sets `SENT` once MLflow has step `LAST` of job `a`, and the runs of all other jobs."""

    def opened(self, job):
        run = open_run(self, job)
        write = run.write

        def write_and_tell(rows):
            write(rows)
            if job.name != "a" or any(row.step >= LAST for row in rows):
                UNSENT.discard(job.name)
            if not UNSENT:
                SENT.set()

        run.write = write_and_tell
        return run

    return opened


def jobs():
    checkpoints = jaxcross.Checkpoints(FOLDER / "checkpoints")
    with jaxcross.Runner(
        WORLD, checkpoints=checkpoints, metrics=FOLDER / "metrics", instruments=TRACKERS
    ) as runner:
        runner.add("a", train, {"lr": 0.5, "data": [jnp.ones(2)], "tags": {"x": [1, 2]}})
        runner.add("b", train, {"lr": 0.25})
        runner.add("fails", train, {"lr": 7.0})
        try:
            runner.run()
        except jaxcross.JobError as error:
            assert "on purpose" in str(error)


def sweep():
    import optuna

    search = jaxcross.Grid({"lr": [0.0, 1.0, 2.0, 3.0]}, pruner=optuna.pruners.MedianPruner(1, 3))
    jaxcross.sweep(
        train, search, metric="loss", mode="min", folder=FOLDER / "my sweep", instruments=TRACKERS
    )


def unreachable():
    """Nothing listens on port 9 of this machine."""
    os.environ |= {
        "MLFLOW_TRACKING_URI": "http://localhost:9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://localhost:9",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_INIT_TIMEOUT": "1",
    }
    with jaxcross.Runner(WORLD, instruments=TRACKERS) as runner:
        job = runner.add("a", train, {"lr": 0.5})
        runner.run()
    assert (job.status, job.step) == ("ended", 12)


class Slow(Tracker):
    """Takes longer to send a job's end than the other rank takes to fail with the job's error."""

    service = suffix = "slow"
    reopens = True

    def open_run(self, job):
        return self

    def write(self, rows):
        pass

    def finish(self, status):
        threading.Event().wait(5)
        (FOLDER / "finished").write_text(status)


def slow():
    with jaxcross.Runner(WORLD, instruments=[Slow()]) as runner:
        runner.add("fails", train, {"lr": 7.0})
        runner.run()


LAST, HOW = (int(sys.argv[3]), sys.argv[4]) if len(sys.argv) > 3 else (-1, "")
MLflow.open_run = watched(MLflow.open_run)
TRACKERS = [WandB("project"), MLflow("experiment")]
{"jobs": jobs, "sweep": sweep, "unreachable": unreachable, "slow": slow}[sys.argv[1]]()
