"""Checkpoints that another number of ranks restores: equal state is taken over, and a rank's own state is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.exchange.top_k import TopKState
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import STEPS, batches, loop, make_step, resumes, same, train
from tests.support.fakes import run_ranks


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_other_rank_count_restores_equal_state(before, after, tmp_path, caplog):
    """Another number of ranks takes over the state that was equal on all ranks."""
    saved = train(before, tmp_path, steps=6)
    for rank in train(after, tmp_path, steps=6):
        same(rank["a"][0], saved[0]["a"][0])
    assert any(f"{after} ranks go on from {before}" in text for text in resumes(caplog))
    assert not any("not whole" in text for text in resumes(caplog)), "of a rank that there never was"
    assert [rank["a"][1] for rank in train(after, tmp_path)] == [STEPS] * after


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_other_rank_count_rejects_rank_local_state(before, after, tmp_path, caplog):
    """Where one rank wrote them, the states that two would begin with tell."""
    train(before, tmp_path, own=True, names=("a",))

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        runner.add("a", loop, world=world, data=batches(world), own=True)
        said = rf"cannot resume on {after} ranks? .*which {before} ranks? wrote.*`\['residual'\]`"
        with pytest.raises(JobError, match=said):
            runner.run()

    run_ranks(after, work)
    assert not any("not whole" in text for text in resumes(caplog))


def test_one_rank_checkpoint_resumes_broadcast_ranks(tmp_path):
    """A checkpoint of one rank serves ranks that would have begun with rank 0's values."""
    saved = train(1, tmp_path, steps=6, names=("a",))

    def work(world):
        def fn(job):
            return job.restore({"w": np.full(3, float(world.rank))}, mode="broadcast")

        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        job = runner.add("a", fn)
        runner.run()
        return job.state

    for state in run_ranks(2, work):
        same(state, saved[0]["a"][0])


def test_residuals_saved_by_one_rank_are_not_copied(tmp_path):
    """They are zero when two ranks begin: nothing tells but what they are."""

    def work(world):
        def fn(job):
            opt = TopKState(step=jnp.zeros(()), residual={"w": np.full(3, float(job.step))})
            step, state = make_step(world), job.restore({"w": np.zeros(3), "opt": opt})
            for batch in job.batches(batches(world), 2):
                state = state | step({"w": state["w"]}, batch)
            return state

        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        job = runner.add("a", fn)
        if world.size == 1:
            runner.run()
        else:
            with pytest.raises(
                JobError, match=r"cannot resume on 2 ranks .*which 1 rank .*`\['opt'\].residual\['w'\]`"
            ):
                runner.run()
        return job.step

    assert run_ranks(1, work) == [2]
    assert run_ranks(2, work) == [0, 0]
    assert run_ranks(1, work) == [2]
