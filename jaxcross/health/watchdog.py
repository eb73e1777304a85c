"""The watchdog: a thread on each rank that finds out why ranks wait, and terminates runs that hang.

A timeout on an exchange would only tell *that* a rank waits. The watchdog also finds out which rank
hasn't arrived and what that rank is doing, because it asks the other ranks' watchdogs. It sends
point-to-point messages on its own communicator, and these get through even if a collective on
another communicator is stuck.

The same thread sends and receives heartbeats and abort notices, detects a main thread that doesn't
react to SIGTERM, and runs the barriers at the end of the script.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, final

from jaxcross._endings import ExitKind
from jaxcross.health.abort import AbortReason, Terminated, abort_everywhere, stop_reason
from jaxcross.health.abort_notice import AbortNotices
from jaxcross.health.activity import Activity, RankStatus, late_ranks, stall_report
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.heartbeat import Heartbeat
from jaxcross.health.process import ProcessId
from jaxcross.health.signals import SigtermHandler
from jaxcross.health.timed_comm import TimedComm
from jaxcross.health.tracebacks import stacks

WaitingFor = Callable[[Mapping[int, RankStatus | None]], Mapping[int, str] | None]
"""Returns the ranks for which a wait waits, perhaps including this one, each with the reason.

It's called before a report, with the answers of the other ranks. If the result is empty, the wait
is held up by something else that is monitored itself. If it's None, all ranks have arrived, and the
wait should have ended.
"""


_QUERY = 1
_ANSWER = 2
_ANSWER_S = 3.0
_ASKING_INTERVAL_S = 0.02
_HOLD_S = 10.0
_LEAVING_INTERVAL_S = 0.02
_LEAST_CALL_S = 3.0
_LONGEST_TURN_S = 1.0


@final
class Watchdog:
    """Monitors this rank's waits and answers questions from other ranks.

    Args:
        comm: A communicator that nothing else uses.
        timeout_s: Seconds after which a wait is reported and all ranks are aborted.
        flight: Records the waits.
        processes: The process of every rank.
        heartbeat_timeout_s: Seconds without a heartbeat after which a rank is reported; 0 for
            never.
        sigterm: Tells this thread if it must terminate because the main thread is busy in C code.
    """

    def __init__(
        self,
        comm: Any,
        *,
        timeout_s: float,
        flight: FlightRecorder,
        processes: Sequence[ProcessId] = (),
        heartbeat_timeout_s: float = 0.0,
        sigterm: SigtermHandler | None = None,
    ) -> None:
        self._flight = flight
        self._sigterm = sigterm
        self._limit_s = max(heartbeat_timeout_s or timeout_s, _LEAST_CALL_S)
        self._comm = timed = TimedComm(comm, limit_s=self._limit_s, on_stuck=self._on_stuck_call)
        self._notices = AbortNotices(timed, flight)
        self._heartbeat: Heartbeat | None = None
        if heartbeat_timeout_s > 0 and len(processes) > 1:
            self._heartbeat = Heartbeat(
                timed, heartbeat_timeout_s=heartbeat_timeout_s, flight=flight, processes=processes
            )
        self._rank: int = timed.Get_rank()
        self._others = [r for r in range(timed.Get_size()) if r != self._rank]
        self.timeout_s = timeout_s
        self._interval_s = min(0.25, timeout_s / 10)
        self._lock = threading.Lock()
        self._entered = 0
        self._waits: dict[int, tuple[Activity, WaitingFor | None]] = {}
        self._looked_s = time.monotonic()
        self._local_ended_s: dict[str, float] = {}  # when each job's latest local wait ended
        self._shutdown: ShutdownBarrier | None = None
        self._asking = False
        self._questions = 0
        self._asked: set[int] = set()  # ranks that asked and are about to report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcross-watchdog", daemon=True)

    def start(self) -> None:
        """Starts to monitor and to answer.

        A single rank has no watchdog thread, because nothing can hang without other ranks.
        """
        if self._others:
            self._comm.start()
            self._thread.start()

    def stop(self) -> None:
        """Stops the thread once the scripts of all ranks have ended, and monitors until then.

        Waits for all ranks, as `MPI_Finalize` does. Afterwards, MPI may be finalised.
        """
        self._flight.record_exit(ExitKind.LEFT, "its script ended")
        self._stop.set()
        try:
            if self._thread.is_alive():
                self._thread.join()
        except KeyboardInterrupt as error:
            stop = stop_reason(self._rank, terminated=isinstance(error, Terminated))
            self._abort(f"jaxcross: {stop.text} while it waited for the others to end.", stop)
        self._comm.stop()

    def notify(self, reason: AbortReason) -> None:
        """Sends all other ranks the reason why this rank terminates them. Waits for at most 1 s."""
        self._notices.notify(reason)

    def failed_alike(self, own: AbortReason) -> bool:
        """Whether another rank has failed in the same way as this one. Waits for at most 1.5 s."""
        return self._notices.failed_alike(own)

    def report(self) -> None:
        """Notes that this rank is about to print its own reason, and must not print another one."""
        self._notices.report()

    def monitor(
        self,
        *,
        job: str,
        step: int,
        segment: int,
        what: str,
        waiting_for: WaitingFor | None = None,
        local: bool = False,
    ) -> Monitor:
        """Returns a context whose duration is monitored. See `jaxcross.world.World.monitor`."""
        return Monitor(self, partial(self.enter, job, step, segment, what, waiting_for, local))

    def enter(
        self,
        job: str,
        step: int,
        segment: int,
        what: str,
        waiting_for: WaitingFor | None,
        local: bool,
    ) -> int:
        """Starts to monitor a wait, and returns a token for `leave`."""
        if local and waiting_for is None:
            itself = {self._rank: f"own {what} is its own affair"}
            waiting_for = lambda _: itself  # noqa: E731
        with self._lock:
            if waiting_for is None:
                self._entered += 1
                self._asked.clear()  # these ranks asked about an earlier wait
            number = self._entered if waiting_for is None else 0
            wait = Activity.now(
                what, job=job, step=step, segment=segment, number=number, local=local
            )
            token = self._flight.begin(wait)
            self._waits[token] = wait, waiting_for
        return token

    def leave(self, token: int, *, failed: bool) -> None:
        """Ends the wait that `enter` began."""
        with self._lock:
            wait, _ = self._waits.pop(token)
            if wait.local:
                self._local_ended_s[wait.job] = time.monotonic()
        self._flight.end(token, failed=failed)

    def renew(self, token: int) -> None:
        """Restarts the time of a wait."""
        with self._lock:
            if token in self._waits:
                wait, waiting_for = self._waits[token]
                self._waits[token] = replace(wait, since_s=time.monotonic()), waiting_for

    def _status(self) -> RankStatus:
        with self._lock:
            waits = tuple(wait for wait, _ in self._waits.values())
            # Other ranks were waiting while this one was in a local wait, and that time counts
            # towards their waits. So this rank remains excused for another `timeout_s` after the
            # end of its local wait.
            since_s = time.monotonic() - self.timeout_s
            self._local_ended_s = {
                job: end_s for job, end_s in self._local_ended_s.items() if end_s > since_s
            }
            return RankStatus(
                entered=self._entered,
                waits=waits,
                asking=self._asking,
                recent_local=frozenset(self._local_ended_s),
            )

    def _run(self) -> None:
        from mpi4py import MPI

        while True:
            try:
                if self._stop.wait(self._interval_s):
                    # The script has ended on this rank, but perhaps not on others. Heartbeats,
                    # answers and notices continue until the barrier.
                    self._shutdown = self._shutdown or self._begin_shutdown()
                    if self._shutdown.passed():
                        return
                    threading.Event().wait(_LEAVING_INTERVAL_S)
                self._attend()
                self._look_at_waits()
            except MPI.Exception as error:
                self._report(
                    "MPI cannot reach a rank any more: it, its host or the link to it is gone "
                    f"({error})"
                )

    def _attend(self) -> None:
        """Does what must be done regularly, whatever else this thread is doing.

        It's called so often that less than a second passes between two calls.
        """
        self._leave_out_stops()
        self._notices.check()
        self._answer_questions()
        self._exchange_beats()
        if self._sigterm is not None and self._sigterm.overdue():
            stop = stop_reason(self._rank, terminated=True)
            self._abort(
                f"jaxcross: {stop.text} while its main thread was busy in C; all ranks end.", stop
            )

    def _leave_out_stops(self) -> None:
        """Subtracts the time during which the process, and with it this thread, was stopped.

        It's subtracted from all waits.
        """
        now_s = time.monotonic()
        # The iterations of this thread take less than a second. A longer gap between two of them
        # means that the process was stopped, e.g. by SIGSTOP.
        stopped_s = now_s - self._looked_s - _LONGEST_TURN_S
        self._looked_s = now_s
        if stopped_s <= 0:
            return
        with self._lock:
            for token, (wait, waiting_for) in self._waits.items():
                self._waits[token] = (
                    replace(wait, since_s=min(wait.since_s + stopped_s, now_s)),
                    waiting_for,
                )
            self._local_ended_s = {
                job: min(end_s + stopped_s, now_s) for job, end_s in self._local_ended_s.items()
            }
        if self._shutdown is not None and self._shutdown.stopped_sending_s is not None:
            self._shutdown.stopped_sending_s += stopped_s

    def _look_at_waits(self) -> None:
        with self._lock:
            waits = sorted(self._waits.items(), key=lambda item: item[1][0].since_s)
        shared = next((wait for _, (wait, waiting_for) in waits if waiting_for is None), None)
        if shared is not None:
            self._check_exited(shared)
        if waits and self._lasts(waits[0][0]):
            self._investigate(waits[0][0])

    def _lasts(self, token: int) -> Activity | None:
        """Returns the wait if it is still in progress and has taken too long, else None."""
        with self._lock:
            wait, _ = self._waits.get(token, (None, None))
        return (
            wait if wait is not None and time.monotonic() - wait.since_s > self.timeout_s else None
        )

    def _begin_shutdown(self) -> ShutdownBarrier:
        if self._heartbeat is not None:
            self._heartbeat.announce_exit(self._entered)
        return ShutdownBarrier(self._comm)

    def _exchange_beats(self) -> None:
        if self._shutdown is not None and self._shutdown.stopped_sending_s is not None:
            # After the first barrier, no rank sends heartbeats any more, so we can only detect a
            # lost rank by the duration of the second barrier.
            if time.monotonic() - self._shutdown.stopped_sending_s > self._limit_s:
                self._report(
                    "MPI does not let it leave after all scripts: a rank, its host or a link is "
                    "gone"
                )
        elif self._heartbeat is not None:
            lost = self._heartbeat.poll()
            if lost is not None:
                self._report(str(lost), lost.rank)

    def _answer_questions(self) -> None:
        """Answers the other ranks, and prints this rank's stacks on request."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_QUERY, status=status):
            asker = status.Get_source()
            number, question = self._comm.recv(source=asker, tag=_QUERY)
            if question == "stacks":
                with suppress(Exception):
                    # The stream may be closed, or its encoding may lack a character of a stack.
                    print(f"jaxcross: stacks of rank {self._rank}:\n{stacks()}", flush=True)
            else:
                with self._lock:
                    self._asked.add(asker)
            self._comm.send((number, self._status()), dest=asker, tag=_ANSWER)

    def _on_stuck_call(self, rank: int | None) -> None:
        """Reports an MPI call that doesn't return."""
        if rank is None or self._heartbeat is None:
            whom = "any rank" if rank is None else f"rank {rank}"
            self._report(
                f"MPI does not come back from a message to {whom}: a rank, its host or a link is "
                "gone"
            )
        else:
            self._report(
                str(self._heartbeat.lost_peer(rank, self._heartbeat.heartbeat_timeout_s)), rank
            )

    def _check_exited(self, wait: Activity) -> None:
        """Reports a neighbour whose script ended before this wait, without waiting `timeout_s`."""
        # We allow for the heartbeat timeout, because a rank that exits with an error sends its
        # abort notice after its announcement of the exit.
        if (
            self._heartbeat is None
            or time.monotonic() - wait.since_s < self._heartbeat.heartbeat_timeout_s
        ):
            return
        for rank, entered in self._heartbeat.exited().items():
            if entered < wait.number:
                done = f"its script ended after {entered} of {wait.number} exchanges"
                self._report(f"rank {rank} does not come to {wait}: {done}", rank)

    def _report(self, text: str, *lost: int) -> NoReturn:
        message = (
            f"jaxcross: rank {self._rank} ends all ranks while {self._flight.describe()}, because "
            f"{text}"
        )
        self._abort(message, AbortReason(text=text, kind=ExitKind.REPORTED, lost=lost))

    def _abort(self, message: str, reason: AbortReason) -> NoReturn:
        abort_everywhere(message, reason, self.notify)

    def _ask(self, question: str, ranks: list[int]) -> dict[int, RankStatus | None]:
        from mpi4py import MPI

        self._questions += 1
        pending = [self._comm.isend((self._questions, question), dest=r, tag=_QUERY) for r in ranks]
        answers: dict[int, RankStatus | None] = dict.fromkeys(ranks)
        status = MPI.Status()
        # We count time in iterations of this thread, so that a process that was stopped while it
        # was asking still reads the answers.
        for _ in range(round(_ANSWER_S / _ASKING_INTERVAL_S)):
            if None not in answers.values():
                break
            self._attend()
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_ANSWER, status=status):
                source = status.Get_source()
                number, answer = self._comm.recv(source=source, tag=_ANSWER)
                if number == self._questions:  # ignores a late answer to an earlier question
                    answers[source] = answer
            self._stop.wait(_ASKING_INTERVAL_S)
        # A rank that didn't answer may not have received the question, either. The abort comes
        # next.
        del pending
        return answers

    def _investigate(self, token: int) -> None:
        """Reports a stuck wait and aborts, unless another rank does so or the wait ends first.

        One report is enough, so ranks have to decide which of them reports:

        - If this rank was asked before it began to ask, it leaves the report to the rank that
          asked.
        - If two ranks asked at the same time, they find this in each other's answers, and the lower
          one reports.
        - A rank that has asked and doesn't answer is probably reporting.
        - A rank that leaves the report to another one, and is still alive 10 s later, reports after
          all.
        - A rank always reports its own local waits, whoever else asks.
        """
        with self._lock:
            wait, waiting_for = self._waits.get(token, (None, None))
            if wait is None or self._stop.is_set():
                return
            hold_back = bool(self._asked) and not wait.local
            self._asking = not hold_back
        answers = {} if hold_back else self._ask("standing", self._others)
        if hold_back or (self._leaves_report(answers) and not wait.local):
            deadline = time.monotonic() + _HOLD_S
            while time.monotonic() < deadline and not self._stop.wait(self._interval_s):
                self._attend()
            if not self._stop.is_set():
                answers = self._ask("standing", self._others)
        # Asking took seconds. The wait may have ended by now, or the process may have been stopped,
        # which explains the length of the wait.
        self._leave_out_stops()
        wait = self._lasts(token)
        self._asking = wait is not None and not self._stop.is_set()
        if wait is None or not self._asking:
            return
        ranks = None if waiting_for is None else waiting_for(answers)
        # The wait may have ended while `waiting_for` was computing its result, which then names the
        # wrong ranks.
        if self._lasts(token) is None:
            self._asking = False
            return
        # There's no rank to blame, so the wait may continue. If a rank doesn't answer for a while,
        # the heartbeats deal with it, provided that there are any.
        if (
            ranks is not None
            and not ranks
            and (self._heartbeat is not None or None not in answers.values())
        ):
            self._asking = False
            self.renew(token)
            return
        self._report_stall(wait, answers, ranks)

    def _leaves_report(self, answers: Mapping[int, RankStatus | None]) -> bool:
        """Whether the answers to this rank's own question show that another rank reports."""
        with self._lock:
            asked = set(self._asked)  # ranks that asked while this one was asking
        return any(
            r in asked if s is None else s.asking and r < self._rank for r, s in answers.items()
        )

    def _report_stall(
        self,
        wait: Activity,
        answers: Mapping[int, RankStatus | None],
        ranks: Mapping[int, str] | None,
    ) -> NoReturn:
        late = late_ranks(wait, answers, ranks)
        # The late ranks print their stacks themselves. Their answers only confirm that they have
        # done so.
        self._ask("stacks", [r for r in late or self._others if r != self._rank])
        waited_s = time.monotonic() - wait.since_s
        report = stall_report(self._rank, wait, waited_s, answers, ranks)
        late += [r for r, status in answers.items() if status is None]
        names = ""
        if set(late) - {self._rank}:
            names = f" for rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        text = f"rank {self._rank} has waited {waited_s:.0f} s{names} in {wait}"
        message = f"{report}\njaxcross: stacks of rank {self._rank}:\n{stacks()}"
        self._abort(message, AbortReason(text=text, kind=ExitKind.REPORTED, lost=tuple(late)))


@final
class Monitor:
    """A context whose duration the watchdog monitors."""

    __slots__ = ("_enter", "_token", "_watchdog")

    def __init__(self, watchdog: Watchdog, enter: Callable[[], int]) -> None:
        self._watchdog = watchdog
        self._enter = enter

    def renew(self) -> None:
        """Restarts the time, because what the context waits for has made progress."""
        self._watchdog.renew(self._token)

    def __enter__(self) -> None:
        self._token = self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watchdog.leave(self._token, failed=kind is not None)


@final
class ShutdownBarrier:
    """Two barriers after the end of this rank's script.

    No rank may leave MPI while another rank may still send to it. But MPI lets a rank finalise
    before the others, and MPICH over TCP then tries forever to reach that rank. So we need two
    barriers. Once the first one has been passed, all scripts have ended, and this rank stops
    sending. Once the second one has been passed, no rank sends any more, and MPI may be finalised.

    It's used by a single thread, and nothing in it waits.

    Args:
        comm: A communicator on which there are no other collective calls.

    Attributes:
        stopped_sending_s: The time at which this rank stopped sending, None before.
    """

    def __init__(self, comm: TimedComm) -> None:
        self._comm = comm
        self._barrier = comm.Ibarrier()
        self.stopped_sending_s: float | None = None

    def passed(self) -> bool:
        """Whether MPI may be finalised. Must not be called again once it has returned True."""
        if not self._comm.test(self._barrier):
            return False
        if self.stopped_sending_s is not None:
            return True
        self.stopped_sending_s = time.monotonic()
        self._barrier = self._comm.Ibarrier()
        return False
