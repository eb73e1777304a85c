"""Fused jobs, with threads as ranks: who leaves when, what happens to the rest, what's rejected."""

import threading
from typing import Any

import numpy as np
import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.jobs.fused import FusedBatches, FusedJob, MemberBatches
from jaxcross.jobs.plain_loop import Job, run
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step, solo


def fused_step(world: Any) -> Any:
    """Returns a step for any number of jobs whose states and batches are numbers."""
    step = make_step(world)

    def fused(states: Any, batches: Any) -> Any:
        states = tuple(step(np.array(states), np.array(batches)))
        return states, tuple({"loss": float(state)} for state in states)

    return fused


def no_step(state: Any, batch: Any) -> Any:
    raise AssertionError("a fused job has a step of its own")


def make_jobs(*data: Any, **options: Any) -> list[Job]:
    names = "abcdef"[: len(data)]
    return [
        Job(name, no_step, float(n), each, **options)
        for n, (name, each) in enumerate(zip(names, data, strict=True))
    ]


@pytest.mark.parametrize("lengths", [(4, 2, 4), (1, 2, 3), (3, 3, 3), (0, 2, 2), (2, 0, 0)])
def test_members_end_with_their_own_data(lengths: tuple[int, ...]) -> None:
    """Each member ends in the same state as alone, however many leave at once."""

    def work(world: Any) -> Any:
        jobs = make_jobs(
            *([float(10 * n + i) for i in range(length)] for n, length in enumerate(lengths))
        )
        report = run([FusedJob(jobs, fused_step(world))], world=world)
        assert report.jobs[0].steps == max(lengths)
        return [(job.state, job.step, job.history) for job in jobs]

    for found in run_ranks(2, work):
        for n, (length, (state, step, history)) in enumerate(zip(lengths, found, strict=True)):
            states = [
                solo([[float(10 * n + i) for i in range(end)]] * 2, float(n))
                for end in range(length + 1)
            ]
            assert (state, step) == (states[-1], length)
            assert history == [(i, {"loss": states[i]}) for i in range(1, length + 1)]


def test_the_shortest_data_of_any_rank_end_a_member() -> None:
    """Batches that other ranks read ahead are given back, so none is lost or used twice."""

    def work(world: Any) -> Any:
        buffer = np.zeros(1)

        def one_buffer() -> Any:
            for i in range(6):
                buffer[:] = i
                yield buffer

        short = [np.array([float(i)]) for i in range(2 + 3 * world.rank)]
        step = make_step(world, shape=(1,))

        def fused(states: Any, batches: Any) -> Any:
            return tuple(
                step(np.array(states), np.array([np.asarray(b)[0] for b in batches]))
            ), tuple({} for _ in states)

        jobs = make_jobs(one_buffer(), short)
        run([FusedJob(jobs, fused)], world=world)
        return [(job.state, job.step) for job in jobs]

    whole, short = solo([[float(i) for i in range(6)]] * 2), solo([[0.0, 1.0]] * 2, 1.0)
    assert run_ranks(2, work) == [[(whole, 6), (short, 2)]] * 2


def test_steps_end_a_member() -> None:
    def work(world: Any) -> Any:
        jobs = [Job("a", no_step, 0.0, [1.0] * 9, steps=2), Job("b", no_step, 0.0, [1.0] * 3)]
        run([FusedJob(jobs, fused_step(world))], world=world)
        return [job.step for job in jobs]

    assert run_ranks(2, work) == [[2, 3]] * 2


def test_data_that_raise_end_their_member_alone() -> None:
    def work(world: Any) -> Any:
        def broken() -> Any:
            yield 1.0
            if world.rank == 1:
                raise OSError("no such shard")
            yield 2.0

        jobs = make_jobs([1.0, 2.0, 3.0], broken(), [1.0, 2.0])
        fused = FusedJob(jobs, fused_step(world))
        with pytest.raises(
            JobError,
            match=r"^Job `b` failed on rank 1 after step 1: OSError: no such shard.*after step 1",
        ):
            run([fused], world=world)
        return [(job.state, job.step) for job in jobs]

    data = [1.0, 2.0, 3.0]
    expected = [(solo([data[:n]] * 2, float(k)), n) for k, n in enumerate((3, 1, 2))]
    assert run_ranks(2, work) == [expected] * 2


def test_one_job_stops_early_and_the_others_continue() -> None:
    def work(world: Any) -> Any:
        jobs = make_jobs([1.0] * 5, [1.0] * 5)
        jobs[0].every(2, lambda state: {"score": 1.0}, rank=0)
        jobs[0].stop_early("eval/score", mode="max", patience=1)
        jobs[1].every(3, lambda state: float(state))
        run([FusedJob(jobs, fused_step(world))], world=world)
        return [[job.step, [each for each in job.history if "eval" in each[1]]] for job in jobs]

    third = solo([[1.0] * 3] * 2, 1.0)
    one, other = (
        [(2, {"eval": {"score": 1.0}}), (4, {"eval": {"score": 1.0}})],
        [(3, {"eval": third})],
    )
    assert run_ranks(2, work) == [[[4, one], [5, other]]] * 2


def test_an_evaluation_that_raises_ends_all() -> None:
    """Each member keeps the state of the last step that all ranks committed."""

    def work(world: Any) -> Any:
        def fails(state: Any) -> Any:
            raise ArithmeticError("no score")

        jobs = make_jobs([1.0] * 3, [1.0] * 3)
        jobs[1].every(2, fails)
        with pytest.raises(JobError, match=r"^Job `a\+b` failed on rank.* no score"):
            run([FusedJob(jobs, fused_step(world))], world=world)
        return [(float(job.state), job.step) for job in jobs]

    assert run_ranks(2, work) == [[(solo([[1.0] * 2] * 2, float(n)), 2) for n in range(2)]] * 2


def test_a_step_that_raises_ends_all() -> None:
    """Other jobs of the run continue."""

    def work(world: Any) -> Any:
        step = fused_step(world)

        def fails(states: Any, batches: Any) -> Any:
            if batches[0] == 3.0 and world.rank == 1:
                raise ArithmeticError("no step")
            return step(states, batches)

        single = make_step(world, "single")
        other = Job("z", lambda state, batch: (single(state, batch), {}), 0.0, [1.0] * 4)
        jobs = make_jobs([1.0, 2.0, 3.0], [1.0] * 9)
        with pytest.raises(JobError, match=r"^Job `a\+b` failed on rank 1"):
            run([FusedJob(jobs, fails), other], world=world)
        assert other.state == solo([[1.0] * 4] * 2)
        return [(float(job.state), job.step) for job in jobs]

    expected = [(solo([[1.0, 2.0]] * 2), 2), (solo([[1.0] * 2] * 2, 1.0), 2)]
    assert run_ranks(2, work) == [expected] * 2


def test_checkpoints_are_refused(tmp_path: Any) -> None:
    def work(world: Any) -> None:
        jobs = make_jobs([1.0], [1.0])
        with pytest.raises(ValueError, match=r"^`checkpoints` cannot keep the fused job `a\+b`"):
            run([FusedJob(jobs, fused_step(world))], world=world, checkpoints=Checkpoints(tmp_path))

    run_ranks(1, work)


def test_a_member_has_batches_of_its_own() -> None:
    """Members may not share data with one another, or with a job that isn't fused."""

    def work(world: Any) -> None:
        shared = iter([1.0])
        jobs = make_jobs([1.0], shared)
        with pytest.raises(
            ValueError, match=r"^`batches` of jobs `b` and `z` are the same iterator"
        ):
            run([FusedJob(jobs, fused_step(world)), Job("z", no_step, 0.0, shared)], world=world)

    run_ranks(1, work)


def test_many_names_make_a_short_one() -> None:
    jobs = [Job(f"learning-rate-{n}", no_step, 0.0, []) for n in range(8)]
    assert FusedJob(jobs, no_step).name == "learning-rate-0 and 7 more"


def test_what_nobody_received_is_given_back() -> None:
    """The data of a member that leaves early are closed."""
    closed = []

    def data() -> Any:
        try:
            yield from range(5)
        finally:
            closed.append(True)

    sources = [MemberBatches(data(), None), MemberBatches(range(3), None)]
    taken = FusedBatches(sources)
    assert [next(taken), next(taken), next(taken)] == [(0, 0), (1, 1), (2, 2)]
    taken.delivered()
    taken.close()
    assert taken.ends() == [None, None]
    rest = FusedBatches(sources)
    assert list(rest) == [(1, 1), (2, 2)]
    rest.delivered()
    rest.delivered()
    rest.close()
    assert rest.ends() == [None, ""]
    assert sources[0].take() == 3
    sources[0].close()
    assert closed == [True] and sources[0].ended


def test_data_are_closed_behind_the_batch_that_is_being_read(caplog: Any) -> None:
    """A step fails while a batch is being read. No other thread can close the running generator."""
    reading, released, closed = threading.Event(), threading.Event(), []

    def data() -> Any:
        try:
            reading.set()
            assert released.wait(60)
            yield 1
        finally:
            closed.append(threading.current_thread())

    source = MemberBatches(data(), None)
    reader = threading.Thread(target=source.take)
    reader.start()
    assert reading.wait(60)
    source.close()
    released.set()
    reader.join(60)
    assert closed == [reader] and source.ended
    assert not caplog.records


def test_each_member_names_its_own_leaves() -> None:
    def work(world: Any) -> Any:
        start = {"w": float(world.rank), "own": float(world.rank)}
        names: Any = {"a": (), "b": "own"}
        jobs = [
            Job(n, no_step, start, [0.0], mode="broadcast", rank_local=own)
            for n, own in names.items()
        ]
        run([FusedJob(jobs, lambda states, batches: (states, ({}, {})))], world=world)
        return [job.state for job in jobs]

    assert run_ranks(2, work) == [
        [{"w": 0.0, "own": 0.0}, {"w": 0.0, "own": own}] for own in (0.0, 1.0)
    ]


def test_each_member_shows_how_it_ended() -> None:
    """Before, during and after the run, just like a job that runs by itself."""

    def work(world: Any) -> Any:
        def broken() -> Any:
            yield 1.0
            raise OSError("no such shard")

        jobs, seen = make_jobs([1.0] * 4, [1.0] * 2, broken(), [1.0] * 4), []
        waits = [job.done for job in jobs]

        def look(state: Any) -> dict[str, float]:
            seen.append([job.status for job in jobs])
            with pytest.raises(
                JobError, match=r"^Job `a` cannot be stopped or paused alone, .* job `a\+b\+c\+d`"
            ):
                jobs[0].stop()
            with pytest.raises(JobError, match="`job.every` was called after the run"):
                jobs[0].every(1, look)
            jobs[1].pause()  # a no-op once it has ended
            return {"score": 1.0}

        jobs[0].every(4, look)
        jobs[3].every(1, lambda state: {"score": 1.0})
        jobs[3].stop_early("eval/score", mode="max", patience=2)
        fused = FusedJob(jobs, fused_step(world))
        with pytest.raises(JobError, match="^Job `c` failed"):
            run([fused], world=world)
        assert seen == [[None, "ended", "failed", "stopped early"]]
        assert [job.done for job in jobs] == waits and all(each.is_set() for each in waits)
        assert [job.error for job in jobs] == [None, None, fused.errors[0], None]
        return [(job.status, job.step, job.skipped, job.paused) for job in jobs]

    ends = [("ended", 4), ("ended", 2), ("failed", 1), ("stopped early", 3)]
    assert run_ranks(2, work) == [[(how, step, 0, False) for how, step in ends]] * 2


def test_members_that_fail_together_have_one_error() -> None:
    def work(world: Any) -> Any:
        def fails(states: Any, batches: Any) -> Any:
            raise ArithmeticError("no step")

        jobs = make_jobs([1.0], [1.0])
        with pytest.raises(JobError, match="no step") as raised:
            run([FusedJob(jobs, fails)], world=world)
        assert [job.error for job in jobs] == [raised.value] * 2
        return [(job.status, job.state, job.step) for job in jobs]

    assert run_ranks(2, work) == [[("failed", float(n), 0) for n in range(2)]] * 2


def test_a_member_cannot_skip_steps() -> None:
    def work(world: Any) -> None:
        jobs = make_jobs([1.0], [1.0])
        jobs[1].nonfinite = "skip"
        with pytest.raises(ValueError, match=r"^Job `b` has `nonfinite='skip'`, but the other"):
            run([FusedJob(jobs, fused_step(world))], world=world)

    run_ranks(1, work)
