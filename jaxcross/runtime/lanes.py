"""The lanes' threads. Each one does one thing at a time and reports it to the driver; none decides.

A thread drops its references to a step before it reports that the step is done. The report may end
the job, and whoever waits for the job then relies on the step's memory being free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, final

from jaxcross.errors import ExchangeError
from jaxcross.health import Activity
from jaxcross.interleave import ON_ALL_RANKS, Span, Verdict
from jaxcross.interleave import messages as m
from jaxcross.runtime.job_record import StepCall
from jaxcross.world import ask_for_short_slices

if TYPE_CHECKING:
    from jaxcross.runtime.driver import Driver

_FIRST_BACKOFF_S = 0.002
_LONGEST_BACKOFF_S = 0.05


def backoff_s(level: int) -> float:
    """Returns how long an exchange lane with nothing to report waits before its next vote.

    It decides only when the lane votes, never what, so ranks may wait for different times.
    """
    return min(_FIRST_BACKOFF_S * 2**level, _LONGEST_BACKOFF_S)


class LaneThread(threading.Thread):
    """A thread of a runner. While one of these is alive, a run is in progress in this process.

    Args:
        name: The thread's name, without the prefix `jaxcross-`.
        work: The function that the thread runs.
        living: A set that contains the thread from its start to its end.
        driver: Its `fail` gets any exception that `work` raises. None for a thread that handles its
            own exceptions.
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
        # Add this thread before it starts, because a thread that it starts itself must find it
        # there.
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
            # A lane must not end silently: jobs and other ranks would wait for it forever.
            if self._driver is None:
                raise
            self._driver.fail(error)
        finally:
            self.living.discard(self)


@final
class ComputeLane:
    """Dispatches compute segments in the interleaver's order.

    A second thread waits for the segments to finish, in the same order, so that a segment's span
    begins when the device became free for it.
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
        """Ends both threads once all queued segments are done. Waits."""
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
            # This activity stays open until the device has finished the segment, so that a
            # post-mortem shows which segments were in flight.
            token = driver.world.flight.begin(
                Activity.now("compute", job=call.name, step=d.step, segment=d.segment)
            )
            event: m.Event
            try:
                call.execution.run(d.segment)
            # If a segment can't be dispatched, only its job fails. The lane continues.
            except Exception as error:
                driver.world.flight.end(token, failed=True)
                event = driver.router.segment_failed(d, call, error)
            else:
                # Queue this before posting, so that the wait thread gets the segments in the order
                # of their dispatch.
                self._on_device.put((d, call, dispatched_ns, token))
                event = m.SegmentDispatched(d.job, d.call, d.segment)
            del item, call
            driver.post(event)
        # This is the last item in the queue, so the wait thread ends after all dispatched segments.
        self._on_device.put(None)

    def _wait_for_all(self) -> None:
        driver = self._driver
        free_ns = 0  # when the device finished the previous segment
        while (item := self._on_device.get()) is not None:
            d, call, dispatched_ns, token = item
            # XLA reports most errors of a computation here rather than at dispatch.
            try:
                call.execution.wait_outputs(d.segment)
            except Exception as error:
                driver.world.flight.end(token, failed=True)
                event = driver.router.segment_failed(d, call, error)
                del item, call
                driver.post(event)
                continue
            driver.world.flight.end(token)
            end_ns = driver.clock_ns()
            # The exchange lane reads this without a lock, for `ready_ns`; see `StepCall.ready_ns`.
            call.ends_ns[d.segment] = end_ns
            # Dispatch is asynchronous: a segment that was dispatched early had to wait until the
            # device was free.
            start_ns = max(dispatched_ns, free_ns)
            # Do this before posting, because a thread that receives the completion may end the run
            # and then read the spans.
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
    """Runs exchanges, votes and the jobs' collective calls, one at a time.

    Their order is identical across ranks.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._todo: SimpleQueue[tuple[m.Instruction, StepCall | None] | None] = driver.queue()
        self._arrived = threading.Event()  # set whenever an item has been queued
        self._pause = threading.Event()  # never set; used for waits that aren't a plain sleep
        self._thread = LaneThread(
            "exchange", self._work, driver.world.exchange_owner.lane_threads, driver
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless `Finish` has already done so. Waits."""
        self._put(None)
        self._thread.join()

    def put(self, instruction: m.Instruction, call: StepCall | None) -> None:
        """Queues an instruction, together with its call of a step, if it has one."""
        self._put((instruction, call))

    def _put(self, item: tuple[m.Instruction, StepCall | None] | None) -> None:
        self._todo.put(item)
        self._arrived.set()

    def _next(self, backoff: float | None) -> tuple[m.Instruction, StepCall | None] | None:
        """Returns the next instruction, or None if the lane has to end.

        Raises:
            Empty: No instruction arrived within `backoff` seconds. Sometimes raised earlier, which
                only means that this rank votes earlier.
        """
        # We don't pass the timeout to the queue, because up to Python 3.12,
        # `SimpleQueue.get(timeout=...)` can block forever. It computes the remaining timeout in a
        # loop. If the kernel suspends this thread for too long, the remaining timeout becomes
        # negative, and CPython then waits without any timeout. We saw this on a busy machine, where
        # backoffs are 2 to 50 ms: one rank never cast its vote, so the run hung until the watchdog
        # terminated it.
        if backoff is None:
            return self._todo.get()
        self._arrived.clear()
        if self._todo.empty():
            self._arrived.wait(backoff)
        return self._todo.get(block=False)

    def _work(self) -> None:
        # With short time slices, the kernel wakes this thread soon after a message arrives, even
        # while XLA's threads are computing.
        ask_for_short_slices()
        backoff = None
        while True:
            try:
                item = self._next(backoff)
            except Empty:
                # No instruction arrived in time, so this rank votes although it has nothing to
                # report.
                backoff = None
                self._driver.post(m.BackoffElapsed())
                continue
            if item is None:
                return
            instruction, call = item
            del item
            backoff = None  # an instruction that arrives during a backoff replaces it
            match instruction:
                case m.Finish():
                    # No rank communicates after this, because all ranks finish in the same slot.
                    self._driver.finished()
                    return
                case m.Backoff(level):
                    # There's nothing to do, and voting immediately would only spin. Any instruction
                    # ends this wait early.
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
        # Wait for the inputs before the watch begins: a rank whose own computation takes long isn't
        # waiting for other ranks.
        if not zero:
            try:
                execution.wait_inputs(segment)
            except Exception as error:
                # This rank has failed, but the other ranks will enter the exchange. So take part
                # with zeros, and report the failure in the vote.
                driver.post(driver.router.segment_failed(x, call, error))
                zero = True
        if zero:
            execution.zero_inputs(segment)
        nbytes = call.graph.nbytes[segment] if call.graph.nbytes else 0
        start_ns = driver.clock_ns()
        with driver.world.monitor(job=call.name, step=x.step, segment=segment, what="exchange"):
            execution.run(segment)
            execution.wait_outputs(segment)
        # Do this after the watch: the emulated link's delay isn't a wait for other ranks either.
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
        if not zero:  # after a failure, this rank's own results mean nothing
            finite = self._check_results(x, call)
        return m.ExchangeDone(x.job, segment, finite)

    def _check_results(self, x: m.RunExchange, call: StepCall) -> bool:
        """Posts a failure if ranks took different branches or exchanged values aren't finite.

        Returns:
            Whether the step may change the state, as far as `nonfinite="skip"` is concerned.
        """
        driver = self._driver
        execution = call.execution
        mismatch = execution.branch_mismatch(x.segment)
        if mismatch is not None:
            driver.post(driver.router.segment_failed(x, call, ExchangeError(mismatch)))
        # Check this now, because later segments may overwrite what was exchanged.
        found = execution.check_finite(x.segment)
        if found is None:
            return True
        if found.error is not None:
            driver.post(driver.router.segment_failed(x, call, found.error, ejects=found.ejects))
        return not found.skips

    def _communicate(self, instruction: m.Instruction) -> m.Event:
        """Carries out what needs all ranks but belongs to no step.

        These are votes, comparisons, gatherings and collective calls.
        """
        driver = self._driver
        world = self._driver.world
        start_ns = driver.clock_ns()
        event: m.Event
        job = ""
        match instruction:
            # The monitor gets no job, because a vote is about all jobs.
            case m.CastVote(ballot):
                with world.monitor(job="", step=0, segment=-1, what="vote"):
                    event = m.VoteDone(Verdict(world.control.allreduce_min(ballot)))
                # A vote takes the emulated link's latency. We don't delay the messages below,
                # because they are rarer.
                label = self._hold(start_ns, 0)
            case m.CompareTexts(number, text, step):
                job = driver.router.jobs[number].name
                label = "compare"
                with world.monitor(job=job, step=step, segment=-1, what="comparison"):
                    event = m.TextsCompared(number, tuple(world.control.allgather_text(text)))
            case m.GatherAnnouncements():
                label = "news"
                with world.monitor(job="", step=0, segment=-1, what="news of jobs"):
                    event = m.AnnouncementsGathered(
                        tuple(world.control.allgather_text(driver.announcement()))
                    )
            case m.RunSync(number, step):
                # An error in the work is the job's rather than the lane's, so it's raised in the
                # job's thread.
                record = driver.router.jobs[number]
                job = record.name
                label = ON_ALL_RANKS
                assert record.collective is not None
                with world.monitor(job=job, step=step, segment=-1, what=record.collective.what):
                    record.collective.run(world.control)
                event = m.SyncDone(number)
            case _:
                raise TypeError(f"no instruction for the exchange lane: {instruction!r}")
        self._note_vote(job, label, start_ns)
        return event

    def _hold(self, start_ns: int, nbytes: int) -> str:
        """Makes an exchange or a vote last as long as it would on the emulated link.

        `start_ns` is when it began. Returns the label for its span.
        """
        driver = self._driver
        if driver.link is None:
            return ""
        # The real exchange has already taken part of that time.
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
