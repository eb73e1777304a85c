"""Seeded chaos: threads are randomly late, and no result of a run depends on it."""

import threading
from queue import Empty, SimpleQueue

import pytest

from jaxcross.errors import JobError
from jaxcross.jobs.engine import current_engine
from jaxcross.jobs.runner import Runner
from jaxcross.runtime.chaos import Chaos, LateQueue, chaos_of
from tests.support.fakes import FakeCompiled, plain_program, run_ranks


def trained(world):
    """Runs three different jobs, one of which fails; returns what each ends up with."""
    programs = {
        name: plain_program(name, exchanges=n) for name, n in (("a", 1), ("b", 3), ("bad", 2))
    }
    compiled = {
        name: FakeCompiled(p, world, lambda i, values: sum(values) / 2)
        for name, p in programs.items()
    }

    def fn(job):
        state = job.restore(1.0)
        for batch in job.batches(float(n) for n in range(4 + world.rank)):
            if job.name == "bad" and job.step == 2 and world.rank == world.size - 1:
                raise ValueError("the loader failed")
            state = current_engine().run(compiled[job.name], [state, batch + world.rank], compiled)
            job.state = state
        return state

    with Runner(world) as runner:
        jobs = [runner.add(name, fn) for name in programs]
        with pytest.raises(
            JobError,
            match="^Job `bad` failed on rank 2 after step 2: ValueError: the loader failed",
        ):
            runner.run()
    return [(job.step, job.state) for job in jobs], runner._chaos


def test_results_do_not_depend_on_who_is_late_when(monkeypatch):
    monkeypatch.delenv("JAXCROSS_CHAOS", raising=False)
    expected = run_ranks(3, trained)
    assert [[step for step, _ in jobs] for jobs, _ in expected] == [[4, 4, 2]] * 3
    for seed in (1, 2):
        monkeypatch.setenv("JAXCROSS_CHAOS", str(seed))
        late = run_ranks(3, trained)
        for (found, chaos), (wanted, none) in zip(late, expected, strict=True):
            assert found == wanted
            assert none is None
            assert chaos.delays > 20


def delays(seed, rank, name, monkeypatch):
    """Returns the successive delays of a thread with that name."""
    chaos, found = Chaos(seed, rank), []
    monkeypatch.setattr(
        chaos, "_never", type("Never", (), {"wait": lambda self, seconds: found.append(seconds)})()
    )
    thread = threading.Thread(target=lambda: [chaos.pause() for _ in range(50)], name=name)
    thread.start()
    thread.join()
    assert chaos.delays == len(found)
    return found


def test_a_seed_makes_the_same_threads_late_alike(monkeypatch):
    first = delays(1, 0, "lane", monkeypatch)
    assert 5 < len(first) < 40
    assert all(0 <= seconds <= 0.02 for seconds in first)
    assert first == delays(1, 0, "lane", monkeypatch)
    others = [
        delays(2, 0, "lane", monkeypatch),
        delays(1, 1, "lane", monkeypatch),
        delays(1, 0, "job", monkeypatch),
    ]
    assert first not in others
    assert len({tuple(other) for other in others}) == 3


def test_a_late_queue_is_a_queue():
    queue = LateQueue(Chaos(1, 0))
    for n in range(5):
        queue.put(n)
    assert [queue.get() for _ in range(5)] == list(range(5))
    with pytest.raises(Empty):
        queue.get(timeout=0.001)


def test_without_chaos_nothing_is_in_the_way(monkeypatch):
    def work(world):
        monkeypatch.setattr(Chaos, "pause", lambda self: pytest.fail("late"))
        runner = Runner(world)
        runner.add("a", lambda job: queues.append(type(job._engine.running()[0].queue())))
        runner.run()

    queues = []
    run_ranks(1, work)
    assert queues == [SimpleQueue]


def test_the_environment_names_a_seed():
    assert chaos_of({}, 0) is None
    assert chaos_of({"JAXCROSS_CHAOS": " "}, 0) is None
    chaos = chaos_of({"JAXCROSS_CHAOS": "7"}, 3)
    assert chaos is not None and (chaos.seed, chaos.rank) == (7, 3)
    with pytest.raises(ValueError, match="^`JAXCROSS_CHAOS` must be a whole number"):
        chaos_of({"JAXCROSS_CHAOS": "much"}, 0)
