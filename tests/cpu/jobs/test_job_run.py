"""The status and error that other threads read from a job that is ending."""

from contextlib import nullcontext

import pytest

from jaxcross.errors import JobError
from jaxcross.jobs import job_run
from jaxcross.jobs.job_run import JobRun
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.interleavings import watched
from tests.support.runner_jobs import make_step


def stops_early(job, step):
    job.every(1, lambda state: 1.0, name="eval")
    job.stop_early("eval", mode="max", patience=1)
    job.state = job.restore(0.0)
    for batch in job.batches([1.0, 2.0, 3.0]):
        job.state = step(job.state, batch)


def fails(job, step):
    raise ValueError("boom")


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
    looks, close = [], JobRun.close

    def watched_close(run):
        job = run.context
        watched(
            lambda: close(run),
            lambda: looks.append((job.status, job.error is not None)),
            module=job_run,
        )

    monkeypatch.setattr(JobRun, "close", watched_close)

    def work(world):
        runner = Runner(world)
        job = runner.add("a", fn, {"step": make_step(world)})
        with pytest.raises(JobError, match="boom") if fn is fails else nullcontext():
            runner.run()
        return job.status, job.error is not None

    (end,) = run_ranks(1, work)
    assert set(looks) == seen
    assert looks[-1] == end
