"""Interrupted jobs resume as if they had never stopped, on any ranks and with any data."""

import itertools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross.checkpoint import Checkpoints
from jaxcross.checkpoint.checkpointer import JobCheckpointer, Writer
from jaxcross.checkpoint.folders import Folders
from jaxcross.checkpoint.rank_gather import JobLog
from jaxcross.errors import JobError
from jaxcross.interleave.instrument import SpanLog
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import (
    STEPS,
    BrokenError,
    batches,
    init,
    loop,
    make_step,
    resumes,
    same,
    train,
)
from tests.support.fakes import FakeControl, FakeWorld, run_ranks


@pytest.mark.integration
@pytest.mark.parametrize("own", [False, True], ids=["equal", "own"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_restarted_jobs_equal_uninterrupted_ones(ranks, own, tmp_path):
    whole = train(ranks, None, own=own)
    for after, steps in ((4, STEPS), (None, 8)):
        # With a save at every step, all ranks have finished saving when one of them fails.
        for rank in train(
            ranks, tmp_path, after=after, own=own, steps=steps, every=1 if after else 3
        ):
            assert rank["a"][1] == (after or steps)
    for rank, (mine, theirs) in enumerate(zip(train(ranks, tmp_path, own=own), whole, strict=True)):
        for job in "ab":
            same(mine[job][0], theirs[job][0])
            assert mine[job][1] == STEPS
            assert sorted(mine[job][2]) == list(range(9, STEPS + 1)), rank
            assert mine[job][2] == {step: m for step, m in theirs[job][2].items() if step > 8}


def test_a_finished_set_is_not_trained_again(tmp_path):
    first = train(2, tmp_path)
    for again, before in zip(train(2, tmp_path, data=lambda *_: iter(())), first, strict=True):
        for job in "ab":
            same(again[job][0], before[job][0])
            assert again[job][1:3] == (STEPS, {})


@pytest.mark.integration
def test_so_many_are_kept(tmp_path):
    train(2, tmp_path, keep=2, steps=11)
    for job in "ab":
        steps = [int(folder.name[:12]) for folder in sorted((tmp_path / job).glob("0*/"))]
        assert steps == [9, 11]
        assert {p.parent.name for p in (tmp_path / job).glob("*/*/part.json")} == {
            "rank-0000",
            "rank-0001",
        }
    train(2, tmp_path, keep=1)
    assert [int(folder.name[:12]) for folder in (tmp_path / "a").glob("0*/")] == [12]


@pytest.mark.integration
def test_equal_leaves_are_written_by_one_rank(tmp_path):
    train(3, tmp_path, own=False)
    assert {p.parent.name for p in tmp_path.glob("*/*/*/state")} == {"rank-0000"}


@pytest.mark.integration
def test_each_node_may_have_a_disk_of_its_own(tmp_path):
    whole = train(2, None, own=True)
    train(2, lambda rank: tmp_path / str(rank), own=True, after=7, every=1)
    for mine, theirs in zip(
        train(2, lambda rank: tmp_path / str(rank), own=True), whole, strict=True
    ):
        same(mine["a"][0], theirs["a"][0])
        assert min(mine["a"][2]) == 8


class Counting:
    """An iterator that can save and restore its position."""

    def __init__(self, world, state_of=lambda n: {"next": n}):
        self.world, self.n, self.state_of, self.sets = world, 0, state_of, []

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return float(self.n * 7 % 11 + self.world.rank)

    def get_state(self):
        return self.state_of(self.n)

    def set_state(self, state):
        self.sets.append(state)
        self.n = state["next"] if isinstance(state, dict) else int(state)


@pytest.mark.parametrize(
    "state_of", [lambda n: {"next": n}, lambda n: b"%d" % n, lambda n: {"next": {n}}]
)
def test_an_iterator_is_set_to_its_place(state_of, tmp_path):
    """After a restart, the job continues with the batch after the last one it trained on.

    When the job failed, it had already received the next batch, and two more were prefetched.
    """
    made = []

    def data(world, seed):
        made.append(Counting(world, state_of))
        return made[-1]

    def fn(job, world, data, steps):
        step, state = make_step(world), job.restore(init(world, own=False))
        for batch in job.batches(data, steps):
            if job.step == 5 and steps == 6:
                raise BrokenError
            state = step(state, batch)
        return state

    whole = train(1, None, names="a", fn=fn, data=data, steps=STEPS)
    assert "BrokenError" in str(train(1, tmp_path, names="a", fn=fn, data=data, steps=6)[0]["a"][3])
    mine = train(1, tmp_path, names="a", fn=fn, data=data, steps=STEPS)
    same(mine[0]["a"][0], whole[0]["a"][0])
    written = state_of(5)
    assert made[-1].sets == ([] if written == {"next": {5}} else [written])


@pytest.mark.integration
@pytest.mark.parametrize("threads", [0, 2])
def test_grain_iterator_resumes_at_its_position(threads, tmp_path):
    def data(world, seed):
        numbers = grain.MapDataset.range(200).shuffle(seed=seed).map(float)
        return numbers.to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * bool(threads))
        )

    whole = train(2, None, data=data)
    train(2, tmp_path, data=data, steps=7)
    for mine, theirs in zip(train(2, tmp_path, data=data), whole, strict=True):
        same(mine["b"][0], theirs["b"][0])


def test_failed_job_resumes_after_last_committed_step(tmp_path):
    whole = train(1, None, names="a")
    train(1, tmp_path, names="a", after=5, every=100)
    mine = train(1, tmp_path, names="a", every=100)
    same(mine[0]["a"][0], whole[0]["a"][0])
    assert min(mine[0]["a"][2]) == 6


def test_evaluation_in_the_loop_starts_anew_each_time(tmp_path):
    def fn(job, world, data, steps):
        step, state = make_step(world), job.restore(init(world, own=False))
        for batch in job.batches(data, steps):
            state = step(state, batch)
            if job.step % 2 == 0:
                job.log({"evaluated": [float(x) for x in job.batches([1.0, 2.0, 3.0])]})
                job.save(state)
        return state

    whole = train(2, None, names="a", fn=fn, steps=8)
    train(2, tmp_path, names="a", fn=fn, steps=5)
    mine = train(2, tmp_path, names="a", fn=fn, steps=8)
    same(mine[0]["a"][0], whole[0]["a"][0])
    assert mine[0]["a"][2] == {step: m for step, m in whole[0]["a"][2].items() if step > 5}


def test_the_plain_loop_saves_by_itself(tmp_path):
    def work(world, steps):
        jobs = [
            Job(
                "a",
                make_step_with_metrics(world),
                init(world, own=False),
                batches(world),
                steps=steps,
            )
        ]
        run(jobs, world=world, checkpoints=Checkpoints(tmp_path, every=2, keep=9))
        return jobs[0].state, jobs[0].step

    run_ranks(2, lambda world: work(world, 5))
    assert [int(folder.name[:12]) for folder in sorted((tmp_path / "a").glob("0*/"))] == [2, 4, 5]
    states = run_ranks(2, lambda world: work(world, 8))
    assert [step for _, step in states] == [8, 8]
    same(states[0][0], train(2, None, names="a", steps=8)[0]["a"][0])


def make_step_with_metrics(world):
    step = make_step(world)
    return lambda state, batch: (step(state, batch), {})


@pytest.mark.parametrize("first", [{"n": 0}, {"n": jnp.int32(0)}], ids=["number", "array"])
def test_64_bit_values_do_not_resume_as_32_bit(first, tmp_path):
    """Restored as 32-bit, a counter would lose its upper half, and a parameter half its digits."""

    def work(world, x64, first, *, refused=False):
        def fn(job):
            with jax.enable_x64(x64):
                state = job.restore(first)
                step = make_step(world)
                for batch in job.batches(batches(world), 2):
                    step(init(world, own=False), batch)
                return {"n": state["n"] + jnp.asarray(2**40)} if x64 else state

        runner = Runner(world, checkpoints=Checkpoints(tmp_path))
        job = runner.add("a", fn)
        if refused:
            with pytest.raises(
                JobError, match=r"`\['n'\]` is int64\[\], which JAX has only with `jax_enable_x64`"
            ):
                runner.run()
        else:
            runner.run()
        return job.state

    with jax.enable_x64(True):
        wide = {"n": jnp.int64(0)}
    run_ranks(2, lambda world: work(world, True, wide))
    run_ranks(2, lambda world: work(world, False, first, refused=True))
    for state in run_ranks(2, lambda world: work(world, True, wide)):
        assert int(state["n"]) == 2**41


@pytest.mark.integration
def test_state_changed_between_steps_is_saved(tmp_path, caplog):
    """A state changed between steps isn't what the next step gets; it's lost if a job fails."""

    @jaxcross.crossover(axes="batch")
    def step(state, x):
        return {"w": state["w"] / 2 + jax.lax.pmean(x, "batch"), "average": state["average"]}, {}

    def fn(job, after, tells):
        state = job.restore({"w": jnp.zeros(2), "average": jnp.zeros(2)})
        for x in job.batches([jnp.float32(n) for n in range(8)]):
            if job.step == after:
                raise BrokenError
            state, _ = step(state, x)
            state = {"w": state["w"], "average": state["average"] / 2 + state["w"]}
            if tells:
                job.state = state
            if job.step == 3:
                job.save(state)
        return state

    def run(folder, after, *, tells):
        runner = Runner(jaxcross.initialize(), checkpoints=folder and Checkpoints(folder))
        job = runner.add("a", fn, {"after": after, "tells": tells})
        if after is None:
            runner.run()
        else:
            with pytest.raises(JobError, match="BrokenError"):
                runner.run()
        return {name: np.asarray(leaf) for name, leaf in job.state.items()}

    whole = run(None, None, tells=False)
    for tells, step_saved in ((True, 5), (False, 3)):
        folder = tmp_path / str(tells)
        run(folder, 5, tells=tells)
        assert [int(saved.name[:12]) for saved in sorted((folder / "a").glob("0*/"))][
            -1
        ] == step_saved
        same(run(folder, None, tells=tells), whole)
    (text,) = resumes(caplog)
    assert "changes what its step returns before the next one" in text


def test_resumed_job_counts_from_its_resume_point(tmp_path):
    """Spans, errors and reports count from the step at which the job resumes."""
    train(2, tmp_path, names="a", steps=5)

    def work(world):
        log = SpanLog()
        runner = Runner(world, instruments=[log], checkpoints=Checkpoints(tmp_path))
        job = runner.add(
            "a", loop, {"world": world, "data": itertools.islice(batches(world), 9), "every": 100}
        )
        report = runner.run()
        assert job.step == 9
        assert ("a", "status", -1, "resumes after step 5") in log.notes
        assert ("a", "done", 9, "ended") in log.notes
        assert [(f.steps, f.first_step, f.last_step) for f in report.jobs] == [(4, 5, 9)]
        assert "4 (6 to 9)" in str(report)
        return [s.step for s in log.spans if s.kind == "collective"]

    assert run_ranks(2, work) == [[6, 7, 8, 9]] * 2


def test_states_are_numpy_s_and_python_s_own(tmp_path):
    """A restored state belongs to the job alone, which may change it in place."""

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(tmp_path))

        def fn(job):
            state = job.restore({"w": np.zeros(2), "n": 0})
            state["w"] += 1
            step = make_step(world)
            for batch in job.batches(batches(world), job.step + 1):
                step({"w": state["w"]}, batch)
            return {**state, "n": state["n"] + 1}

        job = runner.add("a", fn)
        runner.run()
        return job.state

    run_ranks(2, work)
    for state in run_ranks(2, work):
        assert state["w"].tolist() == [2, 2]
        assert state["n"] == 2 and type(state["n"]) is int


def test_stop_right_after_the_marks_is_remembered(tmp_path):
    """Ranks may agree to stop after the lane read the marks but before the thread continues."""
    folders, writer = Folders(tmp_path, rank=0, ranks=1), Writer()
    (control,) = FakeControl.group(1)
    log, world = JobLog("a", print), FakeWorld(control)
    job = JobCheckpointer(log, world=world, folders=folders, keep=2, environment={}, writer=writer)
    folders.mark("left", "failed")

    def lane(label, work):
        found = work(control)
        job.mark_done("stopped")
        return found

    assert job.markers(lane) == (False, False)
    writer.close()
    assert folders.marked("left") == "stopped"
