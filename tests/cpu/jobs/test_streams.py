"""Batch loops that come and go within a job leave nothing behind; a restart finds the open ones."""

import itertools
import threading

import pytest

from jaxcross.errors import JobError
from jaxcross.jobs.prefetch import Prefetcher
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import batches, init, make_step, resumes, same, train
from tests.support.fakes import run_ranks


def known(job):
    """Returns how many loops each part of a run has, once threads of ended loops are gone."""
    for thread in threading.enumerate():
        prefetcher = getattr(getattr(thread, "_target", None), "__self__", None)
        if (
            isinstance(prefetcher, Prefetcher)
            and prefetcher._driver is job._engine.driver
            and prefetcher.closed
        ):
            thread.join(60)
            assert not thread.is_alive()
    interleaver = job._engine.driver._interleaver
    number = job._engine.record.number
    mine, shared = interleaver._jobs[number], interleaver.shared.jobs[number]
    return max(map(len, (job._engine.loops, mine.prepared, mine.limits, shared.streams)))


def loops(job, n):
    """Runs one loop to its end, one up to `steps`, and leaves one early with data left."""
    assert list(job.batches([float(n), 1.0])) == [n, 1.0]
    assert list(job.batches(itertools.count(1.0), 2)) == [1.0, 2.0]
    for batch in job.batches(itertools.count(1.0)):
        assert batch == 1.0
        break


@pytest.mark.mostly_integration("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_stays_of_loops_that_are_over(ranks):
    def work(world):
        step, runner = make_step(world), Runner(world)

        def fn(job):
            state, peak = init(world, own=False), 0
            for n, batch in enumerate(job.batches(batches(world), 30)):
                loops(job, n)
                for _, inner in zip(range(2), job.batches(itertools.count(5.0)), strict=False):
                    loops(job, n)
                    state = step(state, batch + inner)
                peak = max(peak, known(job))
            return peak

        job = runner.add("a", fn)
        runner.run()
        return job.state, job.step

    for peak, steps in run_ranks(ranks, work):
        assert steps == 60
        assert peak < 20  # what's open, plus what started since the last count: ten loops


def test_open_loop_positions_are_stored_in_order(tmp_path):
    def fn(job, world, data):
        step, state = make_step(world), job.restore(init(world, own=False))
        loops(job, 0)
        places = []
        for n, batch in enumerate(job.batches(data, 3)):
            loops(job, n)
            for inner in job.batches([1.0, 2.0]):
                loops(job, n)
                state = step(state, batch + inner)
                places.append(
                    [position.n_batches for position in job._engine.resumption._positions]
                )
            loops(job, n)
            state = step(state, batch)
            places.append([position.n_batches for position in job._engine.resumption._positions])
        job.log(places)
        return state

    for rank in train(2, tmp_path, names="a", fn=fn):
        ((_, places),) = rank["a"][2].items()
        assert places == [place for n in (1, 2, 3) for place in ([n, 1], [n, 2], [n])]


@pytest.mark.integration
def test_job_resumes_after_many_finished_loops(tmp_path):
    def fn(job, world, data, steps):
        step, state = make_step(world), job.restore(init(world, own=False))
        for n, batch in enumerate(job.batches(data, steps)):
            loops(job, n)
            state = step(
                state,
                batch
                + sum(x for _, x in zip(range(3), job.batches(batches(world, 7)), strict=False)),
            )
            loops(job, n)
            job.save(state)
        return state

    whole = train(2, None, names="a", fn=fn, steps=8)
    for steps in (3, 5):
        train(2, tmp_path, names="a", fn=fn, steps=steps)
    for mine, theirs in zip(train(2, tmp_path, names="a", fn=fn, steps=8), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert mine["a"][1] == theirs["a"][1] == 8


@pytest.mark.parametrize("form", ["one after the other", "one in another"])
def test_job_training_in_several_loops_is_not_saved(form, tmp_path):
    """A restart would start the function's first loop at the position of the open one."""

    def fn(job, world, data):
        step, state = make_step(world), job.restore(init(world, own=False))
        outer = [1.0, 2.0] if form == "one after the other" else job.batches([1.0, 2.0])
        for n, _ in enumerate(outer):
            for batch in job.batches(data, 3):
                state = step(state, batch)
                if n == 1:
                    with pytest.raises(
                        JobError, match="cannot save this state.*trains in several loops over"
                    ):
                        job.save(state)
            if n == 0:
                job.save(state)
        return state

    for ranks in train(2, tmp_path, names="a", fn=fn):
        assert ranks["a"][1] == 6
    assert [folder.name[:12] for folder in (tmp_path / "a").glob("0*/")] == ["000000000003"]


def test_job_resumed_at_loop_end_is_not_saved_later(tmp_path, caplog):
    """If a function derives finished epochs from `job.step`, an epoch is lost, with a warning."""

    def fn(job, world, data, epochs=2):
        step, state = make_step(world), job.restore(init(world, own=False))
        for _ in range(job.step // 3, epochs):
            for batch in job.batches(batches(world), 3):
                state = step(state, batch)
        return state

    train(2, tmp_path, names="a", fn=fn, epochs=1)
    assert not resumes(caplog)
    train(2, tmp_path, names="a", fn=fn, epochs=3)
    assert any(
        "its last state is not saved: its function trains in several loops" in text
        for text in resumes(caplog)
    )


def resumes_exactly(fn, folder):
    """Three steps, then a restart up to eight, give the same result as eight steps at once."""
    whole = train(2, None, names="a", fn=fn, steps=8)
    train(2, folder, names="a", fn=fn, steps=3)
    for mine, theirs in zip(train(2, folder, names="a", fn=fn, steps=8), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])


def test_two_loops_side_by_side_resume_at_their_positions(tmp_path, caplog):
    def fn(job, world, data, steps):
        step, state = make_step(world), job.restore(init(world, own=False))
        for batch, other in zip(
            job.batches(data, steps), job.batches(itertools.count(1.0)), strict=False
        ):
            state = step(state, batch + other)
            job.save(state)
        return state

    resumes_exactly(fn, tmp_path)
    assert not resumes(caplog)  # e.g. that a batch was used without an exchange


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_training_by_uncounted_calls_is_not_saved(evaluates_first, tmp_path):
    """Uncounted calls don't count their batches, so a restart would use those again."""

    def fn(job, world, data):
        warm_up, step = make_step(world, "warm_up"), make_step(world)
        evaluate = make_step(world, "evaluate", result=lambda new: new["w"].sum())
        state = job.restore(init(world, own=False))
        if evaluates_first:
            evaluate(state, 0.0)
        for n, batch in enumerate(job.batches(data, 4)):
            state = (warm_up if n < 2 else step)(state, batch)
            if n < 2 and not evaluates_first:
                evaluate(state, batch)
                job.save(state)
                continue
            first = "evaluate" if evaluates_first else "warm_up"
            with pytest.raises(JobError, match=f"only the calls of `{first}` count as steps"):
                job.save(state)
        return state

    for ranks in train(2, tmp_path, names="a", fn=fn):
        assert ranks["a"][3] is None


def test_two_functions_training_on_a_batch_are_saved(tmp_path):
    """A job in which two functions train on the same batch can be saved."""

    def fn(job, world, data, steps):
        one, other = make_step(world, "one"), make_step(world, "other")
        state = job.restore(init(world, own=False))
        for batch in job.batches(data, steps):
            state = other(one(state, batch), batch)
            job.save(state)
        return state

    resumes_exactly(fn, tmp_path)
