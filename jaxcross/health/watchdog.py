"""The watchdog: a thread on each rank that finds out why ranks are waiting and ends hanging runs.

A timeout on every exchange would only tell you *that* a rank is waiting, not which rank hasn't
arrived. So if a wait takes too long, the watchdog asks the watchdogs of all other ranks what their
ranks are up to. From the answers, it can name the ranks that haven't arrived and what they're doing
instead, and make them print their stacks. The watchdogs exchange point-to-point messages on their
own communicator, which get through even if a collective on another communicator is stuck.

All ranks enter most of their waits (exchanges, votes, ...) in the same order, so a watchdog can
just number them: if rank 3 has entered 17 waits and this rank is in its 18th, rank 3 hasn't
arrived. A few waits aren't part of this sequence, e.g. a job's wait for its own data. For these,
the caller provides a function that determines the missing ranks (`WaitingFor`).

If one rank is late, all other ranks are stuck in the same wait, and their watchdogs notice at about
the same time. Only one of them should report it; see `_investigate` for how they decide which.

A suspended rank isn't late. When a batch system suspends the processes, or the user stops them with
Ctrl-Z, the clock keeps running while no rank does. So we detect such gaps, and subtract them from
the duration of all waits.

The watchdog's thread also takes care of everything else that has to go on even if the main thread
is stuck: it sends and receives heartbeats and abort notices, detects that the main thread isn't
reacting to SIGTERM, and runs the barriers at the end of the script.
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
"""A function that returns the ranks that are holding up a wait, each with the reason.

It's called just before a report, with the other ranks' answers. The result may include this rank
itself. An empty result means that the wait is held up by something that's monitored separately, so
it isn't reported. None means that all ranks have arrived and the wait should be over.
"""


# MPI tags. On the same communicator, heartbeats use tag 3, and abort notices use tags 4 and 5.
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
    """Monitors this rank's waits, and answers the questions of other ranks' watchdogs.

    Args:
        comm: A communicator that nothing else uses.
        timeout_s: After this many seconds, a wait is reported and all ranks are aborted.
        flight: Records the waits.
        processes: The process of every rank.
        heartbeat_timeout_s: After this many seconds without a heartbeat, a rank is reported and all
            ranks are aborted. 0 for never.
        sigterm: Detects a SIGTERM that the main thread doesn't react to because it's in C code.
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
        # How long an MPI call may take before it counts as stuck: as long as a rank may go without
        # a heartbeat. The lower bound keeps ordinary calls from looking stuck if the user has
        # chosen a very short timeout.
        self._limit_s = max(heartbeat_timeout_s or timeout_s, _LEAST_CALL_S)
        timed = TimedComm(comm, limit_s=self._limit_s, on_stuck=self._on_stuck_call)
        self._comm = timed
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
        self._asked: set[int] = set()  # ranks that have asked this rank and are about to report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcross-watchdog", daemon=True)

    def start(self) -> None:
        """Starts the watchdog's thread.

        A no-op with a single rank, which never has anyone to wait for.
        """
        if self._others:
            self._comm.start()
            self._thread.start()

    def stop(self) -> None:
        """Stops the thread once all ranks' scripts have ended, and monitors this rank until then.

        Waits for all ranks, as `MPI_Finalize` would. Afterwards, it's safe to finalise MPI.
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
        """Sends the reason for an abort to all other ranks. Waits for at most 1 s."""
        self._notices.notify(reason)

    def failed_alike(self, own: AbortReason) -> bool:
        """Whether another rank has failed in the same way. Waits for at most 1.5 s."""
        return self._notices.failed_alike(own)

    def report(self) -> None:
        """Records that this rank prints its own reason instead of another rank's."""
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
        """Returns a context that the watchdog monitors. See `jaxcross.world.World.monitor`."""
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
        """Begins a wait. Returns a token for `leave`."""
        if local and waiting_for is None:
            # No other rank can be late for a local wait, so if it takes too long, the report blames
            # this rank.
            itself = {self._rank: f"its own {what} takes this long"}
            waiting_for = lambda _: itself  # noqa: E731
        with self._lock:
            if waiting_for is None:
                self._entered += 1
                self._asked.clear()  # those questions were about an earlier wait
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
        """Resets a wait's timer, because whatever it's waiting for has made progress."""
        with self._lock:
            if token in self._waits:
                wait, waiting_for = self._waits[token]
                self._waits[token] = replace(wait, since_s=time.monotonic()), waiting_for

    def _status(self) -> RankStatus:
        with self._lock:
            waits = tuple(wait for wait, _ in self._waits.values())
            # While this rank was in a local wait, e.g. loading data, the other ranks may have been
            # waiting for it. That time counts towards their waits, which may exceed the limit right
            # after the local wait ends, even though this rank isn't stuck. So excuse it for another
            # `timeout_s`.
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
                    # This rank's script has ended, but others may still be running, and their ranks
                    # need our heartbeats, answers and notices. So keep going until all ranks have
                    # reached the barrier.
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
        """Takes care of everything that can't wait.

        Must be called at least once per second, even while this thread is waiting for answers.
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
        """Detects if the process was suspended, and subtracts that time from all waits."""
        now_s = time.monotonic()
        # An iteration of this thread takes less than a second. If the last iteration was longer ago
        # than that, the whole process must have been suspended, e.g. by SIGSTOP.
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
            # The second barrier is timed as well, so the same correction applies.
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
        """Returns the wait if it's still in progress and has lasted too long, or None."""
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
            # Ranks stop sending heartbeats after the first barrier, so missing heartbeats no longer
            # mean anything. From then on, the only sign of a lost rank is that the second barrier
            # takes too long.
            if time.monotonic() - self._shutdown.stopped_sending_s > self._limit_s:
                self._report(
                    "the barrier after the end of all scripts takes too long: a rank, its host or "
                    "a link is gone"
                )
        elif self._heartbeat is not None:
            lost = self._heartbeat.poll()
            if lost is not None:
                self._report(str(lost), lost.rank)

    def _answer_questions(self) -> None:
        """Answers other ranks' questions. If they ask for it, also prints this rank's stacks."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_QUERY, status=status):
            asker = status.Get_source()
            number, question = self._comm.recv(source=asker, tag=_QUERY)
            if question == "stacks":
                with suppress(Exception):
                    # Printing raises if the stream is closed or its encoding lacks a character
                    # that's in the stacks.
                    print(f"jaxcross: stacks of rank {self._rank}:\n{stacks()}", flush=True)
            else:
                with self._lock:
                    self._asked.add(asker)
            self._comm.send((number, self._status()), dest=asker, tag=_ANSWER)

    def _on_stuck_call(self, rank: int | None) -> None:
        """Reports that an MPI call made by the watchdog doesn't return."""
        if rank is None or self._heartbeat is None:
            whom = "any rank" if rank is None else f"rank {rank}"
            self._report(
                f"an MPI call to {whom} does not return: a rank, its host or a link is gone"
            )
        else:
            self._report(
                str(self._heartbeat.lost_peer(rank, self._heartbeat.heartbeat_timeout_s)), rank
            )

    def _check_exited(self, wait: Activity) -> None:
        """Reports a neighbour whose script ended before it entered this wait."""
        # A neighbour whose script has ended will never enter this wait, so there's no point in
        # waiting for the full `timeout_s`. But if an error ended the script, the neighbour sends an
        # abort notice right after announcing its exit. The notice explains more than we can, so
        # give it some time to arrive.
        if (
            self._heartbeat is None
            or time.monotonic() - wait.since_s < self._heartbeat.heartbeat_timeout_s
        ):
            return
        for rank, entered in self._heartbeat.exited().items():
            if entered < wait.number:
                done = f"its script ended after {entered} of {wait.number} exchanges"
                self._report(f"rank {rank} will not enter {wait}: {done}", rank)

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
        # Limit the number of iterations rather than the time. If this process is suspended while
        # it's waiting for the answers, it can still read them once it resumes, whereas a time limit
        # would have expired by then.
        for _ in range(round(_ANSWER_S / _ASKING_INTERVAL_S)):
            if None not in answers.values():
                break
            self._attend()
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_ANSWER, status=status):
                source = status.Get_source()
                number, answer = self._comm.recv(source=source, tag=_ANSWER)
                if number == self._questions:  # otherwise it's a late answer to an earlier question
                    answers[source] = answer
            self._stop.wait(_ASKING_INTERVAL_S)
        # If a rank didn't answer, the question may not even have gone out yet. Drop the MPI request
        # anyway, because an abort usually comes next.
        del pending
        return answers

    def _investigate(self, token: int) -> None:
        """Reports a stuck wait and aborts all ranks, unless another rank does so or the wait ends.

        Several ranks usually notice the same stall at about the same time, but a single report is
        enough. To decide who reports, they have nothing to go by but their questions to each other
        and the answers. The rules are:

        - A rank that gets asked before it has asked anyone itself leaves the report to the asking
          rank.
        - If two ranks ask each other at the same time, they learn that from the answers, and the
          lower rank reports.
        - A rank that has asked this rank but doesn't answer is probably reporting already.
        - In case the rank that was supposed to report fails to, a rank that's still alive after 10
          s reports anyway.
        - A rank always reports its own local waits, because the other ranks excuse it during such a
          wait.
        """
        with self._lock:
            wait, waiting_for = self._waits.get(token, (None, None))
            if wait is None or self._stop.is_set():
                return
            hold_back = bool(self._asked) and not wait.local
            self._asking = not hold_back
        answers = {} if hold_back else self._ask("status", self._others)
        if hold_back or (self._leaves_report(answers) and not wait.local):
            deadline = time.monotonic() + _HOLD_S
            while time.monotonic() < deadline and not self._stop.wait(self._interval_s):
                self._attend()
            if not self._stop.is_set():
                answers = self._ask("status", self._others)
        # Asking may have taken several seconds, and the wait may be over by now. Or it only seemed
        # long because the process was suspended. So check again.
        self._leave_out_stops()
        wait = self._lasts(token)
        self._asking = wait is not None and not self._stop.is_set()
        if wait is None or not self._asking:
            return
        ranks = None if waiting_for is None else waiting_for(answers)
        # If the wait ended while `waiting_for` was computing its result, the result may name the
        # wrong ranks.
        if self._lasts(token) is None:
            self._asking = False
            return
        # No rank can be blamed for the wait at the moment, so let it go on. A rank that hasn't
        # answered may be the culprit, but if so, it will stop sending heartbeats and be reported
        # for that. With heartbeats turned off, nothing else would catch such a rank, so report it
        # now.
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
        """Whether the answers to this rank's question show that another rank is going to report."""
        with self._lock:
            asked = set(self._asked)  # ranks that asked this rank while it was asking them
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
        # This question makes the late ranks print their own stacks. We don't need their answers,
        # but wait for them anyway, because the abort that comes next would otherwise cut off the
        # printing.
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
        """Resets the timer, because whatever the context is waiting for has made progress."""
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
    """Two barriers at the end of the script, after which MPI may be finalised.

    No rank may finalise MPI while another rank might still send it a message, but MPI doesn't
    enforce that. If a rank finalises early and another rank then sends it a message, MPICH over TCP
    retries forever, and the sender hangs.

    A single barrier isn't enough: a rank that has passed it knows that all scripts have ended, but
    another rank may not have noticed yet and still send a heartbeat. So each rank stops sending
    after the first barrier, and then enters a second barrier. Once a rank has passed that, nobody
    sends anything any more.

    Only one thread may use it. None of its methods waits.

    Args:
        comm: A communicator on which nothing else issues collectives.

    Attributes:
        stopped_sending_s: When this rank passed the first barrier and stopped sending. None before
            that.
    """

    def __init__(self, comm: TimedComm) -> None:
        self._comm = comm
        self._barrier = comm.Ibarrier()
        self.stopped_sending_s: float | None = None

    def passed(self) -> bool:
        """Whether MPI may be finalised. Don't call this again after it has returned True."""
        if not self._comm.test(self._barrier):
            return False
        if self.stopped_sending_s is not None:
            return True
        self.stopped_sending_s = time.monotonic()
        self._barrier = self._comm.Ibarrier()
        return False
