"""The runner on ranks that are threads: jobs, batches, failures, interrupts, and every message."""

import io
import itertools
import logging
import queue
import re
import threading
from dataclasses import replace
from logging.handlers import QueueHandler
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxcross.errors import ExchangeError, JobError
from jaxcross.interleave import messages as m
from jaxcross.interleave.instrument import SpanLog
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.jobs.context import current_job
from jaxcross.jobs.examples import count_examples
from jaxcross.jobs.outcome import MAX_ERRORS_SHOWN
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from jaxcross.report import LiveView
from tests.support.fakes import FakeCompiled, plain_program, run_ranks


def add(segment, values):
    """Compute: first segment state + batch, last one state + what was exchanged."""
    return sum(values)


def make_step(world, name="step", *, exchanges=1, compute=add, shape=()):
    """A step as `crossover` would hand it to the job: `step(state, batch) -> state`."""
    compiled = FakeCompiled(plain_program(name, exchanges=exchanges, shape=shape), world, compute)

    def step(state, batch):
        return current_job().host.run(compiled, [state, batch])

    return step


def loop(job, step, data, state=0.0, steps=None):
    state = job.restore(state)
    for batch in job.batches(data, steps):
        state = step(state, batch)
        job.save(state)
        job.log({"loss": float(job.step)})
    return state


def solo(data_by_rank, state=0.0):
    """What a data-parallel loop of `make_step` computes."""
    for batches in zip(*data_by_rank, strict=False):
        state = state + sum(state + batch for batch in batches)
    return state


@pytest.mark.parametrize("policy", [RoundRobin(), Weighted((1, 2, 1)), Sequential()])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_jobs_in_crossover_equal_jobs_alone(ranks, policy):
    data = {"a": [[1.0, 2.0, 3.0]] * ranks, "b": [[float(r), 5.0] for r in range(ranks)], "c": [[]] * ranks}

    def work(world):
        log = SpanLog()
        with Runner(world, policy, instruments=[log]) as runner:
            for name, batches in data.items():
                runner.add(name, loop, step=make_step(world, name), data=batches[world.rank])
            report = runner.run()
        order = [(s.job, s.step) for s in log.spans if s.kind == "collective"]
        return [(j.state, j.step) for j in runner.jobs], order, [f.facts.steps for f in report.rounds.jobs], log.notes

    results = run_ranks(ranks, work)
    for states, order, steps, notes in results:
        assert states == [(solo(batches), len(batches[0])) for batches in data.values()]
        assert order == results[0][1]
        assert steps == [3, 2, 0]
        assert {(job, value) for job, kind, _, value in notes if kind == "done"} == {(n, "ended") for n in data}
    if policy == Sequential():
        assert [job for job, _ in results[0][1]] == ["a"] * 3 + ["b"] * 2


def test_data_that_ends_on_one_rank_ends_the_loop_on_all():
    def work(world):
        runner = Runner(world)
        job = runner.add("a", loop, step=make_step(world), data=[1.0] * (5 if world.rank else 3))
        runner.run()
        return job.step, job.state

    assert run_ranks(2, work) == [(3, solo([[1.0] * 3] * 2))] * 2


@pytest.mark.parametrize(
    ("data", "steps", "message"),
    [
        (None, None, "TypeError: `batches` of job `a` must be an iterable of batches, got a `NoneType`"),
        ("abc", None, "TypeError: `batches` of job `a` must be an iterable of batches, got a `str`"),
        ({"x": 1.0}, None, "TypeError: `batches` of job `a` must be .* got a `dict`; this looks like a single batch"),
        ([1.0], -1, "ValueError: `steps` of job `a` must be at least 0, got -1"),
        ([1.0], "3", "TypeError: `steps` of job `a` must be a whole number, got '3'"),
    ],
)
def test_a_loop_that_cannot_run_fails_its_job(data, steps, message):
    def work(world):
        runner = Runner(world)
        runner.add("a", lambda job: list(job.batches(data, steps)))
        other = runner.add("b", loop, step=make_step(world), data=[1.0, 2.0])
        with pytest.raises(JobError, match=f"^Job `a` failed on (ranks 0, 1|rank [01]) after step 0: {message}"):
            runner.run()
        return other.status

    assert run_ranks(2, work) == ["ended", "ended"]


def test_steps_limit_the_batches():
    def work(world):
        job = (runner := Runner(world)).add("a", loop, step=make_step(world), data=iter(lambda: 1.0, None), steps=4)
        runner.run()
        return job.step

    assert run_ranks(2, work) == [4, 4]


def test_data_may_fill_one_buffer_again_and_again():
    memory = np.zeros(32, np.float32)
    start = -memory.ctypes.data % 64 // 4  # aligned, the CPU backend would use it in place

    def data():
        for value in range(6):
            memory[start] = value
            yield memory[start : start + 1]

    def work(world):
        job = (runner := Runner(world)).add("a", loop, step=make_step(world), data=data())
        runner.run()
        return job.state.tolist()

    assert run_ranks(1, work) == [[solo([[0, 1, 2, 3, 4, 5]])]]


def counting(closed):
    """Data without an end, that says in which thread it was closed."""
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
        runner.add("a", fn, step=make_step(world))
        runner.run()
        return closed.get(timeout=60), next(held, "closed")

    assert run_ranks(2, work) == [("jaxcross-feed-0.0", "closed")] * 2


def test_data_is_closed_if_another_rank_has_less():
    def work(world):
        closed = queue.Queue()
        data = itertools.islice(counting(closed), 2) if world.rank else counting(closed)
        job = (runner := Runner(world)).add("a", loop, step=make_step(world), data=data)
        runner.run()
        return job.step, world.rank or closed.get(timeout=60)

    assert run_ranks(2, work) == [(2, "jaxcross-feed-0.0"), (2, 1)]


def test_data_that_gave_all_its_steps_goes_on_in_the_next_loop_and_is_not_kept():
    def work(world):
        closed = queue.Queue()

        def fn(job, step):
            data = counting(closed)
            return [step(0.0, batch) for _ in range(2) for batch in job.batches(data, 3)]

        job = (runner := Runner(world)).add("a", fn, step=make_step(world))
        runner.run()
        closed.get(timeout=60)  # nobody has it any more, although `runner` lives
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
    assert message.startswith("`close()` of the data given to job.batches raised\nTraceback")


def failing_loop_results(ranks, guilty, start):
    """Job `bad` is made by `start(world)`; job `good` must not notice."""

    def work(world):
        runner = Runner(world)
        bad = runner.add("bad", *start(world)[:1], **start(world)[1])
        good = runner.add("good", loop, step=make_step(world, "good"), data=[1.0, 2.0, 3.0, 4.0])
        with pytest.raises((JobError, ExchangeError)) as raised:
            runner.run()
        assert runner.report is not None
        assert good.state == solo([[1.0, 2.0, 3.0, 4.0]] * ranks)
        return raised.value, bad

    return run_ranks(ranks, work)


@pytest.mark.parametrize(
    ("segment", "what"), [(0, "compute"), (2, "compute"), (4, "compute, after the commit: this rank lacks state 2")]
)
def test_a_failed_segment_ends_its_job_on_every_rank(segment, what):
    """Segment 0 fails before anything is exchanged, 2 between exchanges, 4 after the commit."""

    def start(world):
        calls = []

        def compute(index, values):
            calls.append(index)
            if world.rank == 1 and index == segment and calls.count(index) == 2:
                raise FloatingPointError("boom")
            return sum(values)

        return loop, {"step": make_step(world, "bad", exchanges=2, compute=compute), "data": [1.0, 1.0, 1.0]}

    results = failing_loop_results(2, 1, start)
    for rank, (error, _) in enumerate(results):
        assert str(error).startswith(
            f"Job `bad` failed on rank 1 in step 2, segment {segment} ({what}): FloatingPointError: boom."
        )
        assert isinstance(error.__cause__, FloatingPointError) == (rank == 1)
    # Before the commit nothing of step 2 came through anywhere; after it, the other rank has state 2.
    assert [bad.step for _, bad in results] == ([2, 1] if segment == 4 else [1, 1])
    assert (results[0][1].state == results[1][1].state) == (segment != 4)


def test_an_exception_in_a_job_ends_it_on_every_rank():
    def start(world):
        def fn(job, step):
            state = 0.0
            for n in range(4):
                if n == 2 and world.rank == 0:
                    raise KeyError("lost")
                state = step(state, 1.0)
                job.save(state)

        return fn, {"step": make_step(world, "bad")}

    for rank, (error, bad) in enumerate(failing_loop_results(2, 0, start)):
        assert str(error).startswith("Job `bad` failed on rank 0 after step 2: KeyError: 'lost'.")
        assert isinstance(error.__cause__, KeyError) == (rank == 0)
        assert bad.step == 2


def test_data_that_raises_on_one_rank_ends_the_job_on_every_rank():
    def start(world):
        def data():
            yield 1.0
            if world.rank == 1:
                raise OSError("disk gone")
            yield from [1.0, 1.0]

        return loop, {"step": make_step(world, "bad"), "data": data()}

    for error, bad in failing_loop_results(2, 1, start):
        assert str(error).startswith("Job `bad` failed on rank 1 after")
        assert "OSError: disk gone (raised by the data given to job.batches)" in str(error)
        assert bad.step == 1


def test_different_step_counts_are_an_error_on_every_rank():
    def start(world):
        def fn(job, step):
            for _ in range(3 if world.rank == 0 else 2):
                step(0.0, 1.0)

        return fn, {"step": make_step(world, "bad")}

    for error, bad in failing_loop_results(2, 0, start):
        assert str(error).startswith(
            "Job `bad` does different things on different ranks after step 2: rank 0 called step 3; rank 1 ended."
        )
        assert bad.step == 2


def test_different_exchanges_are_an_error_that_names_the_line():
    def start(world):
        return loop, {"step": make_step(world, "bad", shape=(world.rank,)), "data": [1.0]}

    for error, _ in failing_loop_results(2, 0, start):
        assert isinstance(error, ExchangeError)
        assert str(error).startswith(
            "Job `bad`, step 1: ranks 0 and 1 exchange different things in `bad`: exchange 1 is"
        )
        assert "rank 0: psum batch float32[0]" in str(error)
        assert "rank 1: psum batch float32[1]" in str(error)


def test_different_initial_states_are_an_error_unless_broadcast():
    def start(world):
        return loop, {"step": make_step(world, "bad"), "data": [1.0], "state": float(world.rank)}

    for error, _ in failing_loop_results(2, 0, start):
        assert "The state differs between ranks" in str(error)

    def work(world):
        runner = Runner(world)
        job = runner.add("a", lambda job: job.restore(float(world.rank), mode="broadcast"))
        runner.run()
        return job.state

    assert run_ranks(2, work) == [0.0, 0.0]


@pytest.mark.parametrize("mode", ["check", "broadcast", "local"])
def test_a_restored_state_is_a_copy(mode):
    mine = {"host": np.zeros(2), "device": jnp.zeros(2)}

    def work(world):
        job = (runner := Runner(world)).add("a", lambda job: job.restore(mine, mode=mode))
        runner.run()
        return job.state

    (state,) = run_ranks(1, work)
    mine["host"][:] = 1
    mine["device"].delete()
    assert state["host"].tolist() == state["device"].tolist() == [0, 0]


def test_a_run_in_a_run_is_refused_and_possible_afterwards():
    def work(world):
        inner = Runner(world)
        inner.add("inner", lambda job: 7.0)

        def fn(job, step):
            state = step(0.0, 1.0)
            with pytest.raises(JobError, match=r"^A run is in progress in this process, and two at once would mix up"):
                inner.run()
            with pytest.raises(JobError, match=r"^A run is in progress in this process"):
                run([Job("b", step, 0.0, [1.0])], world=world)
            return step(state, 1.0)

        outer = Runner(world)
        job = outer.add("outer", fn, step=make_step(world))
        outer.run()
        inner.run()
        return job.state, inner.jobs[0].state

    assert run_ranks(2, work) == [(solo([[1.0, 1.0]] * 2), 7.0)] * 2


@pytest.mark.parametrize("at", ["the first word", "the last words"])
def test_a_run_is_refused_in_another_thread_also_where_one_has_no_lanes(at):
    def work(world):
        meet, begun, go_on = world.control.meet, threading.Event(), threading.Event()
        runners = [Runner(world) for _ in range(2)]
        jobs = [runner.add("a", lambda job: 7.0) for runner in runners]

        def late(what, value):
            if not world.exchange_owner.lane_threads and (at == "the first word") == (jobs[0].status is None):
                begun.set()
                assert go_on.wait(60)
            return meet(what, value)

        world.control.meet = late
        thread = threading.Thread(target=runners[0].run)
        thread.start()
        assert begun.wait(60)
        for runner in runners:
            with pytest.raises(JobError, match=r"^A run is in progress in this process"):
                runner.run()
        go_on.set()
        thread.join(60)
        assert runners[0].report is not None
        runners[1].run()
        return [job.state for job in jobs]

    assert run_ranks(2, work) == [[7.0, 7.0]] * 2


def test_listeners_hear_how_a_job_ended():
    def fail(job):
        raise RuntimeError("boom")

    def work(world):
        log = SpanLog()
        runner = Runner(world, instruments=[log])
        runner.add("bad", fail)
        runner.add("good", lambda job: None)
        with pytest.raises(JobError):
            runner.run()
        return {job: (kind, str(value)[:23]) for job, kind, _, value in log.notes}

    assert run_ranks(1, work) == [{"bad": ("status", "Job `bad` failed on ran"), "good": ("done", "ended")}]


def test_several_failures_are_raised_as_one_with_notes():
    def fail(job):
        raise RuntimeError(job.name)

    def work(world):
        runner = Runner(world)
        runner.add("a", fail)
        runner.add("b", fail)
        with pytest.raises(JobError, match=r"^Job `a` failed on rank 0 after step 0: RuntimeError: a\.") as raised:
            runner.run()
        return raised.value.__notes__

    (notes,) = run_ranks(1, work)
    assert notes[0].startswith("Also: Job `b` failed on rank 0 after step 0: RuntimeError: b.")


def test_of_many_jobs_that_fail_the_first_are_told():
    def work(world):
        runner = Runner(world)

        def fails(job):
            raise RuntimeError(job.name)

        for n in range(MAX_ERRORS_SHOWN + 3):
            runner.add(f"job-{n:02d}", fails)
        with pytest.raises(JobError, match="^Job `job-00` failed") as raised:
            runner.run()
        return raised.value.__notes__

    (notes,) = run_ranks(1, work)
    assert len(notes) == MAX_ERRORS_SHOWN and notes[-1] == "And 3 more jobs failed: `runner.report` says why."


def test_an_interrupt_stops_all_ranks_at_the_same_step():
    def work(world):
        runner = Runner(world)

        def endless(job, step):
            state = 0.0
            for batch in job.batches(iter(lambda: 1.0, None)):
                if world.rank == 0 and job.step == 3 and job.name == "a":
                    job._life.driver.post(m.StopRequested())  # what the main thread does on Ctrl-C
                state = step(state, batch)
                job.save(state)

        for name in "ab":
            runner.add(name, endless, step=make_step(world, name))
        with pytest.raises(KeyboardInterrupt):
            runner.run()
        return [(job.step, job.state, job.error) for job in runner.jobs]

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0][0] >= 3


def test_ranks_that_exchange_at_different_calls_are_told():
    """Alike exchanges, in unlike steps: `cond(n % 3 == 2, pmean)` with counters that began apart."""

    def work(world):
        exchanges = make_step(world)
        local = replace(plain_program(exchanges=0), traced=SimpleNamespace(choices=(0,)))
        compiled = FakeCompiled(local, world, add)

        def fn(job):
            state = 0.0
            for n in range(world.rank, world.rank + 6):
                state = exchanges(state, 1.0) if n % 3 == 2 else job.host.run(compiled, [state, 1.0])

        runner = Runner(world)
        bad = runner.add("bad", fn)
        good = runner.add("good", loop, step=make_step(world, "good"), data=[1.0, 2.0])
        with pytest.raises(
            ExchangeError, match=r"^Job `bad` takes a branch with exchanges at different calls: rank 0 in step 3, rank "
        ) as error:
            runner.run()
        return str(error.value), bad.status, good.status, good.state

    first, second = run_ranks(2, work)
    assert first == second
    assert "rank 1 in step 2. Its predicate must be the same on every rank: look at counters" in first[0]
    assert first[1:] == ("failed", "ended", solo([[1.0, 2.0]] * 2))


def test_work_without_exchanges_takes_its_turn_and_is_no_step():
    def work(world):
        runner = Runner(world)
        evaluate = make_step(world, "evaluate", exchanges=0)

        def fn(job, step):
            for batch in job.batches([1.0, 2.0]):
                step(0.0, batch)
                assert evaluate(1.0, 2.0) == 3.0
            return evaluate(1.0, float(job.step))

        jobs = [runner.add(name, fn, step=make_step(world, name)) for name in "ab"]
        runner.run()
        return [job.state for job in jobs]

    assert run_ranks(2, work) == [[3.0, 3.0]] * 2


def test_evaluation_with_exchanges_is_no_step():
    def work(world):
        out = io.StringIO()
        view = LiveView({"a": 2}, console=Console(file=out, width=100))
        runner = Runner(world, instruments=[view])
        evaluate = make_step(world, "evaluate")

        def fn(job, step):
            for batch in job.batches([1.0, 2.0]):
                step(0.0, batch)
                evaluate(1.0, 2.0)
            return job.step

        job = runner.add("a", fn, step=make_step(world))
        report = runner.run()
        assert report.rounds.rounds == 1  # the report does not count them, nor does the live view
        last = [line for line in out.getvalue().splitlines() if "done" in line]
        assert len(last) == 1 and last[0].startswith("a: step 2/2")
        return job.state, report.jobs[0].steps

    assert run_ranks(2, work) == [(2, 2)] * 2


def test_steps_have_their_numbers_beside_evaluations():
    """Errors, notes and spans count what `job.step` does, though all calls exchange."""

    def work(world):
        log = SpanLog()
        runner = Runner(world, instruments=[log])
        evaluate = make_step(world, "evaluate")

        def fn(job, step):
            for batch in job.batches([1.0, 2.0, 3.0, 4.0]):
                if job.step == 3:
                    raise ValueError("boom")
                step(0.0, batch)
                evaluate(1.0, evaluate(1.0, 2.0))

        runner.add("a", fn, step=make_step(world))
        with pytest.raises(JobError, match="after step 3: ValueError: boom. Every rank leaves the job after step 3,"):
            runner.run()
        exchanges = [(s.step, s.other_calls, s.in_step) for s in log.spans if s.kind == "collective"]
        return exchanges, [step for _, kind, step, _ in log.notes if kind == "status"]

    calls = [(step, 2 * step - 2 + n, n == 0) for step in (1, 2, 3) for n in range(3)]
    assert run_ranks(2, work) == [(calls, [3])] * 2


def test_an_evaluation_that_fails_is_not_called_a_step():
    def work(world):
        runner = Runner(world)

        def fn(job, step, evaluate):
            for batch in job.batches([1.0, 2.0, 3.0, 4.0]):
                step(0.0, batch)
                evaluate(1.0, float(job.step))

        def fails(values):
            if values[-1] == 2.0:
                raise ValueError("boom")
            return add(0, values)

        evaluate = make_step(world, "evaluate", compute=lambda segment, values: fails(values))
        runner.add("a", fn, step=make_step(world), evaluate=evaluate)
        with pytest.raises(JobError, match=r"in a call after step 2, segment 0 .*leaves the job after step 2,"):
            runner.run()

    run_ranks(2, work)


def test_nested_loops_over_batches():
    def work(world):
        runner = Runner(world)

        def fn(job, step):
            seen = []
            for a in job.batches([1.0, 2.0]):
                seen += [a, *job.batches([10.0] * (1 + world.rank))]
                step(0.0, a)
            return seen

        job = runner.add("a", fn, step=make_step(world))
        runner.run()
        return job.state

    assert run_ranks(2, work) == [[1.0, 10.0, 2.0, 10.0]] * 2


def test_logs_are_read_back_in_order():
    def work(world):
        log = SpanLog()
        runner = Runner(world, instruments=[log])
        job = runner.add("a", loop, step=make_step(world), data=[np.ones((4, 2), np.float32)] * 3)
        report = runner.run()
        assert [n[2:] for n in log.notes if n[1] == "loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
        facts = report.rounds.jobs[0].facts
        assert (facts.final_loss, facts.examples_per_step) == (3.0, 4.0 * world.size)
        return job.history

    assert run_ranks(1, work) == [[(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0})]]


def test_examples_of_a_step_are_the_mean_of_its_batches():
    """Neither the first batch nor those of an evaluation decide; what the job sets does."""

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
            runner.add(f"{own}", fn, step=make_step(world), own=own)
        return [job.examples_per_step for job in runner.run().jobs]

    assert run_ranks(2, work) == [[6.0, 10.0]] * 2


def test_what_was_logged_may_be_donated_or_overwritten():
    def train(job):
        step = jax.jit(lambda state, x: {"n": state["n"] + 1, "w": state["w"] @ x}, donate_argnums=0)
        state, buffer = {"n": jnp.zeros((), int), "w": jnp.eye(200)}, np.zeros(())
        for n in range(20):
            state = step(state, jnp.eye(200))
            buffer[...] = n
            job.log({"n": state["n"], "buffer": buffer})

    def work(world):
        job = (runner := Runner(world)).add("a", train)
        runner.run()
        return [(values["n"], values["buffer"]) for _, values in job.history]

    assert run_ranks(1, work) == [[(n + 1, n) for n in range(20)]]


def test_a_logged_key_is_read_back_as_its_words():
    key = jax.random.key(7)

    def work(world):
        job = (runner := Runner(world)).add("a", lambda job: job.log({"key": key, "keys": [key]}))
        runner.run()
        return job.history

    (((step, values),),) = run_ranks(1, work)
    assert step == 0
    assert values["key"].tolist() == values["keys"][0].tolist() == jax.random.key_data(key).tolist()


def test_logging_traced_values_is_an_error_that_says_where_to_log():
    def work(world):
        runner = Runner(world)
        runner.add("a", lambda job: jax.jit(lambda x: job.log({"loss": x}))(1.0))
        with pytest.raises(
            JobError, match=r"TypeError: `job.log` was called with traced values, inside a `jax.jit` or"
        ):
            runner.run()

    run_ranks(1, work)


def test_only_kinds_of_spans_can_be_measured():
    def work(world):
        def train(job):
            with (
                pytest.raises(
                    ValueError, match="^`kind` of `job.measure` in job `a` must be one of 'compute', .*'host'"
                ),
                job.measure("evaluation"),
            ):
                raise AssertionError

        runner = Runner(world)
        runner.add("a", train)
        runner.run()

    run_ranks(1, work)


def test_run_is_the_plain_loop():
    def work(world):
        one = make_step(world)

        def step(state, batch):
            state = one(state, batch)
            return state, {"loss": 0.0}

        jobs = [Job(name, step, 0.0, [1.0] * 5, steps=n) for n, name in ((3, "a"), (9, "b"))]
        run(jobs, policy=RoundRobin(), world=world)
        return [(job.state, job.step) for job in jobs]

    assert run_ranks(2, work) == [[(solo([[1.0] * n] * 2), n) for n in (3, 5)]] * 2


def test_a_step_must_return_a_pair_in_the_plain_loop():
    def work(world):
        with pytest.raises(JobError, match=r"`step` of job `a` must return a pair `\(state, metrics\)`, got a "):
            run([Job("a", make_step(world), 0.0, [1.0])], world=world)

    assert run_ranks(1, work) == [None]


def test_different_jobs_on_two_ranks():
    def work(world):
        runner = Runner(world)
        runner.add(f"a{world.rank}", lambda job: None)
        with pytest.raises(JobError, match=r"^Ranks 0 and 1 want to run different things: "):
            runner.run()

    assert run_ranks(2, work) == [None, None]


def test_different_shares_on_two_ranks():
    def work(world):
        runner = Runner(world, Weighted((1, 1 + world.rank)))
        runner.add("a", lambda job: None)
        runner.add("b", lambda job: None)
        with pytest.raises(JobError, match=r"^Ranks 0 and 1 want to run different things: .*shares=\(1\.0, 2\.0\)"):
            runner.run()

    assert run_ranks(2, work) == [None, None]


def test_bad_arguments():
    def work(world):
        runner = Runner(world, Weighted((1, 2)))
        runner.add("a", lambda job: None)
        with pytest.raises(ValueError, match=r"^`Weighted` has 2 shares, the runner 1 jobs"):
            runner.run()
        runner = Runner(world)
        with pytest.raises(ValueError, match=r"^A runner without jobs has nothing to run\."):
            runner.run()
        with pytest.raises(ValueError, match=r"^A runner without jobs has nothing to run\."):
            run([], world=world)
        job = runner.add("a", lambda job: None)
        with pytest.raises(ValueError, match=r"^There is a job `a` already\."):
            runner.add("a", lambda job: None)
        with pytest.raises(TypeError, match=r"^Job `b` needs a function `fn\(job, \*\*kwargs\)`, got a `int`"):
            runner.add("b", 3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^the name of a job must be a text that is not empty, got ''$"):
            runner.add("", lambda job: None)
        with pytest.raises(JobError, match=r"^Job `a` is not running\."):
            job.batches([])
        with pytest.raises(JobError, match=r"^Job `a` is not running\."):
            job.restore(0.0)
        with pytest.raises(ValueError, match=r"^`depth` must be at least 1, got 0\.$"):
            Runner(world, depth=0)
        with pytest.raises(TypeError, match=r"^`step` of job `x` must be a function of `\(state, batch\)`, got 1\.$"):
            Job("x", 1, None, [])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^`steps` of job `x` must be at least 0, got -1\.$"):
            Job("x", print, None, [], steps=-1)
        runner.run()
        with pytest.raises(JobError, match=r"^This runner has run\."):
            runner.run()
        with pytest.raises(JobError, match=r"^Job `c` comes too late"):
            runner.add("c", lambda job: None)

    assert run_ranks(1, work) == [None]


def in_a_thread(batches):
    """Batches by way of a thread that dies, should they raise, without a word to whoever waits for them."""
    ready = queue.Queue(2)

    def fill():
        for batch in batches():
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=fill, name="mine", daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


@pytest.mark.parametrize("opened_there", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_that_another_thread_asks_for_end_their_job_alone(ranks, opened_there):
    def start(world):
        def fn(job, step):
            step(0.0, 1.0)
            batches = job.batches([1.0] * 9) if not opened_there else None
            for batch in in_a_thread(lambda: batches or job.batches([1.0] * 9)):
                step(0.0, batch)

        return fn, {"step": make_step(world, "bad")}

    for error, bad in failing_loop_results(ranks, 0, start):
        assert re.match(
            r"Job `bad` failed on ranks? [\d, ]+ after step 1: JobError: `job\.batches` of job `bad` was iterated in"
            r" thread `mine`, not in the job's own: two threads would take each other's answers from the other ranks\.",
            str(error),
        )
        assert bad.step == 1


def test_what_waits_for_other_ranks_is_refused_in_another_thread():
    def work(world):
        caught = []

        def ask(job):
            for wait in (job.restore, lambda _: list(job.batches([])), lambda _: list(job.batches([]))):
                try:
                    wait(0.0)
                except JobError as error:
                    caught.append(str(error))

        def fn(job, step):
            thread = threading.Thread(target=ask, args=(job,), name="mine")
            thread.start()
            thread.join()
            with pytest.raises(JobError, match=r"^`job\.batches` of job `a` was iterated in thread `mine`"):
                step(0.0, 1.0)

        runner = Runner(world)
        runner.add("a", fn, step=make_step(world))
        with pytest.raises(JobError, match=r"^Job `a` failed on rank 0 after step 0: JobError: `job\.batches` of job"):
            runner.run()
        return [text.partition(" of job `a` was ")[::2] for text in caught]

    (((what, how), (loop_, _)),) = run_ranks(1, work)
    assert (what, loop_) == ("`job.run_on_all_ranks` or `job.restore`", "`job.batches`")
    assert how.startswith("called in thread `mine`, not in the job's own: two threads would")


def test_a_step_in_a_thread_that_is_no_job_is_refused():
    def work(world):
        caught, owner = [], world.exchange_owner
        assert not owner.in_run
        owner.check_not_stray("step")  # no run, no complaint

        def stray():
            assert owner.in_run
            try:
                owner.check_not_stray("train_step")
            except JobError as error:
                caught.append(str(error))

        def fn(job):
            assert current_job() is job
            owner.check_not_stray("train_step")
            thread = threading.Thread(target=stray, name="mine")
            thread.start()
            thread.join()

        runner = Runner(world)
        runner.add("a", fn)
        runner.run()
        assert not owner.in_run
        return caught[0].startswith("`train_step` was called from thread `mine`, which is not a job of the runner")

    assert run_ranks(1, work) == [True]


@pytest.mark.parametrize(
    ("shape", "unit"),
    [
        ((4, 32, 32, 3), "images"), ((4, 1, 28, 28), "images"), ((4, 32, 32, 64), "examples"), ((4, 128), "examples"),
        ((4, 8, 4, 16), "examples"), ((4,), "examples"),
    ],
)  # fmt: skip
def test_only_batches_of_images_are_called_images(shape, unit):
    assert count_examples({"x": np.zeros(shape, np.float32), "y": np.zeros(4)}, 2) == (8.0, unit)
