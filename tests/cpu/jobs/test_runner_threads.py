"""Only a job's own thread may use its step, data and state; a process has one run at a time."""

import queue
import re
import threading

import pytest

from jaxcross.errors import JobError
from jaxcross.jobs.engine import JobEngine, current_engine
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import failing_loop_results, make_step, solo


def test_nested_run_is_rejected_but_works_afterwards():
    def work(world):
        inner = Runner(world)
        inner.add("inner", lambda job: 7.0)

        def fn(job, step):
            state = step(0.0, 1.0)
            with pytest.raises(
                JobError,
                match=r"^A run is in progress in this process, and two at once would mix up",
            ):
                inner.run()
            with pytest.raises(JobError, match=r"^A run is in progress in this process"):
                run([Job("b", step, 0.0, [1.0])], world=world)
            return step(state, 1.0)

        outer = Runner(world)
        job = outer.add("outer", fn, {"step": make_step(world)})
        outer.run()
        inner.run()
        return job.state, inner.jobs[0].state

    assert run_ranks(2, work) == [(solo([[1.0, 1.0]] * 2), 7.0)] * 2


@pytest.mark.parametrize("at", ["the first word", "the last words"])
def test_run_is_rejected_in_another_thread(at):
    """A run in another thread is rejected even if the first run has no lanes yet."""

    def work(world):
        meet, begun, go_on = world.control.meet, threading.Event(), threading.Event()
        runners = [Runner(world) for _ in range(2)]
        jobs = [runner.add("a", lambda job: 7.0) for runner in runners]

        def late(what, value):
            if not world.exchange_owner.lane_threads and (at == "the first word") == (
                jobs[0].status is None
            ):
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


def in_a_thread(batches):
    """Yields batches from a thread that dies silently if they raise.

    Whoever waits for them isn't notified.
    """
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
def test_batches_in_another_thread_end_only_that_job(ranks, opened_there):
    def start(world):
        def fn(job, step):
            step(0.0, 1.0)
            batches = job.batches([1.0] * 9) if not opened_there else None
            for batch in in_a_thread(lambda: batches or job.batches([1.0] * 9)):
                step(0.0, batch)

        return fn, {"step": make_step(world, "bad")}

    for error, bad in failing_loop_results(ranks, start):
        assert re.match(
            r"Job `bad` failed on ranks? [\d, ]+ after step 1: JobError: "
            r"`job\.batches` of job `bad` was iterated in thread `mine` rather than in the job's "
            r"own thread, where the two threads could receive each other's answers from the other "
            r"ranks\.",
            str(error),
        )
        assert bad.step == 1


def test_waits_for_ranks_from_other_thread_are_refused():
    def work(world):
        caught = []

        def ask(job):
            for wait in (
                job.restore,
                lambda _: list(job.batches([])),
                lambda _: list(job.batches([])),
            ):
                try:
                    wait(0.0)
                except JobError as error:
                    caught.append(str(error))

        def fn(job, step):
            thread = threading.Thread(target=ask, args=(job,), name="mine")
            thread.start()
            thread.join()
            with pytest.raises(
                JobError, match=r"^`job\.batches` of job `a` was iterated in thread `mine`"
            ):
                step(0.0, 1.0)

        runner = Runner(world)
        runner.add("a", fn, {"step": make_step(world)})
        with pytest.raises(
            JobError,
            match=r"^Job `a` failed on rank 0 after step 0: JobError: `job\.batches` of job",
        ):
            runner.run()
        return [text.partition(" of job `a` was ")[::2] for text in caught]

    (((what, how), (loop_, _)),) = run_ranks(1, work)
    assert (what, loop_) == ("`job.run_on_all_ranks` or `job.restore`", "`job.batches`")
    assert how.startswith("called in thread `mine` rather than in the job's own thread, where")


def test_a_step_in_a_thread_that_is_no_job_is_refused():
    def work(world):
        caught, owner = [], world.exchange_owner
        assert not owner.in_run
        owner.check_not_stray("step")  # without a run, it doesn't complain

        def stray():
            assert owner.in_run
            try:
                owner.check_not_stray("train_step")
            except JobError as error:
                caught.append(str(error))

        def fn(job):
            assert current_engine() is job._engine
            owner.check_not_stray("train_step")
            thread = threading.Thread(target=stray, name="mine")
            thread.start()
            thread.join()

        runner = Runner(world)
        runner.add("a", fn)
        runner.run()
        assert not owner.in_run
        return caught[0].startswith(
            "`train_step` was called from thread `mine`, which doesn't belong to any job"
        )

    assert run_ranks(1, work) == [True]


def test_jobs_are_seen_while_they_are_put_in_order(monkeypatch):
    """Another thread may look at the jobs of an ending run, e.g. to show its progress."""
    seen, order = [], JobEngine.order.fget

    def work(world):
        runner = Runner(world)

        def looking(run):
            seen.append([job.name for job in runner.jobs])
            return order(run)

        monkeypatch.setattr(JobEngine, "order", property(looking))
        for name in ("a", "b"):
            runner.add(name, lambda job: None)
        runner.run()

    run_ranks(1, work)
    assert seen == [["a", "b"]] * 2
