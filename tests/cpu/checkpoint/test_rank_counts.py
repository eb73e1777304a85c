"""Restoring on a different number of ranks keeps replicated state and rejects rank-local state."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.exchange.streaming_diloco import streaming_diloco
from jaxcross.exchange.top_k import TopKState
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import STEPS, batches, loop, make_step, resumes, same, train
from tests.support.fakes import run_ranks


@pytest.mark.mostly_integration("2-1")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_other_rank_count_restores_equal_state(before, after, tmp_path, caplog):
    saved = train(before, tmp_path, steps=6)
    for rank in train(after, tmp_path, steps=6):
        same(rank["a"][0], saved[0]["a"][0])
    assert any(
        f"{after} ranks resume from a checkpoint of {before}" in text for text in resumes(caplog)
    )
    assert not any("cannot be used" in text for text in resumes(caplog)), (
        "of a rank that there never was"
    )
    assert [rank["a"][1] for rank in train(after, tmp_path)] == [STEPS] * after


@pytest.mark.mostly_integration("2-3", "1-2")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_other_rank_count_rejects_rank_local_state(before, after, tmp_path, caplog):
    """If a single rank wrote it, the initial states of two ranks show what is rank-local."""
    train(before, tmp_path, own=True, names=("a",))

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        runner.add("a", loop, {"world": world, "data": batches(world), "own": True})
        said = rf"cannot resume on {after} ranks? .*which {before} ranks? wrote.*`\['residual'\]`"
        with pytest.raises(JobError, match=said):
            runner.run()

    run_ranks(after, work)
    assert not any("cannot be used" in text for text in resumes(caplog))


@pytest.mark.mostly_integration(
    "2-4-`\\\\['opt'\\\\]\\\\.(anchor|pending)", "1-2-`\\\\['opt'\\\\]\\\\.pending"
)
@pytest.mark.parametrize(
    ("ranks", "fragments", "said"),
    [(2, 2, ""), (2, 4, r"`\['opt'\]\.(anchor|pending)"), (1, 2, r"`\['opt'\]\.pending")],
)
def test_a_pending_fragment_fits_its_own_run_only(ranks, fragments, said, tmp_path):
    """A different number of fragments or ranks is rejected before the first step."""

    def work(world, count):
        begun = []

        def fn(job):
            tx = streaming_diloco(
                optax.sgd(0.1), optax.sgd(1.0), "b", every=4, fragments=count, delay=1
            )
            opt = tx.init({"w": jnp.ones(8)})
            state = job.restore({"w": np.zeros(3), "opt": opt}, mode="local")
            begun.append((job.step, state["opt"].pending[0].tolist()))
            step = make_step(world)
            for batch in job.batches(batches(world), 2 + job.step):
                sent = tuple(jnp.full_like(x, 1.0 + world.rank) for x in state["opt"].pending)
                state = (
                    state
                    | step({"w": state["w"]}, batch)
                    | {"opt": state["opt"]._replace(pending=sent)}
                )
                job.state = state
            return state

        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        runner.add("a", fn)
        try:
            runner.run()
        except JobError as error:
            return str(error)
        return begun[0]

    assert run_ranks(2, lambda world: work(world, 2)) == [(0, [0.0] * 4)] * 2
    found = run_ranks(ranks, lambda world: work(world, fragments))
    if said:
        assert all(
            isinstance(text, str) and re.search(rf"cannot resume.*{said}", text) for text in found
        ), found
    else:
        assert found == [(2, [1.0] * 4), (2, [2.0] * 4)]


@pytest.mark.parametrize("mode", ["check", "broadcast"])
def test_each_rank_resumes_with_its_own_named_leaf(mode, tmp_path):
    """A leaf named by `rank_local` is neither compared nor copied, even after two restarts."""

    def work(world, start, steps):
        def fn(job):
            w = np.full(3, float(world.rank if mode == "broadcast" else 0))
            first = {"w": w, "mask": np.full(2 + world.rank, start + world.rank)}
            step = make_step(world)
            state = job.restore(first, mode=mode, rank_local="mask", check_replicas=1)
            for batch in job.batches(batches(world), steps):
                job.state = state = step({"w": state["w"]}, batch) | {"mask": state["mask"] + 1}
            return state

        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        job = runner.add("a", fn)
        report = runner.run()
        return job.state["mask"].tolist(), report.jobs[0].replicas

    for start, steps in ((10, 2), (50, 4), (90, 6)):
        found = run_ranks(2, lambda world: work(world, start, steps))  # noqa: B023
        equal = "equal in 1 of 2 leaves"
        assert found == [([10 + steps] * 2, equal), ([11 + steps] * 3, equal)]


@pytest.mark.parametrize("saved_as", [(), "mask"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_other_rank_count_rejects_a_named_leaf(saved_as, before, after, tmp_path):
    """A leaf named by `rank_local` is rejected even if all ranks saved equal values.

    That holds even if `rank_local` didn't name the leaf when it was saved.
    """

    def work(world, names, steps):
        def fn(job):
            step, state = (
                make_step(world),
                job.restore({"w": np.zeros(3), "mask": np.ones(2)}, rank_local=names),
            )
            for batch in job.batches(batches(world), steps):
                job.state = state = state | step({"w": state["w"]}, batch)
            return state

        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        job = runner.add("a", fn)
        try:
            runner.run()
        except JobError as error:
            return str(error)
        return job.step

    assert run_ranks(before, lambda world: work(world, saved_as, 2)) == [2] * before
    refused = run_ranks(after, lambda world: work(world, "mask", 4))
    said = (
        rf"cannot resume on {after} ranks? .*which {before} ranks? wrote: "
        r".*`\['mask'\]`.*`rank_local`"
    )
    assert all(re.search(said, str(text)) for text in refused), refused
    assert run_ranks(before, lambda world: work(world, "mask", 4)) == [4] * before


def test_ranks_must_name_the_same_leaves():
    def work(world):
        runner = Runner(world)
        state = {"w": np.zeros(3), "mask": np.zeros(2)}
        runner.add("a", lambda job: job.restore(state, rank_local=("mask", "w")[: world.rank + 1]))
        with pytest.raises(
            JobError, match=r"different things on different ranks.*rank_local=\['mask', 'w'\]"
        ):
            runner.run()

    run_ranks(2, work)


def test_one_rank_checkpoint_resumes_broadcast_ranks(tmp_path):
    """A single rank's checkpoint works for ranks that would have started from rank 0's values."""
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
    """Residuals are zero when two ranks start, so only their type shows they're rank-local."""

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
                JobError,
                match=r"cannot resume on 2 ranks .*which 1 rank .*`\['opt'\].residual\['w'\]`",
            ):
                runner.run()
        return job.step

    assert run_ranks(1, work) == [2]
    assert run_ranks(2, work) == [0, 0]
    assert run_ranks(1, work) == [2]
