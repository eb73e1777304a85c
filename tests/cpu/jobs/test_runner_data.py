"""The data of a job: how its loop ends, when the data are closed, how examples are counted."""

import itertools
import logging
import queue
import threading
from logging.handlers import QueueHandler

import numpy as np
import pytest

from jaxcross.errors import JobError
from jaxcross.interleave.instrument import Instrument
from jaxcross.jobs.batch_loops import count_examples
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import loop, make_step, solo


def test_data_that_ends_on_one_rank_ends_loop_on_all():
    """Data that end on one rank end the loop on all; the report names ranks that had more."""
    ready = threading.Event()

    def data(world):
        yield from [1.0] * 3
        if world.rank == 0:
            assert ready.wait(60)  # rank 1 needs a fifth batch once its fourth is ready
        else:
            yield 1.0
            ready.set()
            yield 1.0

    def work(world):
        runner = Runner(world)
        job = runner.add("a", loop, {"step": make_step(world), "data": data(world)})
        report = runner.run()
        (facts,) = report.jobs
        said = (
            "a: its loop ended with the shortest rank's data; rank 1 had more, which was not used."
            in str(report)
        )
        return job.step, job.state, facts.left_over, said

    assert run_ranks(2, work) == [(3, solo([[1.0] * 3] * 2), (1,), True)] * 2


@pytest.mark.parametrize(
    ("data", "steps", "message"),
    [
        (
            None,
            None,
            "TypeError: `batches` of job `a` must be an iterable of batches, got a `NoneType`",
        ),
        (
            "abc",
            None,
            "TypeError: `batches` of job `a` must be an iterable of batches, got a `str`",
        ),
        (
            {"x": 1.0},
            None,
            (
                "TypeError: `batches` of job `a` must be .* got a `dict`; this looks like a single "
                "batch"
            ),
        ),
        ([1.0], -1, "ValueError: `steps` of job `a` must be at least 0, got -1"),
        ([1.0], "3", "TypeError: `steps` of job `a` must be a whole number, got '3'"),
    ],
)
def test_a_loop_that_cannot_run_fails_its_job(data, steps, message):
    def work(world):
        runner = Runner(world)
        runner.add("a", lambda job: list(job.batches(data, steps)))
        other = runner.add("b", loop, {"step": make_step(world), "data": [1.0, 2.0]})
        with pytest.raises(
            JobError, match=f"^Job `a` failed on (ranks 0, 1|rank [01]) after step 0: {message}"
        ):
            runner.run()
        return other.status

    assert run_ranks(2, work) == ["ended", "ended"]


def test_steps_limit_the_batches():
    def work(world):
        job = (runner := Runner(world)).add(
            "a", loop, {"step": make_step(world), "data": iter(lambda: 1.0, None), "steps": 4}
        )
        runner.run()
        return job.step

    assert run_ranks(2, work) == [4, 4]


def test_data_may_fill_one_buffer_again_and_again():
    memory = np.zeros(32, np.float32)
    start = -memory.ctypes.data % 64 // 4  # the CPU backend would use aligned memory in place

    def data():
        for value in range(6):
            memory[start] = value
            yield memory[start : start + 1]

    def work(world):
        job = (runner := Runner(world)).add("a", loop, {"step": make_step(world), "data": data()})
        runner.run()
        return job.state.tolist()

    assert run_ranks(1, work) == [[solo([[0, 1, 2, 3, 4, 5]])]]


def counting(closed):
    """Yields endless data that report which thread closed them."""
    try:
        yield from itertools.count(1.0)
    finally:
        closed.put(threading.current_thread().name)


@pytest.mark.parametrize("steps", [None, 4])
def test_data_is_closed_if_its_loop_ends_early(steps):
    def work(world):
        closed = queue.Queue()
        held = counting(closed)

        def fn(job, step):
            for batch in job.batches(held, steps):
                step(0.0, batch)
                if job.step == 3:
                    break

        runner = Runner(world)
        runner.add("a", fn, {"step": make_step(world)})
        runner.run()
        return closed.get(timeout=60), next(held, "closed")

    assert run_ranks(2, work) == [("jaxcross-feed-0.0", "closed")] * 2


def test_data_is_closed_if_another_rank_has_less():
    def work(world):
        closed = queue.Queue()
        data = itertools.islice(counting(closed), 2) if world.rank else counting(closed)
        job = (runner := Runner(world)).add("a", loop, {"step": make_step(world), "data": data})
        runner.run()
        return job.step, world.rank or closed.get(timeout=60)

    assert run_ranks(2, work) == [(2, "jaxcross-feed-0.0"), (2, 1)]


def test_data_continues_in_the_next_loop_then_is_freed():
    """Data that outlast a loop continue in the next one, and aren't retained afterwards."""

    def work(world):
        closed = queue.Queue()

        def fn(job, step):
            data = counting(closed)
            return [step(0.0, batch) for _ in range(2) for batch in job.batches(data, 3)]

        job = (runner := Runner(world)).add("a", fn, {"step": make_step(world)})
        runner.run()
        closed.get(timeout=60)  # all references are gone, although `runner` lives
        return job.state

    assert run_ranks(1, work) == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]


def test_what_closing_the_data_raises_is_logged(monkeypatch):
    logged = queue.Queue()
    monkeypatch.setattr(logging.getLogger("jaxcross"), "handlers", [QueueHandler(logged)])

    def data():
        try:
            yield from itertools.count(1.0)
        finally:
            raise OSError("disk gone")

    def work(world):
        job = (runner := Runner(world)).add("a", lambda job: next(job.batches(data())))
        runner.run()
        return job.state, logged.get(timeout=60).getMessage()

    ((state, message),) = run_ranks(1, work)
    assert state == 1.0
    assert message.startswith(
        "`close()` of the data given to job.batches raised an exception, which"
    )


def test_nested_loops_over_batches():
    def work(world):
        runner = Runner(world)

        def fn(job, step):
            seen = []
            for a in job.batches([1.0, 2.0]):
                seen += [a, *job.batches([10.0] * (1 + world.rank))]
                step(0.0, a)
            return seen

        job = runner.add("a", fn, {"step": make_step(world)})
        runner.run()
        return job.state

    assert run_ranks(2, work) == [[1.0, 10.0, 2.0, 10.0]] * 2


@pytest.mark.integration
def test_examples_per_step_is_the_mean_of_its_batches():
    """Neither the first batch nor an evaluation's batches decide, but what the job sets does."""

    def work(world):
        runner = Runner(world)
        evaluate = make_step(world, "evaluate")

        def fn(job, step, own):
            for batch in job.batches([np.ones((n, 2), np.float32) for n in (2, 4, 3)]):
                step(0.0, batch)
                if own:
                    job.examples_per_step = 10.0
            for batch in job.batches([np.ones((50, 2), np.float32)]):
                evaluate(0.0, batch)

        for own in (False, True):
            runner.add(f"{own}", fn, {"step": make_step(world), "own": own})
        return [job.examples_per_step for job in runner.run().jobs]

    assert run_ranks(2, work) == [[6.0, 10.0]] * 2


@pytest.mark.parametrize(
    ("shape", "unit"),
    [
        ((4, 32, 32, 3), "images"),
        ((4, 1, 28, 28), "images"),
        ((4, 32, 32, 64), "examples"),
        ((4, 128), "examples"),
        ((4, 8, 4, 16), "examples"),
        ((4,), "examples"),
    ],
)
def test_only_batches_of_images_are_called_images(shape, unit):
    assert count_examples({"x": np.zeros(shape, np.float32), "y": np.zeros(4)}, 2) == (8.0, unit)


class Slow:
    """Batches, each of which adds `waited_s` seconds to the time spent waiting for storage."""

    def __init__(self, waited_s):
        self.each_s, self.count = waited_s, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        return 1.0

    def waited_s(self):
        return {level: seconds * self.count for level, seconds in self.each_s.items()}


@pytest.mark.parametrize(
    ("waited_s", "level"),
    [({"disk": 1e8, "origin": 1e9}, "origin"), ({"disk": 1e-12}, ""), ({}, "")],
)
def test_input_spans_name_the_level_that_waited(waited_s, level):
    """A span names the level that reading waited for longest, if at least half of the time."""

    found = []

    class Labels(Instrument):
        def span(self, span):
            if span.kind == "input":
                found.append(span.label)

    def work(world):
        runner = Runner(world, instruments=[Labels()])
        runner.add("a", loop, {"step": make_step(world), "data": Slow(waited_s), "steps": 3})
        runner.run()

    run_ranks(1, work)
    assert found == [level] * 3
