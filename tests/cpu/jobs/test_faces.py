"""`Job` and `JobContext` have the same names with the same meaning, and no internal ones."""

import inspect
import threading
from typing import Any

import pytest

from jaxcross.errors import JobError
from jaxcross.interleave.policy import RoundRobin
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step, solo

SHARED = {
    "done",
    "error",
    "every",
    "examples_per_step",
    "history",
    "name",
    "nonfinite",
    "pause",
    "paused",
    "rank_local",
    "resume",
    "skipped",
    "state",
    "status",
    "step",
    "stop",
    "stop_early",
    "unit",
}
OF_FUNCTIONS = {"batches", "log", "measure", "restore", "run_on_all_ranks", "save"}
METHODS = ("every", "stop_early", "stop", "pause", "resume")
SETTABLE = ("examples_per_step", "nonfinite", "state", "unit")


def public(value: object) -> set[str]:
    """Returns the names that an editor or a prompt completes."""
    return {name for name in dir(value) if not name.startswith("_")}


def plain(world: Any, data: Any, name: str = "a", **options: Any) -> Job:
    step = make_step(world, name)
    return Job(name, lambda state, batch: (step(state, batch), {"x": 1.0}), 0.0, data, **options)


def test_both_have_the_same_public_names() -> None:
    def work(world: Any) -> tuple[set[str], set[str]]:
        job, context = plain(world, []), Runner(world).add("a", lambda job: None)
        return public(job), public(context)

    ((of_job, of_context),) = run_ranks(1, work)
    assert of_job == SHARED
    assert of_context == SHARED | OF_FUNCTIONS


@pytest.mark.parametrize("name", METHODS)
def test_both_take_the_same_arguments(name: str) -> None:
    one, other = (inspect.signature(getattr(kind, name)) for kind in (Job, JobContext))
    assert one == other


def test_restore_parameters_equal_those_of_a_job() -> None:
    of_restore = inspect.signature(JobContext.restore).parameters
    of_job = inspect.signature(Job).parameters
    for name in of_restore.keys() - {"self", "state"}:
        assert of_restore[name] == of_job[name]


@pytest.mark.parametrize("name", SETTABLE)
def test_both_can_be_set_alike(name: str) -> None:
    for kind in (Job, JobContext):
        assert getattr(kind, name).fset is not None


def test_a_job_before_its_run() -> None:
    def work(world: Any) -> None:
        job = plain(world, [1.0], nonfinite="skip", rank_local="own")
        assert (job.state, job.step, job.history) == (0.0, 0, [])
        assert (job.status, job.error, job.skipped, job.paused) == (None, None, 0, False)
        assert (job.nonfinite, job.rank_local, job.done.is_set()) == ("skip", ("own",), False)
        assert repr(job) == "<job `a`, not over, after step 0>"
        for request in (job.stop, job.pause, job.resume):
            with pytest.raises(
                JobError, match=r"^Job `a` is not running. .* during `jaxcross.run`"
            ):
                request()
        with pytest.raises(ValueError, match="^`nonfinite` of job `a` must be one of 'ignore'"):
            job.nonfinite = "never"  # type: ignore[assignment]
        job.state = 5.0
        assert job.state == 5.0

    run_ranks(1, work)


def test_a_job_shows_what_its_context_shows() -> None:
    """Compares them during the run, from an evaluation, and after it."""

    def work(world: Any) -> Any:
        job, seen = plain(world, [1.0, 2.0, 3.0]), []
        job.examples_per_step, job.unit = 48.0, "words"

        def look(state: Any) -> None:
            seen.append((job.step, job.state == state, job.status, job.done.is_set()))
            with pytest.raises(JobError, match=r"`job.every` was called after the run had begun"):
                job.every(1, look)
            with pytest.raises(JobError, match=r"`job.stop_early` was called after the run"):
                job.stop_early("eval/x", mode="max", patience=1)
            with pytest.raises(JobError, match=r"`nonfinite` was set after its first step"):
                job.nonfinite = "skip"

        job.every(1, look)
        (summary,) = run([job], world=world).jobs
        assert seen == [(n, True, None, False) for n in (1, 2, 3)]
        assert (summary.examples_per_step, summary.unit, summary.steps) == (48.0, "words", 3)
        assert (job.status, job.error, job.step, job.skipped) == ("ended", None, 3, 0)
        assert job.done.is_set() and repr(job) == "<job `a`, ended, after step 3>"
        return job.state, [step for step, _ in job.history]

    assert run_ranks(2, work) == [(solo([[1.0, 2.0, 3.0]] * 2), [1, 2, 3])] * 2


def test_a_failed_job_has_its_error_and_the_state_of_the_last_step() -> None:
    def work(world: Any) -> Any:
        step = make_step(world)

        def fails(state: Any, batch: Any) -> Any:
            if batch == 3.0 and world.rank == 1:
                raise ArithmeticError("no step")
            return step(state, batch), {}

        job, other = Job("a", fails, 0.0, [1.0, 2.0, 3.0]), plain(world, [1.0] * 5, "z")
        with pytest.raises(JobError, match="^Job `a` failed on rank 1") as raised:
            run([job, other], world=world)
        assert job.error is raised.value and (job.status, job.step) == ("failed", 2)
        assert (other.status, other.error, other.step) == ("ended", None, 5)
        assert repr(job).startswith("<job `a`, failed (Job `a` failed on rank 1")
        return job.state

    assert run_ranks(2, work) == [solo([[1.0, 2.0]] * 2)] * 2


def test_ranks_that_begin_differently_keep_their_own_state() -> None:
    def work(world: Any) -> Any:
        job = Job("a", make_step(world), float(world.rank), [1.0])
        with pytest.raises(Exception, match="The state differs between ranks"):
            run([job], world=world)
        assert (job.status, job.step, job.history) == ("failed", 0, [])
        return job.state

    assert run_ranks(2, work) == [0.0, 1.0]


def test_a_job_is_stopped_and_waited_for_in_another_thread() -> None:
    def work(world: Any) -> Any:
        def endless() -> Any:
            while True:
                yield 1.0

        job, begun, after = plain(world, endless()), threading.Event(), []
        job.every(1, lambda state: begun.set())

        def stops() -> None:
            assert begun.wait(60)
            if world.rank == 0:
                job.stop()
            job.done.wait(60)  # the event that existed before the run
            after.append((job.status, job.step, job.state))

        thread = threading.Thread(target=stops)
        waiter = threading.Thread(target=job.done.wait, args=(60,))
        waiter.start()
        thread.start()
        run([job], world=world)
        for each in (thread, waiter):
            each.join(60)
            assert not each.is_alive()
        assert after == [(job.status, job.step, job.state)]
        job.stop()  # too late, so it's a no-op
        return job.status, job.step, job.state == solo([[1.0] * job.step] * 2)

    (one, other) = run_ranks(2, work)
    assert one == other and one[0] == "stopped" and one[1] > 0 and one[2]


def test_a_job_is_paused_and_resumed() -> None:
    def work(world: Any) -> Any:
        job, paused = plain(world, [1.0] * 99), []

        def resume_it() -> None:
            while not job.paused and not job.done.wait(0.01):
                pass
            paused.append(job.paused)
            job.resume()

        thread = threading.Thread(target=resume_it)
        thread.start()
        job.every(2, lambda state: job.pause() if job.step == 2 else None)
        run([job], world=world)
        thread.join(60)
        return paused, job.paused, job.status, job.step

    assert run_ranks(1, work) == [([True], False, "ended", 99)]


def test_a_job_runs_again_from_where_it_ended() -> None:
    def work(world: Any) -> Any:
        job = plain(world, [1.0, 2.0], nonfinite="raise")
        run([job], world=world)
        before = job.done
        assert before.is_set()
        job.every(1, lambda state: {"v": state})
        run([job], world=world)
        assert job.done is not before and job.done.is_set()
        assert job.nonfinite == "raise"
        return job.state, job.step, len(job.history)

    twice = solo([[1.0, 2.0, 1.0, 2.0]] * 2)
    assert run_ranks(2, work) == [(twice, 2, 4)] * 2


def test_a_job_that_runs_already_is_refused_and_keeps_its_face() -> None:
    """Simulates another thread that passes the job to `jaxcross.run`."""

    def work(world: Any) -> Any:
        job = plain(world, [1.0, 2.0])

        def second(state: Any) -> dict[str, float]:
            with pytest.raises(JobError, match="^Job `a` is in a run already"):
                job._attach(Runner(world).add("a", job._run))
            assert job.step == 1
            return {}

        job.every(1, lambda state: second(state) if job.step == 1 else None)
        run([job], world=world)
        return job.status

    assert run_ranks(1, work) == ["ended"]


def test_what_was_set_holds_in_each_run() -> None:
    def work(world: Any) -> Any:
        data = [1.0]
        job = plain(world, data)
        job.examples_per_step = 7.0
        job.unit = "tokens"
        run([job], world=world)
        job.examples_per_step = 9.0
        report = run([job], world=world)
        return report.jobs[0].examples_per_step, report.jobs[0].unit

    assert run_ranks(1, work) == [(9.0, "tokens")]


def test_an_unknown_option_of_a_run_is_named() -> None:
    with pytest.raises(TypeError, match="^`run` has no argument `start`. The options of a run"):
        run([], start="together")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_ranks_may_have_a_policy_of_their_own_without_a_repr() -> None:
    """The default `repr` contains an address, which differs across ranks."""

    class Mine(RoundRobin):
        __repr__ = object.__repr__

    def work(world: Any) -> Any:
        job = plain(world, [1.0])
        run([job], world=world, policy=Mine())
        return job.status

    assert run_ranks(2, work) == ["ended", "ended"]


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("examples_per_step", "8", TypeError, "`examples_per_step` of job `a` must be a number"),
        ("examples_per_step", -3, ValueError, "`examples_per_step` of job `a` must be above 0"),
        ("examples_per_step", float("nan"), ValueError, "must be above 0, got nan"),
        ("unit", 3, TypeError, "`unit` of job `a` must be"),
        ("non_finite", "skip", AttributeError, "non_finite"),  # misspelt
    ],
)
def test_both_refuse_wrong_values_and_misspelt_names(
    name: str, value: Any, kind: type[Exception], message: str
) -> None:
    def work(world: Any) -> None:
        for job in (plain(world, []), Runner(world).add("a", lambda job: None)):
            with pytest.raises(kind, match=message):
                setattr(job, name, value)

    run_ranks(1, work)
