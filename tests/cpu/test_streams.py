"""Loops over batches that come and go in one job: nothing of them stays, and a restart finds those that are open."""

import itertools
import threading

import pytest
from checkpoint_jobs import batches, init, make_step, same, train

from jaxcross.runner import Runner
from jaxcross.runtime.feed import Feed
from jaxcross.testing import run_ranks


def known(job):
    """How many loops each part of a run knows of, once the threads of those that are over have said their last."""
    for thread in threading.enumerate():
        feed = getattr(getattr(thread, "_target", None), "__self__", None)
        if isinstance(feed, Feed) and feed._driver is job._driver and feed.closed:
            thread.join(60)
            assert not thread.is_alive()
    interleaver = job._driver._interleaver
    mine, shared = interleaver._jobs[job._number], interleaver.agreed.jobs[job._number]
    return max(map(len, (job._feeds, mine.prepared, mine.limits, shared.streams)))


def loops(job, n):
    """One loop to its end, one that `steps` end, one that is left early, on rank 0 with data for more."""
    assert list(job.batches([float(n), 1.0])) == [n, 1.0]
    assert list(job.batches(itertools.count(1.0), 2)) == [1.0, 2.0]
    for batch in job.batches(itertools.count(1.0)):
        assert batch == 1.0
        break


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
        assert peak < 20  # what is open, and what began since this was counted last: ten loops


def test_the_places_of_the_loops_that_are_open_are_kept_in_their_order(tmp_path):
    def fn(job, world, data):
        step, state = make_step(world), job.restore(init(world, own=False))
        loops(job, 0)
        places = []
        for n, batch in enumerate(job.batches(data, 3)):
            loops(job, n)
            for inner in job.batches([1.0, 2.0]):
                loops(job, n)
                state = step(state, batch + inner)
                places.append([place.taken for place in job._resumption._places])
            loops(job, n)
            state = step(state, batch)
            places.append([place.taken for place in job._resumption._places])
        job.log(places)
        return state

    for rank in train(2, tmp_path, names="a", fn=fn):
        ((_, places),) = rank["a"][2].items()
        assert places == [place for n in (1, 2, 3) for place in ([n, 1], [n, 2], [n])]


def test_a_job_goes_on_after_many_loops_that_are_over(tmp_path):
    def fn(job, world, data, steps):
        step, state = make_step(world), job.restore(init(world, own=False))
        for n, batch in enumerate(job.batches(data, steps)):
            loops(job, n)
            state = step(state, batch + sum(x for _, x in zip(range(3), job.batches(batches(world, 7)), strict=False)))
            loops(job, n)
            job.save(state)
        return state

    whole = train(2, None, names="a", fn=fn, steps=8)
    for steps in (3, 5):
        train(2, tmp_path, names="a", fn=fn, steps=steps)
    for mine, theirs in zip(train(2, tmp_path, names="a", fn=fn, steps=8), whole, strict=True):
        same(mine["a"][0], theirs["a"][0])
        assert mine["a"][1] == theirs["a"][1] == 8


def test_a_job_goes_on_inside_a_loop_behind_others_that_are_over(tmp_path):
    """Two loops are open as it fails: the first two that are begun after the restart go on there."""

    def fn(job, world, data, breaks):
        step, state = make_step(world), job.restore(init(world, own=False))
        seen = []
        for batch in job.batches(itertools.count(1.0), 4):
            for inner in job.batches(itertools.count(10.0), 5):
                seen.append((batch, inner))
                state = step(state, inner)
                job.log([batch, inner])
                job.save(state)
                if job.step == breaks:
                    next(job.batches(data))
            loops(job, 0)
        return state

    logged = [[n, 10.0 + k] for n in (1.0, 2.0, 3.0, 4.0) for k in range(5)]
    train(2, tmp_path, names="a", fn=fn, breaks=8, after=0)
    for rank in train(2, tmp_path, names="a", fn=fn, breaks=None):
        # Behind batch 3 of the second inner loop, and the second outer batch, which was taken.
        assert list(rank["a"][2].values()) == [[3.0, 13.0], [3.0, 14.0], *logged[15:]]
        assert rank["a"][1] == 8 + 2 + 5
