"""The threads that run the two lanes.

Each rank has two lanes: the compute lane dispatches computation to the device, and the exchange
lane runs exchanges, votes and everything else that involves all ranks. What a lane does next isn't
decided here. The interleaver makes that decision, the driver queues the resulting instructions, and
each thread works through its own queue, one instruction at a time, and posts an event for each. So
these threads contain no policy, and the only state they share is the times in `StepCall.ends_ns`.

There are three threads:

- The *compute* thread dispatches segments. XLA runs them asynchronously, so this thread never waits
  for the device and can queue the next segment while the previous one is still running.
- The *compute-wait* thread waits for the same segments in the same order. It's separate because a
  thread that waits can't dispatch. We need to know when a segment ends, because the interleaver
  charges the job for the time, and because that's when most errors of a computation surface.
- The *exchange* thread runs the exchanges. An exchange blocks its thread until all ranks have
  arrived. In the compute thread, it would hold up the dispatch of computation that could run in the
  meantime. A second exchange thread would hardly help, because a single exchange already reaches
  99% of the throughput of plain TCP at 500 Mbit/s (see the page "One order, the vote, and the
  commit").

All of these threads follow one rule: before a thread reports that a step is done, it drops its own
references to the step (`del item, call`). The report may end the job, and whoever is waiting for
that expects the memory of the job's steps to be free. A reference in a local variable would keep it
alive until the thread's next instruction, which may be much later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, final

from jax.profiler import TraceAnnotation

from jaxcross.errors import ExchangeError
from jaxcross.health import Activity
from jaxcross.interleave import ON_ALL_RANKS, Span, SpanKind, Verdict, segment_name
from jaxcross.interleave import messages as m
from jaxcross.runtime.job_record import StepCall
from jaxcross.world import ask_for_short_slices

if TYPE_CHECKING:
    from jaxcross.runtime.driver import Driver

_FIRST_BACKOFF_S = 0.002
_LONGEST_BACKOFF_S = 0.05
_NOT_TRACED = nullcontext()


def backoff_s(level: int) -> float:
    """Returns how long the exchange lane waits before a vote if it has nothing to report.

    The wait only affects when this rank votes, not what's decided, so it may differ between ranks.
    """
    return min(_FIRST_BACKOFF_S * 2**level, _LONGEST_BACKOFF_S)


def annotate(
    job: str, kind: SpanKind, step: int, segment: int, what: str = ""
) -> AbstractContextManager[object]:
    """Returns a context that shows up in a trace by `jax.profiler` like the segment in our own.

    Outside of such a trace, only checks that there is none, which costs less than an annotation.
    """
    if not TraceAnnotation.is_enabled():
        return _NOT_TRACED
    name = segment_name(job, kind, segment)
    return TraceAnnotation(name + what, job=job, step=step, segment=segment)


class LaneThread(threading.Thread):
    """A thread of a runner. As long as any of these is alive, a run is in progress in this process.

    Args:
        name: The thread's name, without the prefix `jaxcross-`.
        work: The function that the thread runs.
        living: A set that contains the thread as long as it's alive.
        driver: If `work` raises, this driver's `fail` is called with the exception. None if `work`
            handles all exceptions itself.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        living: set[threading.Thread],
        driver: Driver | None = None,
    ) -> None:
        super().__init__(name=f"jaxcross-{name}", daemon=True)
        self.living = living
        self._work = work
        self._driver = driver

    def start(self) -> None:
        # Add this thread before it starts, because it may start another thread right away, which
        # must find the set complete.
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
            # If a lane's thread died silently, this rank's jobs and the other ranks would wait for
            # it forever. So report the exception to the driver, which ends the run.
            if self._driver is None:
                raise
            self._driver.fail(error)
        finally:
            self.living.discard(self)


@final
class ComputeLane:
    """The compute lane: dispatches segments to the device, in the interleaver's order.

    One thread dispatches the segments, and a second thread waits for them in the same order. That's
    also the order in which the device runs them, so a segment can't have begun before the previous
    one ended, and the spans show when the device was really working on each segment.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._todo: SimpleQueue[tuple[m.Dispatch, StepCall] | None] = driver.queue()
        self._on_device: SimpleQueue[tuple[m.Dispatch, StepCall, int, int] | None] = driver.queue()
        living = driver.world.exchange_owner.lane_threads
        self._threads = [
            LaneThread("compute", self._dispatch_all, living, driver),
            LaneThread("compute-wait", self._wait_for_all, living, driver),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends both threads after all queued segments have finished. Waits for that."""
        self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def put(self, instruction: m.Dispatch, call: StepCall) -> None:
        self._todo.put((instruction, call))

    def _dispatch_all(self) -> None:
        driver = self._driver
        while (item := self._todo.get()) is not None:
            d, call = item
            dispatched_ns = driver.clock_ns()
            # Keep this activity open until the device has finished the segment, so that a
            # post-mortem shows which segments were in flight.
            token = driver.world.flight.begin(
                Activity.now("compute", job=call.name, step=d.step, segment=d.segment)
            )
            event: m.Event
            try:
                with annotate(call.name, "compute", d.step, d.segment, ", dispatch"):
                    call.execution.run(d.segment)
            # If a segment can't be dispatched, its job fails, but the lane carries on with the
            # other jobs' segments.
            except Exception as error:
                driver.world.flight.end(token, failed=True)
                event = driver.router.segment_failed(d, call, error)
            else:
                # Hand the segment to the waiting thread before posting the event. The event may end
                # the job, whose memory should then become free, so this thread must have dropped
                # its reference to the call by then.
                self._on_device.put((d, call, dispatched_ns, token))
                event = m.SegmentDispatched(d.job, d.call, d.segment)
            del item, call
            driver.post(event)
        # This is queued behind all dispatched segments, so the other thread gets through them
        # before it ends.
        self._on_device.put(None)

    def _wait_for_all(self) -> None:
        driver = self._driver
        free_ns = 0  # the time at which the device finished the previous segment
        while (item := self._on_device.get()) is not None:
            d, call, dispatched_ns, token = item
            # Most errors of a computation surface here rather than at dispatch, because XLA
            # computes asynchronously.
            try:
                with annotate(call.name, "compute", d.step, d.segment):
                    call.execution.wait_outputs(d.segment)
            except Exception as error:
                driver.world.flight.end(token, failed=True)
                event = driver.router.segment_failed(d, call, error)
                del item, call
                driver.post(event)
                continue
            driver.world.flight.end(token)
            end_ns = driver.clock_ns()
            # The exchange lane's thread may be reading this at the same time, without a lock.
            # That's harmless; see `StepCall.ready_ns`.
            call.ends_ns[d.segment] = end_ns
            # A segment that's dispatched while the device is still busy with the previous one has
            # to wait, so it began at the later of the two times.
            start_ns = max(dispatched_ns, free_ns)
            # Report the span before posting the event. The event may end the run, and then another
            # thread may immediately read the collected spans, and this span would be missing.
            driver.listeners.span(
                Span(
                    rank=driver.world.rank,
                    job=call.name,
                    step=d.step,
                    segment=d.segment,
                    kind="compute",
                    lane=0,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    ready_ns=call.ready_ns(d.segment, start_ns),
                    in_step=call.in_step,
                    other_calls=d.other_calls,
                )
            )
            free_ns = end_ns
            del item, call
            driver.post(m.SegmentCompleted(d.job, d.call, d.segment, end_ns - start_ns))


@final
class ExchangeLane:
    """The exchange lane: runs exchanges, votes and the jobs' collective calls, one at a time.

    The order is the same on all ranks.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._todo: SimpleQueue[tuple[m.Instruction, StepCall | None] | None] = driver.queue()
        self._arrived = threading.Event()  # set whenever an item is queued
        self._pause = threading.Event()  # never set; for waiting without `time.sleep`
        self._thread = LaneThread(
            "exchange", self._work, driver.world.exchange_owner.lane_threads, driver
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless a `Finish` has already ended it. Waits for that."""
        self._put(None)
        self._thread.join()

    def put(self, instruction: m.Instruction, call: StepCall | None) -> None:
        """Queues an instruction. `call` is the step call that it belongs to, if any."""
        self._put((instruction, call))

    def _put(self, item: tuple[m.Instruction, StepCall | None] | None) -> None:
        self._todo.put(item)
        self._arrived.set()

    def _next(self, backoff: float | None) -> tuple[m.Instruction, StepCall | None] | None:
        """Returns the next instruction, or None if the lane has to end.

        Raises:
            Empty: No instruction arrived within `backoff` seconds. Sometimes raised too early,
                which merely makes this rank vote earlier.
        """
        # We can't pass the timeout to the queue, because up to Python 3.12,
        # `SimpleQueue.get(timeout=...)` may block forever. It recomputes the remaining time in a
        # loop, and if the kernel suspends this thread for long enough, the remaining time turns
        # negative, which CPython takes to mean no timeout. Since our backoffs are only 2 to 50 ms,
        # this has happened on a busy machine: one rank never cast its vote, and the run hung until
        # the watchdog terminated it. So we wait for an event instead, and then read the queue
        # without blocking.
        if backoff is None:
            return self._todo.get()
        self._arrived.clear()
        if self._todo.empty():
            self._arrived.wait(backoff)
        return self._todo.get(block=False)

    def _work(self) -> None:
        # While XLA computes, its threads use all cores. With short time slices, the exchange thread
        # still gets to run soon after a message arrives.
        ask_for_short_slices()
        backoff = None
        while True:
            try:
                item = self._next(backoff)
            except Empty:
                # This rank had nothing to report, so it backed off before the vote, and nothing has
                # happened since. Vote now anyway, because other ranks may already be waiting in the
                # vote.
                backoff = None
                self._driver.post(m.BackoffElapsed())
                continue
            if item is None:
                return
            instruction, call = item
            del item
            backoff = None  # an instruction that arrives during a backoff cancels it
            match instruction:
                case m.Finish():
                    # All ranks finish in the same slot, so no rank communicates after this.
                    self._driver.finished()
                    return
                case m.Backoff(level):
                    # This rank has nothing to report at the moment. If it voted right away, the
                    # ranks would vote in a busy loop, which would only tie up a core and the
                    # network. So wait a little first. If something happens in the meantime, the
                    # resulting instruction cuts the wait short.
                    backoff = backoff_s(level)
                    continue
                case m.RunExchange():
                    assert call is not None
                    event = self._exchange(instruction, call)
                case _:
                    event = self._communicate(instruction)
            del call
            self._driver.post(event)

    def _exchange(self, x: m.RunExchange, call: StepCall) -> m.Event:
        driver = self._driver
        execution = call.execution
        segment = x.segment
        zero = x.zero
        # The inputs may not be computed yet. Wait for them before the watchdog starts timing the
        # exchange: as long as this rank is still computing, it isn't waiting for the other ranks,
        # so they must not be reported as late.
        if not zero:
            try:
                execution.wait_inputs(segment)
            except Exception as error:
                # The job has failed on this rank, but the other ranks don't know yet. They're going
                # to enter this exchange and would wait for this rank forever, so take part with
                # zeros. They'll learn about the failure in the next vote, and nobody will use the
                # results of the exchange.
                driver.post(driver.router.segment_failed(x, call, error))
                zero = True
        if zero:
            execution.zero_inputs(segment)
        nbytes = call.graph.nbytes[segment] if call.graph.nbytes else 0
        start_ns = driver.clock_ns()
        with (
            driver.world.monitor(job=call.name, step=x.step, segment=segment, what="exchange"),
            annotate(call.name, "collective", x.step, segment),
        ):
            execution.run(segment)
            execution.wait_outputs(segment)
        # The emulated link's delay isn't a wait for other ranks either, so it comes after the
        # monitor has ended.
        label = self._hold(start_ns, nbytes)
        end_ns = driver.clock_ns()
        call.ends_ns[segment] = end_ns
        driver.listeners.span(
            Span(
                rank=driver.world.rank,
                job=call.name,
                step=x.step,
                segment=segment,
                kind="collective",
                lane=0,
                start_ns=start_ns,
                end_ns=end_ns,
                ready_ns=call.ready_ns(segment, start_ns),
                nbytes=nbytes,
                label=label,
                in_step=call.in_step,
                other_calls=x.other_calls,
            )
        )
        finite = True
        if not zero:  # otherwise the results on this rank are meaningless
            finite = self._check_results(x, call)
        return m.ExchangeDone(x.job, segment, finite)

    def _check_results(self, x: m.RunExchange, call: StepCall) -> bool:
        """Posts a failure if the ranks took different branches or if values aren't finite.

        Returns:
            False if `nonfinite="skip"` requires that the step leaves the state unchanged.
        """
        driver = self._driver
        execution = call.execution
        mismatch = execution.branch_mismatch(x.segment)
        if mismatch is not None:
            driver.post(driver.router.segment_failed(x, call, ExchangeError(mismatch)))
        # Check this now rather than at the end of the step, because later segments may overwrite
        # the exchanged values.
        found = execution.check_finite(x.segment)
        if found is None:
            return True
        if found.error is not None:
            driver.post(driver.router.segment_failed(x, call, found.error, ejects=found.ejects))
        return not found.skips

    def _communicate(self, instruction: m.Instruction) -> m.Event:
        """Carries out an instruction that involves all ranks but doesn't belong to a step.

        That's a vote, a comparison, a gathering or a job's collective call.
        """
        driver = self._driver
        world = self._driver.world
        start_ns = driver.clock_ns()
        event: m.Event
        job = ""
        match instruction:
            # A vote is about all jobs, so the monitor gets no job.
            case m.CastVote(ballot):
                with world.monitor(job="", step=0, segment=-1, what="vote"):
                    event = m.VoteDone(Verdict(world.control.allreduce_min(ballot)))
                # On an emulated link, a vote takes as long as the link's latency, so wait out the
                # rest of it. The messages below are too rare to be worth delaying.
                label = self._hold(start_ns, 0)
            case m.CompareTexts(number, text, step):
                job = driver.router.jobs[number].name
                label = "compare"
                with world.monitor(job=job, step=step, segment=-1, what="comparison"):
                    event = m.TextsCompared(number, tuple(world.control.allgather_text(text)))
            case m.GatherAnnouncements():
                label = "announcements"
                with world.monitor(job="", step=0, segment=-1, what="announcements"):
                    event = m.AnnouncementsGathered(
                        tuple(world.control.allgather_text(driver.announcement()))
                    )
            case m.RunSync(number, step):
                # If the job's work raises an exception, the job has failed, not the lane. So `run`
                # stores the exception, and it's re-raised in the job's thread.
                record = driver.router.jobs[number]
                job = record.name
                label = ON_ALL_RANKS
                assert record.collective is not None
                with world.monitor(job=job, step=step, segment=-1, what=record.collective.what):
                    record.collective.run(world.control)
                event = m.SyncDone(number)
            case _:
                raise TypeError(
                    f"the exchange lane does not know the instruction {instruction!r}. This is a "
                    "bug in jaxcross, please report it."
                )
        self._note_vote(job, label, start_ns)
        return event

    def _hold(self, start_ns: int, nbytes: int) -> str:
        """Waits until an exchange or a vote has taken as long as it would on the emulated link.

        It began at `start_ns`. Returns the label for its span, or "" without an emulated link.
        """
        driver = self._driver
        if driver.link is None:
            return ""
        # The real exchange has already taken some of this time.
        rest_s = driver.link.seconds(nbytes) - (driver.clock_ns() - start_ns) / 1e9
        if rest_s > 0:
            self._pause.wait(rest_s)
        return "emulated"

    def _note_vote(self, job: str, label: str, start_ns: int) -> None:
        driver = self._driver
        driver.listeners.span(
            Span(
                rank=driver.world.rank,
                job=job,
                step=0,
                segment=-1,
                kind="vote",
                lane=0,
                start_ns=start_ns,
                end_ns=driver.clock_ns(),
                ready_ns=start_ns,
                label=label,
            )
        )
