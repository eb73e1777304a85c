"""The threads of the lanes. Each does one thing at a time and reports it to the driver; none decides anything.

They let go of a step before they report that they are through with it: who hears of it may count on its memory, and no
thread runs at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from jaxcross.errors import ExchangeError
from jaxcross.health.activity import Activity
from jaxcross.interleave import messages as m
from jaxcross.interleave.instrument import TOGETHER, Span, SpanKind
from jaxcross.interleave.vote import Verdict
from jaxcross.runtime.collective_call import meet
from jaxcross.world.sched_slice import ask_for_short_slices

if TYPE_CHECKING:
    from jaxcross.runtime.driver import Driver
    from jaxcross.runtime.job_record import Call

_FIRST_PATIENCE_S, _LONGEST_PATIENCE_S = 0.002, 0.05


def backoff_s(level: int) -> float:
    """How long an exchange lane without news waits before it votes all the same: it only decides when, never what."""
    return min(_FIRST_PATIENCE_S * 2**level, _LONGEST_PATIENCE_S)


class LaneThread(threading.Thread):
    """A thread of a runner. While one lives, a run is in progress in this process.

    Args:
        name: Of the thread, after `jaxcross-`.
        work: Its body.
        living: Holds the thread from its start to its end.
        driver: Stopped by an exception of `work`; None for a thread that handles its own.
    """

    def __init__(
        self, name: str, work: Callable[[], None], living: set[threading.Thread], driver: Driver | None = None
    ) -> None:
        super().__init__(name=f"jaxcross-{name}", daemon=True)
        self.living = living
        self._work, self._driver = work, driver

    def start(self) -> None:
        self.living.add(self)
        try:
            super().start()
        except BaseException:
            self.living.discard(self)
            raise

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            if self._driver is None:
                raise
            self._driver.die(error)
        finally:
            self.living.discard(self)


class ComputeLane:
    """Dispatches compute segments in the interleaver's order; a second thread waits for them in that order, so that a
    segment's span begins when the device was free for it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._todo: SimpleQueue[tuple[m.Dispatch, Call] | None] = driver.queue()
        self._on_device: SimpleQueue[tuple[m.Dispatch, Call, int, int] | None] = driver.queue()
        living = driver.world.exchange_owner.lane_threads
        self._threads = [
            LaneThread("compute", self._dispatch_all, living, driver),
            LaneThread("compute-wait", self._wait_for_all, living, driver),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends both threads after what is queued. Waits."""
        self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def put(self, instruction: m.Dispatch, call: Call) -> None:
        self._todo.put((instruction, call))

    def _dispatch_all(self) -> None:
        driver = self._driver
        while (item := self._todo.get()) is not None:
            d, call = item
            dispatched_ns = driver.clock_ns()
            token = driver.world.flight.begin(Activity.now("compute", job=call.name, step=d.step, segment=d.segment))
            try:
                call.execution.run(d.segment)
            except Exception as error:
                driver.world.flight.end(token, failed=True)
                event = driver.segment_failed(d, call, error)
            else:
                self._on_device.put((d, call, dispatched_ns, token))
                event = m.SegmentDispatched(d.job, d.call, d.segment)
            del item, call
            driver.post(event)
        self._on_device.put(None)

    def _wait_for_all(self) -> None:
        driver, free_ns = self._driver, 0
        while (item := self._on_device.get()) is not None:
            d, call, dispatched_ns, token = item
            try:
                call.execution.wait_outputs(d.segment)
            except Exception as error:
                driver.world.flight.end(token, failed=True)
                event = driver.segment_failed(d, call, error)
                del item, call
                driver.post(event)
                continue
            driver.world.flight.end(token)
            end_ns = driver.clock_ns()
            call.ends_ns[d.segment] = end_ns
            start_ns = max(dispatched_ns, free_ns)
            # Before the post: whoever hears of the completion may end the run and ask for the spans.
            driver.listeners.span(
                Span(
                    rank=driver.world.rank, job=call.name, step=d.step, segment=d.segment, kind="compute", lane=0,
                    start_ns=start_ns, end_ns=end_ns, ready_ns=call.ready_ns(d.segment, start_ns),
                    in_step=call.in_step, other_calls=d.other_calls,
                )
            )  # fmt: skip
            free_ns = end_ns
            del item, call
            driver.post(m.SegmentCompleted(d.job, d.call, d.segment, end_ns - start_ns))


class ExchangeLane:
    """Makes exchanges, votes and what jobs do together, one at a time, in the order that all ranks share."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._todo: SimpleQueue[tuple[m.Instruction, Call | None] | None] = driver.queue()
        self._pause = threading.Event()  # never set: a wait that is not a sleep
        self._thread = LaneThread("exchange", self._work, driver.world.exchange_owner.lane_threads, driver)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, if `Finish` has not done so yet. Waits."""
        self._todo.put(None)
        self._thread.join()

    def put(self, instruction: m.Instruction, call: Call | None) -> None:
        self._todo.put((instruction, call))

    def _work(self) -> None:
        ask_for_short_slices()
        backoff = None
        while True:
            try:
                item = self._todo.get(timeout=backoff)
            except Empty:
                backoff = None
                self._driver.post(m.BackoffElapsed())
                continue
            if item is None:
                return
            instruction, call = item
            del item
            backoff = None
            match instruction:
                case m.Finish():
                    self._driver.over()
                    return
                case m.Backoff(level):
                    backoff = backoff_s(level)
                    continue
                case m.RunExchange():
                    assert call is not None
                    event = self._exchange(instruction, call)
                case _:
                    event = self._talk(instruction)
            del call
            self._driver.post(event)

    def _exchange(self, x: m.RunExchange, call: Call) -> m.Event:
        driver, execution, segment = self._driver, call.execution, x.segment
        zero = x.zero
        if not zero:
            try:
                execution.wait_inputs(segment)
            except Exception as error:
                # This rank has failed, but the others are coming: take part with zeros, and say so in the vote.
                driver.post(driver.segment_failed(x, call, error))
                zero = True
        if zero:
            execution.zero_inputs(segment)
        nbytes = call.graph.nbytes[segment] if call.graph.nbytes else 0
        start_ns = driver.clock_ns()
        with driver.world.watching(job=call.name, step=x.step, segment=segment, what="exchange"):
            execution.run(segment)
            execution.wait_outputs(segment)
        label = self._hold(start_ns, nbytes)
        end_ns = driver.clock_ns()
        call.ends_ns[segment] = end_ns
        ready_ns = call.ready_ns(segment, start_ns)
        self._span(
            "collective",
            start_ns,
            end_ns,
            ready_ns,
            call.name,
            x.step,
            segment,
            nbytes,
            label,
            call.in_step,
            x.other_calls,
        )
        if not zero and (what := execution.branch_mismatch(segment)) is not None:
            driver.post(driver.segment_failed(x, call, ExchangeError(what)))
        finite = True
        if call.nonfinite != "ignore" and not zero and (what := execution.nonfinite(segment)) is not None:
            if call.nonfinite == "skip":
                finite = not execution.skippable
            else:
                error = FloatingPointError(what)
                driver.post(driver.segment_failed(x, call, error, ejects=call.nonfinite == "eject"))
        return m.ExchangeDone(x.job, segment, finite)

    def _talk(self, instruction: m.Instruction) -> m.Event:
        driver, world = self._driver, self._driver.world
        start_ns = driver.clock_ns()
        event: m.Event
        match instruction:
            case m.CastVote(ballot):
                with world.watching(job="", step=0, segment=-1, what="vote"):
                    event = m.VoteDone(Verdict(world.control.allreduce_min(ballot)))
                label, job = self._hold(start_ns, 0), ""
            case m.CompareTexts(number, text):
                job, label = driver.seats[number].name, "compare"
                with world.watching(job=job, step=0, segment=-1, what="comparison"):
                    event = m.TextsCompared(number, tuple(world.control.allgather_text(text)))
            case m.GatherAnnouncements():
                job, label = "", "news"
                with world.watching(job="", step=0, segment=-1, what="news of jobs"):
                    event = m.AnnouncementsGathered(tuple(world.control.allgather_text(driver.announcement())))
            case m.RunSync(number):
                seat = driver.seats[number]
                job, label = seat.name, TOGETHER
                assert seat.sync is not None
                with world.watching(job=job, step=0, segment=-1, what="restore or the like"):
                    try:
                        seat.sync_result = (meet(seat.sync, world.control), None)
                    except Exception as error:
                        seat.sync_result = (None, error)
                event = m.SyncDone(number)
            case _:
                raise TypeError(f"no instruction for the exchange lane: {instruction!r}")
        self._span("vote", start_ns, driver.clock_ns(), start_ns, job, 0, -1, 0, label)
        return event

    def _hold(self, start_ns: int, nbytes: int) -> str:
        """Makes what began at `start_ns` last as long as the emulated link would."""
        driver = self._driver
        if driver.link is None:
            return ""
        rest_s = driver.link.seconds(nbytes) - (driver.clock_ns() - start_ns) / 1e9
        if rest_s > 0:
            self._pause.wait(rest_s)
        return "emulated"

    def _span(
        self, kind: SpanKind, start_ns: int, end_ns: int, ready_ns: int, job: str, step: int, segment: int, nbytes: int,
        label: str, in_step: bool = True, other_calls: int = 0,
    ) -> None:  # fmt: skip
        self._driver.listeners.span(
            Span(
                rank=self._driver.world.rank, job=job, step=step, segment=segment, kind=kind, lane=0,
                start_ns=start_ns, end_ns=end_ns, ready_ns=ready_ns, nbytes=nbytes, label=label,
                in_step=in_step, other_calls=other_calls,
            )
        )  # fmt: skip
