"""The driver's lanes: spans, monitoring, the emulated link, and a lane that breaks."""

import threading
import time
from collections import deque
from itertools import pairwise
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from jaxcross._link import Link, current_link, emulated_link
from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import InternalError, JobError
from jaxcross.interleave import messages as m
from jaxcross.interleave.instrument import Instrument, Listeners, SpanLog
from jaxcross.interleave.policy import RoundRobin, Sequential
from jaxcross.jobs.engine import JobThread, current_engine
from jaxcross.jobs.runner import Runner
from jaxcross.jobs.step_registry import step_graph_of
from jaxcross.runtime import lanes
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.job_record import JobRecord, StepCall
from jaxcross.runtime.lanes import ComputeLane, LaneThread, backoff_s
from tests.support.fakes import FakeCompiled, FakeExecution, ManualClock, plain_program, run_ranks


def runner_of(world, *, steps=2, program=None, compiled=None, **options):
    """Returns a runner with one job, which calls a step a few times."""
    compiled = compiled or FakeCompiled(
        program or plain_program(shape=(2, 3)), world, lambda i, values: sum(values)
    )

    def fn(job):
        state = 0.0
        for _ in range(steps):
            state = current_engine().run(compiled, [state, 1.0], compiled)  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
        return state

    runner = Runner(world, **options)
    runner.add("a", fn)
    return runner


def test_spans_name_what_was_done():
    def work(world):
        log, begin_ns = SpanLog(), time.monotonic_ns()
        runner_of(world, instruments=[log]).run()
        return begin_ns, log.spans

    for rank, (begin_ns, spans) in enumerate(run_ranks(2, work)):
        spans = sorted(spans, key=lambda s: s.start_ns)
        # Neither lane waits for the other one before it reports a segment. On a busy machine, spans
        # may therefore be recorded out of order, so we sort them first.
        in_order = sorted(spans, key=lambda s: (s.step, s.segment))
        lanes = [(s.kind, s.job, s.step, s.segment, s.nbytes) for s in in_order if s.kind != "vote"]
        assert lanes == [
            ("compute", "a", 1, 0, 0),
            ("collective", "a", 1, 1, 24),
            ("compute", "a", 1, 2, 0),
            ("compute", "a", 2, 0, 0),
            ("collective", "a", 2, 1, 24),
            ("compute", "a", 2, 2, 0),
        ]
        assert all(
            s.rank == rank and begin_ns <= s.ready_ns <= s.start_ns <= s.end_ns for s in spans
        )
        compute = [s for s in spans if s.kind == "compute"]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(compute))
        exchange = [s for s in spans if s.kind in ("collective", "vote")]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(exchange))


def test_every_wait_for_other_ranks_is_watched():
    def work(world):
        runner = runner_of(world)
        runner.add("adds", lambda job: runner.add("new", lambda job: None).done.wait(60))
        runner.run()
        return world.watched

    for watched in run_ranks(2, work):
        exchanges = [w for w in watched if w[3] == "exchange"]
        assert exchanges == [("a", 1, 1, "exchange"), ("a", 2, 1, "exchange")]
        # One vote admits and one commits each step, and one ends the job. A rank that comes late
        # causes extra votes.
        assert len([w for w in watched if w[3] == "vote"]) >= 5
        # Votes and announcements concern all jobs, so the report of such a wait names no job, step
        # or segment.
        assert {w[:3] for w in watched if w[3] in ("vote", "announcements")} == {("", 0, -1)}
        assert ("", 0, -1, "announcements") in watched


def test_a_job_that_waits_for_its_data_is_watched():
    def work(world):
        watched, monitor = threading.Event(), world.monitor

        def noting(**wait):
            if wait.get("local"):
                assert wait["job"] == "a"
                watched.set()
            return monitor(**wait)

        def data():
            assert watched.wait(5)
            yield 1.0

        world.monitor = noting
        runner = Runner(world)
        runner.add("a", lambda job: [*job.batches(data())])
        runner.run()

    run_ranks(1, work)


def test_a_run_ends_after_the_threads_of_its_jobs():
    """After the last vote, a job's thread still has to read back metrics and close its loops."""

    class Lingers(LaneThread):
        joined, ended = threading.Event(), False

        def join(self, timeout=None):
            self.joined.set()
            super().join(timeout)

    def work(world):
        def returns():
            driver.job_returned(driver.records[0])
            thread.joined.wait(5)
            thread.ended = True

        thread = Lingers("a", returns, set())
        driver = Driver(world=world, jobs=[("a", lambda: thread)], policy=RoundRobin(), depth=2)
        driver.run(deque())
        assert thread.ended

    run_ranks(1, work)


def test_every_segment_is_dispatched_and_then_waited_for():
    def work(world):
        events = []
        driver: Any = SimpleNamespace(
            world=world,
            queue=SimpleQueue,
            clock_ns=ManualClock(),
            post=events.append,
            listeners=Listeners(),
        )
        compiled: Any = FakeCompiled(plain_program(), world, lambda i, values: sum(values))
        call = StepCall("a", 1, step_graph_of(compiled.program), compiled.execution([1.0, 2.0]), 0)
        lane = ComputeLane(driver)
        lane.start()
        lane.put(m.Dispatch(0, 1, 1, 0), call)
        lane.close()
        assert sorted(events, key=lambda event: type(event).__name__) == [
            m.SegmentCompleted(0, 1, 0, 0),
            m.SegmentDispatched(0, 1, 0),
        ]

    run_ranks(1, work)


def test_backoff_ends_although_the_thread_is_suspended_for_longer(monkeypatch):
    """The backoff ends even if the kernel suspends the lane's thread for longer.

    We can't suspend a thread at the right moment, but a backoff of one microsecond has the same
    effect: its time is up before the thread begins to wait. In Python 3.11 and 3.12,
    `SimpleQueue.get(timeout=...)` then blocks forever if the previous call returned an item without
    waiting. To provoke this, we put two instructions into the queue at once.
    """
    monkeypatch.setattr(lanes, "_FIRST_BACKOFF_S", 1e-6)

    def work(world):
        events = SimpleQueue()
        driver: Any = SimpleNamespace(world=world, queue=SimpleQueue, post=events.put)
        lane = lanes.ExchangeLane(driver)
        lane.start()
        for _ in range(1000):
            lane.put(m.Backoff(0), None)
            lane.put(m.Backoff(0), None)
            assert events.get(timeout=60) == m.BackoffElapsed()
        lane.close()

    run_ranks(1, work)


def test_an_emulated_link_holds_exchanges_and_says_so():
    def work(world):
        log = SpanLog()
        report = runner_of(world, instruments=[log]).run()
        assert ("emulated link" in str(report)) is (current_link() is not None)
        return [s for s in log.spans if s.kind == "collective"]

    with emulated_link(Link(0.192, latency_s=0.001)):
        (spans,) = run_ranks(1, work)
    (unheld,) = run_ranks(1, work)
    assert [s.label for s in unheld] == [""] * 2
    assert [s.label for s in spans] == ["emulated"] * 2
    assert all(s.end_ns - s.start_ns >= 2e6 for s in spans)  # 1 ms latency and 24 bytes at 24 kB/s


def test_reports_have_the_description_of_a_real_link(monkeypatch):
    monkeypatch.setenv("JAXCROSS_LINK", "a cable")
    assert run_ranks(2, lambda world: runner_of(world).run().link) == ["a cable"] * 2
    with emulated_link(Link(8000)):
        (link,) = run_ranks(1, lambda world: runner_of(world).run().link)
    assert link == "emulated link 8000mbit"


def test_links_parse():
    assert Link.parse("500mbit") == Link(500)
    assert str(Link.parse("0.5gbit")) == "emulated link 500mbit"
    assert Link.parse("none") is None
    with pytest.raises(ValueError, match=r"^`fast` is not a link rate\."):
        Link.parse("fast")
    with pytest.raises(ValueError, match=r"^`mbps` of a `Link` must be above 0"):
        Link(0)


class BrokenExchange(FakeExecution):
    """An exchange that raises by itself rather than because of its inputs."""

    def run(self, index):
        if index == 1:
            raise OSError("network unreachable")
        super().run(index)


class Broken(FakeCompiled):
    def execution(self, inputs):
        return BrokenExchange(self, inputs)


def test_an_exchange_that_breaks_ends_the_run():
    def work(world):
        with pytest.raises(OSError, match="network unreachable"):
            runner_of(
                world, compiled=Broken(plain_program(), world, lambda i, values: sum(values))
            ).run()

    run_ranks(1, work)


class BreaksIn(Instrument):
    """Breaks the lane that passes it a span."""

    def __init__(self, kind):
        self.kind = kind

    def span(self, span):
        if span.kind == self.kind:
            raise OSError("no space left")


@pytest.mark.parametrize("kind", ["vote", "collective", "compute"])
def test_thread_that_waits_for_jobs_is_notified_when_a_lane_breaks(kind, tmp_path):
    """Jobs that never started have no thread that could notify a waiter."""

    def work(world):
        runner = runner_of(
            world,
            policy=Sequential(),
            instruments=[BreaksIn(kind)],
            checkpoints=Checkpoints(tmp_path / "kept"),
        )
        second = runner.add("b", runner._engines[0]._function)
        with pytest.raises(OSError, match="no space left") as broken:
            runner.run()
        assert broken.value.__notes__[0] == (
            "raised by `BreaksIn.span`, a hook of an instrument. Hooks must not raise, so "
            "catch the error there."
        )
        assert all(job.done.wait(60) for job in runner.jobs)
        assert second.status == "failed"
        assert str(second.error).startswith(
            "Job `b` cannot continue, because the run broke on rank 0 with `OSError`. Look at "
        )
        with pytest.raises(RuntimeError, match="after shutdown"):
            runner._session._writer.submit(lambda: None)  # pyright: ignore[reportOptionalMemberAccess]

    run_ranks(1, work)


def test_broken_lane_wakes_waiter_on_a_joining_job():
    """The job that added it waits for it, and nothing else can wake it up."""

    def work(world):
        heard = []

        class BreaksWhileOneJoins(Instrument):
            def span(self, span):
                if span.kind == "vote" and runner._driver.router.joining:  # pyright: ignore[reportOptionalMemberAccess]
                    raise OSError("no space left")

        def adds(job):
            new = runner.add("new", lambda job: None)
            heard.append((new.done.wait(60), new.status))

        runner = Runner(world, instruments=[BreaksWhileOneJoins()])
        parent = runner.add("a", adds)
        with pytest.raises(OSError, match="no space left"):
            runner.run()
        assert parent.done.wait(60)
        return heard

    assert run_ranks(1, work) == [[(True, "failed")]]


def test_stop_request_does_not_overtake_earlier_events(monkeypatch):
    """A job is added as the run starts, and stopped while the driver hands over early events."""
    found = []

    def steps_once_it_is_asked(job):
        found[1].join()
        return Overtaken.runner._engines[0]._function(job)  # pyright: ignore[reportAttributeAccessIssue]

    class Overtaken(Driver):
        def run(self, held):
            found.append(self.runner.add("x", steps_once_it_is_asked))  # pyright: ignore[reportAttributeAccessIssue]
            return super().run(held)

        def post(self, event):
            if isinstance(event, m.RunStarted):
                found.append(threading.Thread(target=found[0].stop))
                found[1].start()
                found[1].join(0.2)  # the stop must wait until all jobs have been handed over
            super().post(event)

    monkeypatch.setattr("jaxcross.jobs.runner.Driver", Overtaken)

    def work(world):
        Overtaken.runner = runner = runner_of(world)  # pyright: ignore[reportAttributeAccessIssue]
        runner.run()
        found[1].join()
        return [(job.name, job.status) for job in runner.jobs]

    assert run_ranks(1, work) == [[("a", "ended"), ("x", "stopped")]]


class PoisonedInputs(FakeExecution):
    """An error that the device reports only when a thread waits for it."""

    def wait_inputs(self, index):
        raise FloatingPointError("device ran out of memory")


class Poisoned(FakeCompiled):
    def execution(self, inputs):
        return (PoisonedInputs if self.world.rank == 0 else FakeExecution)(self, inputs)


def test_device_error_fails_job_and_peer_gets_zeros():
    def work(world):
        runner = runner_of(
            world, compiled=Poisoned(plain_program(), world, lambda i, values: sum(values))
        )
        with pytest.raises(
            JobError,
            match=r"^Job `a` failed on rank 0 in step 1, segment 1 \(collective\): Floating",
        ):
            runner.run()
        return [j.step for j in runner.jobs]

    assert run_ranks(2, work) == [[0], [0]]


def test_finished_job_may_end_before_its_event_is_set(monkeypatch):
    class SlowEvent(threading.Event):
        """Returns from `set` late, so the job's thread has plenty of time to end."""

        def set(self):
            super().set()
            job_threads = [
                thread for thread in threading.enumerate() if isinstance(thread, JobThread)
            ]
            for thread in job_threads:
                thread.join(0.3)

    def slow_record(*args):
        record = JobRecord(*args)
        record.done = SlowEvent()
        return record

    monkeypatch.setattr("jaxcross.runtime.driver.JobRecord", slow_record)

    def work(world):
        runner = runner_of(world)
        runner.run()
        return [(job.status, job.step) for job in runner.jobs]

    assert run_ranks(1, work) == [[("ended", 2)]]


def test_an_internal_error_reaches_the_caller():
    def work(world):
        driver = Driver(
            world=world,
            jobs=[("a", lambda: LaneThread("a", lambda: driver.post(None), set()))],  # pyright: ignore[reportArgumentType]
            policy=RoundRobin(),
            depth=2,
        )
        with pytest.raises(InternalError, match="the interleaver does not know the event None"):
            driver.run(deque())

    run_ranks(1, work)


def test_hooks_that_nobody_overrides_are_not_called():
    class Quiet(Instrument):
        pass

    listeners = Listeners([Quiet(), SpanLog()])
    assert len(listeners._span) == len(listeners._note) == 1


def test_step_graphs_follow_the_program():
    graph = step_graph_of(plain_program(exchanges=2, shape=(4,)))
    assert graph.kinds == ("compute", "collective", "compute", "collective", "compute")
    assert graph.needs == ((), (0,), (1,), (2,), (3,))
    assert graph.after_commit == {4}
    assert graph.nbytes == (0, 16, 0, 16, 0)
    assert (
        graph.signature == step_graph_of(plain_program("other", exchanges=2, shape=(4,))).signature
    )
    assert graph.signature != step_graph_of(plain_program(exchanges=1, shape=(4,))).signature
    alone = step_graph_of(plain_program(exchanges=0))
    assert alone.collectives == () and not alone.is_step
    assert graph.is_step and not graph.local_step


def test_patience_is_bounded():
    assert backoff_s(0) == 0.002
    assert all(
        a <= b for a, b in zip(map(backoff_s, range(16)), map(backoff_s, range(1, 17)), strict=True)
    )
    assert backoff_s(16) == 0.05


def test_a_manual_clock():
    clock = ManualClock(5)
    clock.advance(1e-6)
    assert clock() == 1005


def test_interrupt_does_not_mention_jobs_that_left():
    noted: list[str] = []
    jobs = {
        0: SimpleNamespace(name="a", status="stopped"),
        1: SimpleNamespace(name="b", status=None),
    }
    driver: Any = SimpleNamespace(
        terminated=False,
        interrupt=None,
        router=SimpleNamespace(jobs=jobs),
        post=lambda event: None,
        listeners=SimpleNamespace(note=lambda job, **_: noted.append(job)),
    )
    Driver._interrupted(driver, KeyboardInterrupt())
    assert noted == ["b"]


def test_last_note_of_a_failed_job_is_its_end(monkeypatch):
    """A job's thread may note its end once allowed, before the driver's thread continues."""
    log, closed = SpanLog(), threading.Event()

    class SlowEvent(threading.Event):
        """Returns from `set` late, after the job's thread has noted the end."""

        def set(self):
            super().set()
            assert closed.wait(60)

    class Closed(Instrument):
        def note(self, *, job, kind, step=-1, value=None):
            if kind == "closed":
                closed.set()

    def slow_record(*args):
        record = JobRecord(*args)
        record.done = SlowEvent()
        return record

    monkeypatch.setattr("jaxcross.runtime.driver.JobRecord", slow_record)

    def work(world):
        runner = Runner(world, instruments=[log, Closed()])
        runner.add("a", lambda job: 1 / 0)
        with pytest.raises(JobError, match="division by zero"):
            runner.run()

    run_ranks(1, work)
    assert [kind for _, kind, _, _ in log.notes] == ["status", "closed"]
