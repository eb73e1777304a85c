"""Evaluation between steps takes a turn but doesn't count as a step in errors or reports."""

import pytest

from jaxcross.errors import JobError
from jaxcross.interleave.instrument import SpanLog
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import add, make_step


def test_work_without_exchanges_is_no_step():
    """Work without exchanges takes its turn, but doesn't count as a step."""

    def work(world):
        runner = Runner(world)
        evaluate = make_step(world, "evaluate", exchanges=0)

        def fn(job, step):
            for batch in job.batches([1.0, 2.0]):
                step(0.0, batch)
                assert evaluate(1.0, 2.0) == 3.0
            return evaluate(1.0, float(job.step))

        jobs = [runner.add(name, fn, {"step": make_step(world, name)}) for name in "ab"]
        runner.run()
        return [job.state for job in jobs]

    assert run_ranks(2, work) == [[3.0, 3.0]] * 2


def test_evaluation_with_exchanges_is_no_step():
    def work(world):
        runner = Runner(world)
        evaluate = make_step(world, "evaluate")

        def fn(job, step):
            for batch in job.batches([1.0, 2.0]):
                step(0.0, batch)
                evaluate(1.0, 2.0)
            return job.step

        job = runner.add("a", fn, {"step": make_step(world)})
        report = runner.run()
        assert report.rounds.rounds == 1  # the report doesn't count them
        assert job._engine.planned_steps == 2
        return job.state, report.jobs[0].steps

    assert run_ranks(2, work) == [(2, 2)] * 2


def test_steps_have_their_numbers_beside_evaluations():
    """Errors, notes and spans use the number in `job.step`, even though all calls exchange."""

    def work(world):
        log = SpanLog()
        runner = Runner(world, instruments=[log])
        evaluate = make_step(world, "evaluate")

        def fn(job, step):
            for batch in job.batches([1.0, 2.0, 3.0, 4.0]):
                if job.step == 3:
                    raise ValueError("the loader failed")
                step(0.0, batch)
                evaluate(1.0, evaluate(1.0, 2.0))

        runner.add("a", fn, {"step": make_step(world)})
        with pytest.raises(
            JobError,
            match="after step 3: ValueError: the loader failed. Every rank leaves the job after "
            "step 3,",
        ):
            runner.run()
        exchanges = [
            (s.step, s.other_calls, s.in_step) for s in log.spans if s.kind == "collective"
        ]
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
                raise ValueError("the evaluation failed")
            return add(0, values)

        evaluate = make_step(world, "evaluate", compute=lambda segment, values: fails(values))
        runner.add("a", fn, {"step": make_step(world), "evaluate": evaluate})
        with pytest.raises(
            JobError, match=r"in a call after step 2, segment 0 .*leaves the job after step 2,"
        ):
            runner.run()

    run_ranks(2, work)
