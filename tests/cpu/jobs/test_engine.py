"""What other threads request of a job that is beginning, and read from one that is ending."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from jaxcross.errors import JobError
from jaxcross.jobs import engine
from jaxcross.jobs.engine import JobEngine
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.interleavings import interrupted, watched
from tests.support.runner_jobs import make_step


def stops_early(job, step):
    job.every(1, lambda state: 1.0, name="eval")
    job.stop_early("eval", mode="max", patience=1)
    job.state = job.restore(0.0)
    for batch in job.batches([1.0, 2.0, 3.0]):
        job.state = step(job.state, batch)


def fails(job, step):
    raise ValueError("the training loop failed")


@pytest.mark.parametrize(
    ("fn", "seen"),
    [
        (lambda job, step: 1.0, {(None, False), ("ended", False)}),
        (stops_early, {(None, False), ("stopped early", False)}),
        (fails, {(None, False), (None, True), ("failed", True)}),
    ],
)
def test_status_is_final_once_it_is_there(fn, seen, monkeypatch):
    """While a job ends, its status is final once it's set, and a failure has its error."""
    looks, close = [], JobEngine.close

    def watched_close(run):
        job = run.context
        watched(
            lambda: close(run),
            lambda: looks.append((job.status, job.error is not None)),
            module=engine,
        )

    monkeypatch.setattr(JobEngine, "close", watched_close)

    def work(world):
        runner = Runner(world)
        job = runner.add("a", fn, {"step": make_step(world)})
        with (
            pytest.raises(JobError, match="the training loop failed")
            if fn is fails
            else nullcontext()
        ):
            runner.run()
        return job.status, job.error is not None

    (end,) = run_ranks(1, work)
    assert set(looks) == seen
    assert looks[-1] == end


class Driver:
    """Records the requests it receives."""

    def __init__(self):
        self.requests = []

    def request(self, record, request):
        self.requests.append((record, request))


class Record:
    """A stand-in for the driver's record of a job."""


def engine_alone():
    world: Any = SimpleNamespace(rank=0, size=1)
    listeners: Any = None
    admission: Any = None
    return JobEngine(
        "a", lambda job: None, {}, listeners=listeners, world=world, admission=admission
    )


def test_request_while_a_run_begins_is_not_lost():
    """At any point of a starting run, it reaches the run, or raises since there's no run yet."""
    inside, at, outcomes = True, 0, set()
    while inside:
        at += 1
        job, driver, record = engine_alone(), Driver(), Record()

        def request(job=job):
            try:
                job.request("stop")
            except JobError:
                return "refused"
            return "passed on"

        def begin(job=job, driver=driver, record=record):
            job.attach(driver, record)

        outcome, inside = interrupted(request, at, begin, module=engine)
        assert driver.requests == ([(record, "stop")] if outcome == "passed on" else []), (
            f"before bytecode {at}"
        )
        outcomes.add(outcome)
    assert outcomes == {"refused", "passed on"}
