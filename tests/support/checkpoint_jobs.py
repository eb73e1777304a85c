"""Jobs on ranks that are threads.

All their arithmetic is exact, so what a checkpoint restores can be compared bit for bit.
"""

import logging

import numpy as np

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.jobs.engine import current_engine
from jaxcross.jobs.runner import Runner
from tests.support.fakes import FakeCompiled, plain_program, run_ranks

STEPS = 12


class BrokenError(Exception):
    """Raised by a job's data, to end the job early."""


def init(world, *, own):
    """`w` is identical on all ranks. With `own`, each rank also has a rank-local `residual`."""
    return {"w": np.arange(3.0), **({"residual": np.full(2, float(world.rank))} if own else {})}


def make_step(world, name="step", result=lambda new: new):
    def compute(segment, values):
        state, x = values
        if segment == 0:
            return x * (1.0 + state["w"].sum() / 1024)
        new = {"w": state["w"] / 2 + x}
        return result(
            new | ({"residual": state["residual"] / 2 + world.rank} if "residual" in state else {})
        )

    compiled = FakeCompiled(plain_program(name), world, compute)
    return lambda state, batch: current_engine().run(compiled, [state, batch], compiled)


def batches(world, seed=0):
    rng = np.random.default_rng((seed, world.rank))
    while True:
        yield float(rng.integers(1024))


def ending(data, after):
    """Yields `data`, and raises before batch number `after`."""
    for n, batch in enumerate(data):
        if n == after:
            raise BrokenError
        yield batch


def loop(job, world, data, *, own=False, every=3, steps=STEPS):
    step, state = (
        make_step(world, job.name),
        job.restore(init(world, own=own), mode="local" if own else "check"),
    )
    for batch in job.batches(data, steps):
        state = step(state, batch)
        job.state = state
        job.log({"loss": float(state["w"].sum())})
        if job.step % every == 0:
            job.save(state)
    return state


def train(
    ranks,
    directory,
    *,
    after=None,
    names=("a", "b"),
    keep=2,
    fn=loop,
    data=batches,
    metrics=None,
    **kwargs,
):
    """Runs the jobs on `ranks` ranks. Returns, by rank, name -> (state, step, history, error).

    Args:
        after: Number of batches after which each job's data raises.
        directory: Folder of the checkpoints, rank -> folder, or None for no checkpoints.
        metrics: Folder for what the jobs log.
    """

    def work(world):
        folder = directory(world.rank) if callable(directory) else directory
        checkpoints = None if folder is None else Checkpoints(folder, keep=keep)
        runner = Runner(world, checkpoints=checkpoints, metrics=metrics)
        for n, name in enumerate(names):
            mine = data(world, n)
            runner.add(
                name,
                fn,
                {"world": world, "data": mine if after is None else ending(mine, after), **kwargs},
            )
        try:
            runner.run()
        except JobError as error:
            if "BrokenError" not in str(error):
                raise
        return {
            job.name: (job.state, job.step, dict(job.history), job.error) for job in runner.jobs
        }

    return run_ranks(ranks, work)


def same(one, other):
    """Checks that two states are equal, bit for bit."""
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].tobytes() == other[key].tobytes(), key


def resumes(caplog):
    """The warnings about checkpoints that couldn't be used."""
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "jaxcross" and r.levelno == logging.WARNING
    ]
