"""Jobs added, submitted, stopped or paused while others run: all ranks do the same."""

import threading

import pytest

from jaxcross.errors import JobError
from jaxcross.interleave.instrument import Instrument
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.jobs.runner import Runner
from jaxcross.runtime import paused_run
from tests.support.fakes import run_ranks
from tests.support.membership_jobs import endless, loop, solo, until
from tests.support.runner_jobs import make_step


class Order(Instrument):
    """Records exchanges and notes in order; both come from the exchange lane."""

    def __init__(self):
        self.seen = []

    def span(self, span):
        if span.kind == "collective":
            self.seen.append((span.job, span.step))

    def note(self, *, job, kind, step=-1, value=None):
        if kind == "status":
            self.seen.append((job, value))


@pytest.mark.parametrize("policy", [RoundRobin(), Weighted((1, 2)), Sequential()])
def test_jobs_join_that_ranks_add_in_other_orders(policy):
    def work(world):
        runner, batches = Runner(world, policy), [1.0, 2.0, 3.0, 4.0]

        def parent(job, step):
            state = 0.0
            for n, batch in enumerate(batches):
                if n == 2:
                    for name in ("c", "d") if world.rank else ("d", "c"):
                        runner.add(name, loop, {"step": make_step(world, name), "data": [5.0, 6.0]})
                state = step(state, batch)
            return state

        runner.add("a", parent, {"step": make_step(world, "a")})
        runner.add("b", loop, {"step": make_step(world, "b"), "data": batches})
        report = runner.run()
        assert report is runner.report
        return [(job.name, job.state, job.step, job.status) for job in runner.jobs], [
            job.name for job in report.jobs
        ]

    long, short = solo(2, [1.0, 2.0, 3.0, 4.0]), solo(2, [5.0, 6.0])
    for jobs, names in run_ranks(2, work):
        assert jobs == [("a", long, 4, "ended"), ("b", long, 4, "ended")] + [
            (name, short, 2, "ended")
            for name in "dc"  # in rank 0's order
        ]
        assert names == ["a", "b", "d", "c"]


def test_control_thread_adds_a_job_and_waits_for_it():
    def work(world):
        runner, got = Runner(world), []
        begun = threading.Event()

        def control():
            begun.wait(60)
            job = runner.add("b", loop, {"step": make_step(world, "b"), "data": [1.0]})
            assert job.done.wait(60)
            got.append((job.state, job.status))

        def parent(job, step):
            begun.set()
            until(job, step, lambda: bool(got))

        thread = threading.Thread(target=control)
        thread.start()
        runner.add("a", parent, {"step": make_step(world, "a")})
        runner.run()
        thread.join()
        return got

    assert run_ranks(2, work) == [[(2.0, "ended")]] * 2


def test_job_missing_on_a_rank_is_an_error_on_all():
    def work(world):
        runner = Runner(world)

        def parent(job, step):
            step(0.0, 1.0)
            if world.rank == 1:
                runner.add("b", loop, {"step": make_step(world, "b"), "data": [1.0]})
            step(0.0, 1.0)

        runner.add("a", parent, {"step": make_step(world, "a")})
        with pytest.raises(
            JobError,
            match=r"^Some jobs were added during the run but never joined it, .*: `b` \(rank 1 of",
        ):
            runner.run()
        assert [job.name for job in runner.report.jobs] == ["a"]  # pyright: ignore[reportOptionalMemberAccess]
        return [
            (job.name, job.status, job.done.is_set(), job.error is not None) for job in runner.jobs
        ]

    first, second = run_ranks(2, work)
    assert first == [("a", "ended", True, False)]
    assert second == [*first, ("b", "left out", True, True)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_rank_stops_a_job_and_the_others_continue(ranks):
    def work(world):
        runner = Runner(world)
        batches = [1.0, 2.0, 3.0]

        def parent(job, step):
            state = 0.0
            for batch in batches:
                state = step(state, batch)
            if world.rank == world.size - 1:
                other.stop()
            until(job, make_step(world, "beat"), other.done.is_set)
            return state

        runner.add("a", parent, {"step": make_step(world, "a")})
        other = runner.add("b", endless, {"step": make_step(world, "b")})
        report = runner.run()
        other.stop()  # a no-op, since it has left
        assert report.jobs[1].how == other.status == "stopped"
        assert other.error is None
        assert runner.jobs[0].state == solo(ranks, batches)
        assert other.state == solo(ranks, [1e-3] * other.step)
        return other.step

    steps = run_ranks(ranks, work)
    assert len(set(steps)) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_jobs_that_nobody_can_resume_end_the_run(monkeypatch, ranks):
    """Counts threads as ranks. The test decides whether a rank could still resume the jobs."""
    monkeypatch.setattr(paused_run, "can_resume", lambda: False)

    def train(job, step):
        state = job.restore(0.0)
        for batch in job.batches([1.0] * 9):
            if job.step == 3:
                job.pause()
            state = step(state, batch)
        return state

    def work(world):
        runner = Runner(world)
        jobs = [runner.add(name, train, {"step": make_step(world, name)}) for name in "ab"]
        with pytest.raises(JobError) as raised:
            runner.run()
        assert str(raised.value).startswith(
            "All remaining jobs are paused (`a`, `b`), and no rank has a thread"
        )
        return [(job.status, job.step) for job in jobs]

    results = run_ranks(ranks, work)
    assert all(result == results[0] for result in results)
    assert all(status == "stopped" and 3 <= step <= 4 for status, step in results[0])


def test_paused_job_takes_no_turn_until_resumed():
    def work(world):
        order, begun = Order(), []
        runner = Runner(world, instruments=[order])

        def parent(job, step):
            step(0.0, 1.0)
            begun.append(job.paused)
            if world.rank == 1:
                other.pause()
            until(job, step, lambda: other.paused)
            for _ in range(6):
                step(0.0, 1.0)
            if world.rank == 0:
                other.resume()
            until(job, step, lambda: not other.paused)
            if world.rank == 0:
                other.stop()

        runner.add("a", parent, {"step": make_step(world, "a")})
        other = runner.add("b", endless, {"step": make_step(world, "b", exchanges=2)})
        runner.run()
        assert begun == [False]
        assert other.state == solo(4, [1e-3] * other.step)  # two exchanges over two ranks each
        return order.seen, other.step

    (seen, steps), (theirs, their_steps) = run_ranks(2, work)
    assert (seen, steps) == (theirs, their_steps)
    rest = seen[seen.index(("b", "paused")) : seen.index(("b", "resumed"))]
    assert (
        len({step for job, step in rest if job == "b" and step != "paused"}) <= 1
    )  # belongs to the step in progress
    assert sum(job == "a" for job, _ in rest) >= 6


def test_wishes_come_too_early_before_the_run():
    def work(world):
        job = Runner(world).add("a", endless, {"step": None})
        with pytest.raises(JobError, match=r"^Job `a` is not running. Stop or pause it during"):
            job.stop()

    run_ranks(1, work)


def test_rank_0_submits_a_job_by_name():
    def work(world):
        runner = Runner(world)
        runner.register("double", lambda job, start: loop(job, make_step(world, job.name), [start]))

        def parent(job, step):
            step(0.0, 1.0)
            if world.rank == 0:
                runner.submit("double", job="late", kwargs={"start": 3.0})
                with pytest.raises(ValueError, match=r"^There is a job `late` already"):
                    runner.submit("double", job="late", kwargs={"start": 3.0})
            # Nothing waits for it here, since this is the last call of the last job.

        runner.add("a", parent, {"step": make_step(world, "a")})
        runner.run()
        return [(job.name, job.state, job.status) for job in runner.jobs]

    assert run_ranks(3, work) == [[("a", None, "ended"), ("late", 9.0, "ended")]] * 3


def test_invalid_submission_is_rejected_at_the_call():
    """Whatever can't be submitted is rejected by the call itself."""

    def work(world):
        runner, refused = Runner(world), []
        runner.register("f", lambda job, **_: None)

        def attempt(*args, **kwargs):
            with pytest.raises((ValueError, TypeError, JobError)) as raised:
                runner.submit(*args, **kwargs)
            refused.append(str(raised.value))

        def parent(job):
            attempt("g", job="x")
            attempt("f", job="x", kwargs={"data": b"code"})
            attempt("f", job="x", kwargs={"data": float("nan")})
            attempt("f", job="x", kwargs={"data": {1: 2}})
            attempt("f", job="x", kwargs={"data": "x" * 70_000})
            attempt("f", job="x", kwargs=[("data", 2)])
            attempt("f", job="")
            attempt("f", job="a")

        runner.add("a", parent)
        attempt("f", job="x")
        runner.run()
        attempt("f", job="x")
        with pytest.raises(ValueError, match=r"^A function is already registered as `f`"):
            runner.register("f", print)
        with pytest.raises(TypeError, match=r"^`h` must be a function"):
            runner.register("h", 3)  # type: ignore[arg-type]
        return refused

    (refused,) = run_ranks(1, work)
    too_early = (
        "Job `x` cannot be submitted now, because the run has not begun or has ended. Submit jobs "
        "while `runner.run()` runs."
    )
    beginnings = [
        too_early,
        "Job `x`: no function is registered as `g`. Registered are `f`.",
        "Job `x`: its arguments cannot be sent as JSON: Object of type bytes",
        "Job `x`: its arguments would change when they are sent as JSON: {'data': nan}.",
        "Job `x`: its arguments would change when they are sent as JSON: {'data': {1: 2}}.",
        "Job `x`: its submission has 700",
        "`kwargs` of job `x` must be a mapping whose keys are texts, such as `{'lr': 0.1}`, got [(",
        "the name of a job must be a text that is not empty, got ''",
        "There is a job `a` already.",
        too_early,
    ]
    assert len(refused) == len(beginnings)
    for text, beginning in zip(refused, beginnings, strict=True):
        assert text.startswith(beginning)


def test_only_rank_0_submits_registered_functions():
    """Only rank 0 submits, and a rank without the function ends the job."""

    def work(world):
        runner = Runner(world)
        if world.rank == 0:
            runner.register("f", lambda job: None)

        def parent(job, step):
            if world.rank == 0:
                runner.submit("f", job="x")
            else:
                with pytest.raises(
                    JobError, match=r"^Job `x` was submitted on rank 1\. Submit on rank 0"
                ):
                    runner.submit("f", job="x")
            step(0.0, 1.0)

        runner.add("a", parent, {"step": make_step(world, "a")})
        with pytest.raises(
            JobError,
            match=r"^Job `x` failed on rank 1 after step 0: JobError: rank 1 has not registered a",
        ):
            runner.run()
        return runner.jobs[0].status

    assert run_ranks(2, work) == ["ended", "ended"]


@pytest.mark.integration
def test_many_short_jobs_leave_nothing_behind():
    def work(world):
        runner, peak, threads = Runner(world), [], []

        def child(job, step):
            threads.append(threading.current_thread())
            return step(0.0, 1.0)

        def parent(job, step):
            driver = job._engine.driver
            for n in range(60):
                one = runner.add(f"j{n}", child, {"step": make_step(world, f"j{n}")})
                until(job, step, lambda: one.done.is_set() and not threads[-1].is_alive())  # noqa: B023
                peak.append(
                    (
                        len(driver.router.jobs),
                        driver._interleaver.shared.rows,
                        len(driver.router.threads),
                    )
                )

        runner.add("a", parent, {"step": make_step(world, "a")})
        runner.run()
        assert [job.state for job in runner.jobs[1:]] == [2.0] * 60
        return [max(numbers) for numbers in zip(*peak, strict=True)]

    # Whenever a child has ended, the router only knows the parent. There are at most two rows and
    # two threads, one for the parent and one for its current child.
    assert run_ranks(2, work) == [[1, 2, 2]] * 2
