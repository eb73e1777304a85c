"""`Job` and `run`, the plain loop: how it starts, and errors that are raised on construction."""

from typing import Any

import pytest

from jaxcross.errors import JobError
from jaxcross.jobs.plain_loop import Job, run
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step, solo


def begun(mode: Any, state: Any) -> list[Any]:
    """Returns both ranks' states of a job without steps; `state(rank)` is its initial state."""

    def work(world: Any) -> Any:
        job = Job("a", make_step(world), state(world.rank), [], mode=mode)
        run([job], world=world)
        return job.state

    return run_ranks(2, work)


def test_mode_decides_the_use_of_each_ranks_values() -> None:
    assert begun("local", float) == [0.0, 1.0]
    assert begun("broadcast", float) == [0.0, 0.0]
    assert begun("check", lambda rank: 3.0) == [3.0, 3.0]
    with pytest.raises(Exception, match="The state differs between ranks"):
        begun("check", float)


def test_a_local_state_trains_on() -> None:
    def work(world: Any) -> Any:
        step = make_step(world)
        job = Job("a", lambda state, batch: (step(state, batch), {}), 1.0, [1.0, 2.0], mode="local")
        run([job], world=world)
        return job.state

    assert run_ranks(2, work) == [solo([[1.0, 2.0]] * 2, 1.0)] * 2


def test_different_modes_error_says_how() -> None:
    def work(world: Any) -> None:
        mode: Any = "local" if world.rank else "broadcast"
        with pytest.raises(
            JobError, match=r"different things on different ranks.*mode='broadcast'"
        ):
            run([Job("a", make_step(world), 1.0, [1.0], mode=mode)], world=world)

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"mode": "own"},
            ValueError,
            "^`mode` of job `a` must be one of 'check', 'broadcast', 'local', got 'own'.$",
        ),
        (
            {"mode": ["local"]},
            ValueError,
            "^`mode` of job `a` must be one of .*, got .'local'.*$",
        ),
        (
            {"nonfinite": True},
            ValueError,
            ("^`nonfinite` of job `a` must be one of 'ignore', 'raise', .*, got True.$"),
        ),
    ],
)
def test_job_arguments_are_checked_on_construction(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Job("a", lambda state, batch: (state, batch), 0.0, [1.0], **options)


def test_invalid_restore_mode_fails_job_on_all_ranks() -> None:
    def work(world: Any) -> None:
        from jaxcross.jobs.runner import Runner

        runner = Runner(world)
        runner.add("a", lambda job: job.restore(0.0, mode="own" if world.rank else "check"))
        with pytest.raises(
            JobError,
            match=r"on rank 1 .*`mode` of `job.restore` in job `a` must be one of 'check', ",
        ):
            runner.run()

    run_ranks(2, work)
