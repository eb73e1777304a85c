"""A job that fails or is interrupted ends at the same step with one error on all ranks.

Other jobs continue.
"""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.interleave import messages as m
from jaxcross.jobs.runner import MAX_ERRORS_SHOWN, Runner
from tests.support.fakes import FakeCompiled, carried_program, plain_program, run_ranks
from tests.support.runner_jobs import add, failing_loop_results, loop, make_step, solo


@pytest.mark.parametrize(
    ("segment", "when"),
    [(0, ""), (2, ""), (4, ", after the commit, so this rank lacks the step's results")],
)
def test_a_failed_segment_ends_its_job_on_every_rank(segment, when):
    """Segment 0 fails before any exchange, 2 between exchanges, and 4 after the commit."""

    def start(world):
        calls = []

        def compute(index, values):
            calls.append(index)
            if world.rank == 1 and index == segment and calls.count(index) == 2:
                raise FloatingPointError("the loss overflowed")
            return sum(values)

        return loop, {
            "step": make_step(world, "bad", exchanges=2, compute=compute),
            "data": [1.0, 1.0, 1.0],
        }

    results = failing_loop_results(2, start)
    for rank, (error, _) in enumerate(results):
        assert str(error).startswith(
            f"Job `bad` failed on rank 1 in step 2, segment {segment} (compute){when}: "
            "FloatingPointError: the loss overflowed."
        )
        assert isinstance(error.__cause__, FloatingPointError) == (rank == 1)
    # If the failure came before the commit, step 2 had no effect on any rank. If it came after the
    # commit, the other rank has made step 2.
    assert [bad.step for _, bad in results] == ([2, 1] if segment == 4 else [1, 1])
    assert (results[0][1].state == results[1][1].state) == (segment != 4)


def test_a_computation_that_fails_after_its_steps_commit_says_so():
    """A carried exchange may be committed before the step's own computation has ended."""

    def start(world):
        calls = []

        def compute(index, values):
            calls.append(index)
            if calls.count(index) == 2:
                if world.rank == 0 and index == 2:
                    committed.set()
                if world.rank == 1 and index == 0:
                    assert committed.wait(60)
                    raise FloatingPointError("the loss overflowed")
            return sum(values)

        return loop, {
            "step": make_step(world, "bad", program=carried_program("bad"), compute=compute),
            "data": [1.0] * 3,
        }

    committed = threading.Event()
    results = failing_loop_results(2, start)
    for error, _ in results:
        assert str(error).startswith(
            "Job `bad` failed on rank 1 in step 2, segment 0 (compute), after the commit, so this "
            "rank lacks the step's results: FloatingPointError: the loss overflowed."
        )
    assert [bad.step for _, bad in results] == [2, 1]


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

    for rank, (error, bad) in enumerate(failing_loop_results(2, start)):
        assert str(error).startswith("Job `bad` failed on rank 0 after step 2: KeyError: 'lost'.")
        assert isinstance(error.__cause__, KeyError) == (rank == 0)
        assert bad.step == 2


@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_a_failed_job_prints_one_traceback_when_it_leaves(capsys, failing):
    """The traceback isn't kept until the run ends, which may be days later. It's printed once if
    both ranks fail alike.

    If both ranks fail, the traceback may come from either of them, because the ranks may agree on
    the first rank's failure before the second rank has raised its own. The function
    `printing_ranks` decides which rank prints, and has its own tests.
    """
    both, printed = threading.Barrier(2), []

    def work(world):
        def fails(job, step):
            step(job.restore(0.0), 1.0)
            if world.rank in failing:
                raise KeyError("lost")
            step(0.0, 1.0)

        def waits(job, step):
            state = step(job.restore(0.0), 1.0)
            bad.done.wait()
            both.wait(60)
            if world.rank == 0:
                printed.append(capsys.readouterr().err)
            return step(state, 1.0)

        runner = Runner(world)
        bad = runner.add("bad", fails, {"step": make_step(world, "bad")})
        runner.add("good", waits, {"step": make_step(world, "good")})
        with pytest.raises(JobError):
            runner.run()

    run_ranks(2, work)
    (text,) = printed
    assert text.count("Traceback (most recent call last)") == 1
    heading = re.match(r"jaxcross: job `bad` failed on rank (\d) of 2:\n", text)
    assert heading and int(heading[1]) in failing
    assert text.endswith("KeyError: 'lost'\n")
    assert "Traceback" not in capsys.readouterr().err


def test_a_job_that_leaves_without_an_exception_prints_its_error_once(capsys):
    def work(world):
        def fn(job, step):
            for _ in range(3 if world.rank == 0 else 2):
                step(0.0, 1.0)

        runner = Runner(world)
        runner.add("bad", fn, {"step": make_step(world, "bad")})
        with pytest.raises(JobError):
            runner.run()

    run_ranks(2, work)
    text = capsys.readouterr().err
    assert text.startswith(
        "jaxcross: Job `bad` does different things on different ranks after step 2: "
    )
    assert text.count("\n") == 1


def test_data_error_on_one_rank_ends_the_job_on_all():
    def start(world):
        def data():
            yield 1.0
            if world.rank == 1:
                raise OSError("disk gone")
            yield from [1.0, 1.0]

        return loop, {"step": make_step(world, "bad"), "data": data()}

    for error, bad in failing_loop_results(2, start):
        assert str(error).startswith("Job `bad` failed on rank 1 after")
        assert "OSError: disk gone (raised by the data given to job.batches)" in str(error)
        assert bad.step == 1


def test_different_step_counts_are_an_error_on_all():
    def start(world):
        def fn(job, step):
            for _ in range(3 if world.rank == 0 else 2):
                step(0.0, 1.0)

        return fn, {"step": make_step(world, "bad")}

    for error, bad in failing_loop_results(2, start):
        assert str(error).startswith(
            "Job `bad` does different things on different ranks after step 2: rank 0 called step 3 "
            "by `bad` (function 1 of the job); rank 1 ended after step 2. All ranks must"
        )
        assert bad.step == 2


def test_different_exchanges_error_names_the_lines():
    def start(world):
        program = plain_program("bad", shape=(world.rank,))
        before, exchange, after = program.segments
        (found,) = exchange.exchanges
        found = replace(found, source=f"train.py:{world.rank} (bad)")
        exchange = replace(exchange, exchanges=(found,))
        program = replace(program, segments=(before, exchange, after))
        return loop, {"step": make_step(world, program=program), "data": [1.0]}

    for error, _ in failing_loop_results(2, start):
        assert isinstance(error, ExchangeError)
        assert str(error).startswith(
            "Job `bad`, step 1: ranks 0 and 1 exchange different things in `bad`: exchange 1 is"
        )
        assert "rank 0: psum batch float32[0], at train.py:0 (bad)\n" in str(error)
        assert "rank 1: psum batch float32[1], at train.py:1 (bad)\n" in str(error)


def test_different_initial_states_need_broadcast():
    """Different initial states are an error unless they're broadcast."""

    def start(world):
        return loop, {"step": make_step(world, "bad"), "data": [1.0], "state": float(world.rank)}

    for error, _ in failing_loop_results(2, start):
        assert "The state differs between ranks" in str(error)

    def work(world):
        runner = Runner(world)
        job = runner.add("a", lambda job: job.restore(float(world.rank), mode="broadcast"))
        runner.run()
        return job.state

    assert run_ranks(2, work) == [0.0, 0.0]


def test_several_failures_are_raised_as_one_with_notes():
    def fail(job):
        raise RuntimeError(job.name)

    def work(world):
        runner = Runner(world)
        runner.add("a", fail)
        runner.add("b", fail)
        with pytest.raises(
            JobError, match=r"^Job `a` failed on rank 0 after step 0: RuntimeError: a\."
        ) as raised:
            runner.run()
        return raised.value.__notes__

    (notes,) = run_ranks(1, work)
    assert notes[0].startswith("Also: Job `b` failed on rank 0 after step 0: RuntimeError: b.")


def test_of_many_failed_jobs_the_first_are_listed():
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
    assert (
        len(notes) == MAX_ERRORS_SHOWN
        and notes[-1] == "And 3 more failed. For their errors, see `runner.report`."
    )


def test_an_interrupt_stops_all_ranks_at_the_same_step():
    def work(world):
        runner = Runner(world)

        def endless(job, step):
            state = 0.0
            for batch in job.batches(iter(lambda: 1.0, None)):
                if world.rank == 0 and job.step == 3 and job.name == "a":
                    job._engine.driver.post(
                        m.StopRequested()
                    )  # what the main thread does on Ctrl-C
                state = step(state, batch)
                job.save(state)

        for name in "ab":
            runner.add(name, endless, {"step": make_step(world, name)})
        with pytest.raises(KeyboardInterrupt):
            runner.run()
        return [(job.step, job.state, job.error) for job in runner.jobs]

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0][0] >= 3


def test_exchanges_at_different_calls_are_reported():
    """Equal exchanges in different steps: `cond(n % 3 == 2, pmean)`, with unequal counters."""

    def work(world):
        exchanges = make_step(world)
        local = replace(plain_program(exchanges=0), traced=SimpleNamespace(choices=(0,)))
        compiled = FakeCompiled(local, world, add)

        def fn(job):
            state = 0.0
            for n in range(world.rank, world.rank + 6):
                state = (
                    exchanges(state, 1.0)
                    if n % 3 == 2
                    else job._engine.run(compiled, [state, 1.0], compiled)
                )

        runner = Runner(world)
        bad = runner.add("bad", fn)
        good = runner.add("good", loop, {"step": make_step(world, "good"), "data": [1.0, 2.0]})
        with pytest.raises(
            ExchangeError,
            match="^Job `bad` takes a branch with exchanges at different calls: "
            "rank 0 in step 3, rank ",
        ) as error:
            runner.run()
        return str(error.value), bad.status, good.status, good.state

    first, second = run_ranks(2, work)
    assert first == second
    assert (
        "rank 1 in step 2. Its predicate must be the same on every rank: look at counters"
        in first[0]
    )
    assert first[1:] == ("failed", "ended", solo([[1.0, 2.0]] * 2))
