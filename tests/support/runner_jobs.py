"""Jobs of a runner on ranks that are threads: steps that need no compiler, and a training loop."""

import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.jobs.engine import current_engine
from jaxcross.jobs.runner import Runner
from tests.support.fakes import FakeCompiled, plain_program, run_ranks


def add(segment, values):
    """Computes state + batch in the first segment, and state + the exchanged sum in the last."""
    return sum(values)


def make_step(world, name="step", *, exchanges=1, compute=add, shape=(), program=None):
    """A step like the one `crossover` makes for a job: `step(state, batch) -> state`."""
    compiled = FakeCompiled(
        program or plain_program(name, exchanges=exchanges, shape=shape), world, compute
    )

    def step(state, batch):
        return current_engine().run(compiled, [state, batch], compiled)

    return step


def loop(job, step, data, state=0.0, steps=None):
    state = job.restore(state)
    for batch in job.batches(data, steps):
        state = step(state, batch)
        job.save(state)
        job.log({"loss": float(job.step)})
    return state


def solo(data_by_rank, state=0.0):
    """What a data-parallel loop over `make_step` must compute."""
    for batches in zip(*data_by_rank, strict=False):
        state = state + sum(state + batch for batch in batches)
    return state


def failing_loop_results(ranks, start):
    """Runs job `bad`, made by `start(world)`, alongside job `good`, which must be unaffected."""

    def work(world):
        runner = Runner(world)
        bad = runner.add("bad", *start(world))
        good = runner.add(
            "good", loop, {"step": make_step(world, "good"), "data": [1.0, 2.0, 3.0, 4.0]}
        )
        with pytest.raises((JobError, ExchangeError)) as raised:
            runner.run()
        assert runner.report is not None
        assert good.state == solo([[1.0, 2.0, 3.0, 4.0]] * ranks)
        return raised.value, bad

    return run_ranks(ranks, work)
