"""A run's joint start, with threads as ranks: which job waits for which, and no wait is endless."""

import math
import threading
from functools import partial

import optax
import pytest

from jaxcross._link import Link
from jaxcross.errors import JobError
from jaxcross.interleave.instrument import Instrument, SpanLog
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.jobs.runner import Runner
from jaxcross.runtime.start_gate import StartGate, StartLimit, note_at_start
from jaxcross.server import ParameterServer
from tests.support.fakes import run_ranks
from tests.support.membership_jobs import all_see
from tests.support.runner_jobs import loop, make_step, solo
from tests.support.server_jobs import gradient, parameters

DATA = [1.0, 2.0, 3.0]


class Hears(Instrument):
    """Lets a thread wait for a note."""

    def __init__(self):
        self.notes, self.came = [], threading.Condition()

    def note(self, *, job, kind, step=-1, value=None):
        with self.came:
            self.notes.append((job, str(value)))
            self.came.notify_all()

    def wait_for(self, *note):
        with self.came:
            assert self.came.wait_for(lambda: note in self.notes, 50), self.notes


@pytest.fixture
def limit(monkeypatch):
    """Returns a function that sets how long others wait for a job that does other work."""

    def set_limit(seconds):
        monkeypatch.setattr("jaxcross.runtime.driver.StartLimit", partial(StartLimit, seconds))

    set_limit(math.inf)
    return set_limit


@pytest.mark.parametrize("policy", [RoundRobin(), Weighted((1, 2))])
@pytest.mark.parametrize("ranks", [1, 2])
def test_first_steps_wait_for_the_slow_compiler(ranks, policy):
    """Job `a` is ready long before job `b` has compiled, but makes no step until then."""

    def work(world):
        hears, log = Hears(), SpanLog()
        runner = Runner(world, policy, instruments=[hears, log])
        early = []

        def compiles(job):
            state = job.restore(0.0)
            with job._engine.compiling("step"):
                hears.wait_for("a", "ready, waits for `b`")
                early.extend(span for span in log.spans if span.kind in ("compute", "collective"))
            for batch in job.batches(DATA):
                state = make_step(world, "b")(state, batch)
            return state

        a = runner.add("a", loop, {"step": make_step(world, "a"), "data": DATA})
        b = runner.add("b", compiles)
        runner.run()
        assert ("b", "ready: all jobs begin") in hears.notes
        return early, a.state, b.state

    assert run_ranks(ranks, work) == [([], *[solo([DATA] * ranks)] * 2)] * ranks


@pytest.mark.parametrize("policy", [RoundRobin(start="as_ready"), Sequential()])
def test_as_ready_a_job_begins_at_once(policy):
    def work(world):
        runner = Runner(world, policy, instruments=[hears := Hears()])
        stepped = threading.Event()

        def first(job):
            loop(job, make_step(world), DATA)
            stepped.set()

        def second(job):
            with job._engine.compiling("step"):
                assert stepped.wait(50)
            return loop(job, make_step(world), DATA)

        for name, fn in (("a", first), ("b", second)):
            runner.add(name, fn)
        runner.run()
        return [note for note in hears.notes if "ready" in note[1]]

    assert run_ranks(2, work) == [[]] * 2


# The functions below are jobs that don't call a step soon, or never do, for various reasons. In
# each case the other jobs must start without them, and the run must end.


def ends_without_a_step(job, world, other):
    pass


def never_calls_a_step(job, world, other):
    return job.restore(1.0)


def waits_for_a_result(job, world, other):
    assert other.done.wait(50)
    return loop(job, make_step(world, "b"), DATA)


def polls_for_a_result(job, world, other):
    while not other.done.wait(0.01):
        pass


def raises_at_once(job, world, other):
    raise ValueError("the job failed before its first step")


def raises_on_one_rank(job, world, other):
    if world.rank == 0:
        raise ValueError("the job failed before its first step")
    return loop(job, make_step(world, "b"), DATA)


def has_no_batch(job, world, other):
    return loop(job, make_step(world, "b"), [])


def stops_itself(job, world, other):
    job.stop()
    while True:
        job.run_on_all_ranks("waits", lambda control: None)


def meets_ranks_first(job, world, other):
    for _ in range(5):
        job.run_on_all_ranks("meets", lambda control: control.allgather_text("here"))
    return loop(job, make_step(world, "b"), DATA)


def calls_unlike_steps(job, world, other):
    local, first, second = (
        make_step(world, "local", exchanges=0),
        make_step(world, "b"),
        make_step(world, "c"),
    )
    return second(first(local(0.0, 1.0), 1.0), 1.0)


def only_evaluates(job, world, other):
    return make_step(world, "local", exchanges=0)(0.0, 1.0)


def pauses_itself(job, world, other):
    job.pause()
    threading.Thread(target=lambda: (other.done.wait(50), job.resume())).start()
    return loop(job, make_step(world, "b"), DATA)


def adds_a_job(job, world, other, runner):
    runner.add("new", loop, {"step": make_step(world, "new"), "data": DATA}).done.wait(50)


def trains_by_a_server(job, world, other):
    with ParameterServer(parameters(), optax.sgd(0.1), staleness=0, world=world) as server:
        server.push_pull(gradient(server.params, world.rank, 0))
        while other.step < 3:
            threading.Event().wait(0.01)


KINDS = [
    ends_without_a_step,
    never_calls_a_step,
    waits_for_a_result,
    polls_for_a_result,
    raises_at_once,
    raises_on_one_rank,
    has_no_batch,
    stops_itself,
    meets_ranks_first,
    calls_unlike_steps,
    only_evaluates,
    pauses_itself,
    adds_a_job,
    trains_by_a_server,
]


@pytest.mark.mostly_integration(
    "ends_without_a_step", "raises_at_once", "raises_on_one_rank", "has_no_batch", "stops_itself"
)
@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_job_keeps_the_others_for_ever(kind, caplog):
    """Without a time limit: each job is known not to take a first step, or does take one."""

    def work(world):
        runner = Runner(world)
        a = runner.add("a", loop, {"step": make_step(world, "a"), "data": DATA})
        more = {"runner": runner} if kind is adds_a_job else {}
        runner.add("b", kind, {"world": world, "other": a, **more})
        if "raises" in kind.__name__:
            with pytest.raises(JobError, match="the job failed before its first step"):
                runner.run()
        else:
            runner.run()
        return a.state, a.status

    assert run_ranks(2, work) == [(solo([DATA] * 2), "ended")] * 2
    assert "spent 30 s" not in caplog.text


def waits_unseen(job, world, other):
    threading.Event().wait(0.01)
    while other.step < 3:
        threading.Event().wait(0.01)


def waits_on_one_rank(job, world, other):
    if world.rank == 1:
        waits_unseen(job, world, other)
    return loop(job, make_step(world, "b"), DATA)


def waits_by_meeting_ranks(job, world, other):
    while not all_see(job, other.done.is_set):
        pass


def waits_for_its_data(job, world, other):
    def data():
        waits_unseen(job, world, other)
        yield from DATA

    return loop(job, make_step(world, "b"), data())


@pytest.mark.mostly_integration("waits_unseen", "waits_on_one_rank", "waits_for_its_data")
@pytest.mark.parametrize(
    "kind", [waits_unseen, waits_on_one_rank, waits_by_meeting_ranks, waits_for_its_data]
)
def test_a_job_that_waits_unseen_is_excused_in_time(kind, limit, caplog):
    """A job waits undetectably for another one, which starts after a while."""
    limit(0.3)

    def work(world):
        runner = Runner(world, instruments=[hears := Hears()])
        a = runner.add("a", loop, {"step": make_step(world, "a"), "data": DATA})
        runner.add("b", kind, {"world": world, "other": a})
        runner.run()
        return a.state, ("b", "the other jobs begin without it") in hears.notes

    assert run_ranks(2, work) == [(solo([DATA] * 2), True)] * 2
    # Just one message, whichever rank found the job late first.
    assert (
        caplog.text.count(
            "Job `b` spent 30 s, on some rank, on something other than compiling its first step"
        )
        == 1
    )


@pytest.mark.usefixtures("limit")
def test_a_stop_of_the_run_ends_jobs_that_are_held_back():
    def work(world):
        runner = Runner(world, instruments=[hears := Hears()])

        def stops(job):
            hears.wait_for("a", "ready, waits for `b`")
            a.stop()
            a.done.wait(50)

        a = runner.add("a", loop, {"step": make_step(world, "a"), "data": DATA})
        runner.add("b", stops)
        runner.run()
        return a.step, a.status

    assert run_ranks(2, work) == [(0, "stopped")] * 2


def test_another_start_on_another_rank_is_an_error():
    def work(world):
        runner = Runner(world, RoundRobin(start=("together", "as_ready")[world.rank]))
        runner.add("a", loop, {"step": make_step(world), "data": DATA})
        with pytest.raises(JobError, match=r"with the same policy, checkpoints"):
            runner.run()

    run_ranks(2, work)


def test_another_emulated_link_on_another_rank_is_an_error(monkeypatch):
    mine = threading.local()  # the ranks are threads here, and a process has one link

    def work(world):
        mine.link = (Link(500), Link(500, latency_s=0.1))[world.rank]
        runner = Runner(world)
        runner.add("a", loop, {"step": make_step(world), "data": DATA})
        with pytest.raises(JobError, match=r"500mbit, 100 ms.* `metrics` and emulated link, on"):
            runner.run()

    monkeypatch.setattr("jaxcross.jobs.runner.current_link", lambda: mine.link)
    run_ranks(2, work)


def test_the_gate_opens_when_the_earlier_jobs_have_come():
    lock, coming, asked = threading.RLock(), [0, 1], threading.Event()

    def jobs_to_come():
        asked.set()
        return coming

    gate = StartGate(lock, jobs_to_come)
    second = threading.Thread(target=gate.wait, args=(1,), daemon=True)
    second.start()
    assert asked.wait(60)
    with lock:  # free once the thread waits
        coming.remove(0)
        gate.look()
    second.join(5)
    assert not second.is_alive()


def test_only_other_work_counts_against_the_limit():
    limit = StartLimit(10.0)
    assert limit.look(0.0, {0: False, 1: True}) == []
    assert (
        limit.look(9.0, {0: True, 1: False}) == []
    )  # the time since the last check counts by the job's current activity
    assert limit.look(19.5, {0: False, 1: True}) == [0]
    assert limit.look(40.0, {0: False, 1: True}) == []
    assert limit.look(42.0, {1: False}) == [1]


@pytest.mark.parametrize(
    ("arrival", "awaited", "text"),
    [
        ("excused", ["a"], "the other jobs begin without it"),
        ("late", [], "the other jobs begin without it"),
        ("here", [], "ready: all jobs begin"),
        ("here", ["a"], "ready, waits for `a`"),
        ("here", ["a", "b"], "ready, waits for 2 more jobs"),
    ],
)
def test_the_note_names_who_is_waited_for(arrival, awaited, text):
    assert note_at_start(arrival, awaited) == text
