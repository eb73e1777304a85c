"""A thread of each rank that talks to those of the others: who has not arrived, who is silent, why do all end?

It talks point to point over its own communicator; such messages pass while a collective on another one is stuck.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, final

from jaxcross.health.abort import AbortReason, Terminated, abort_everywhere, stop_of
from jaxcross.health.abort_notice import AbortNotices
from jaxcross.health.activity import Activity, RankStatus, explain, late_ranks
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.heartbeat import Heartbeat
from jaxcross.health.process import Place
from jaxcross.health.shutdown_barrier import Leaving
from jaxcross.health.sigterm import Termination
from jaxcross.health.stacks import stacks
from jaxcross.health.timed_comm import TimedComm

Awaited = Callable[[Mapping[int, RankStatus | None]], Mapping[int, str] | None]
"""The ranks that a wait is for, this one perhaps, and why; asked before a report, with what the others answered.
Where there are none, something else holds it up, which has its own watch. `None`: all are there, and it should be over.
"""


class Watch(AbstractContextManager[None], Protocol):
    """A context whose length is watched."""

    def renew(self) -> None:
        """What is waited for has moved on: its time begins anew."""


_QUERY, _ANSWER = 1, 2
_ANSWER_S = 3.0
_ASKING_INTERVAL_S = 0.02
_HOLD_S = 10.0
_LEAVING_INTERVAL_S = 0.02
_LEAST_CALL_S = 3.0
_LONGEST_TURN_S = 1.0


@final
class Watchdog:
    """Watches this rank's waits and answers the other ranks' questions.

    Args:
        comm: A communicator that nothing else uses.
        timeout_s: Seconds after which a wait is reported and all ranks are aborted.
        flight: Told of the waits.
        places: The process of every rank.
        heartbeat_timeout_s: Seconds after which a rank that does not beat is reported; 0 for never.
        termination: Whether the main thread must be ended from here.
    """

    def __init__(
        self,
        comm: Any,
        *,
        timeout_s: float,
        flight: FlightRecorder,
        places: Sequence[Place] = (),
        heartbeat_timeout_s: float = 0.0,
        termination: Termination | None = None,
    ) -> None:
        self._flight, self._termination = flight, termination
        self._limit_s = max(heartbeat_timeout_s or timeout_s, _LEAST_CALL_S)
        self._comm = comm = TimedComm(comm, limit_s=self._limit_s, on_stuck=self._give_up)
        self._notices = AbortNotices(comm, flight)
        beats = heartbeat_timeout_s > 0 and len(places) > 1
        self._heartbeat = (
            Heartbeat(comm, heartbeat_timeout_s=heartbeat_timeout_s, flight=flight, places=places) if beats else None
        )
        self._rank: int = comm.Get_rank()
        self._others = [r for r in range(comm.Get_size()) if r != self._rank]
        self.timeout_s = timeout_s
        self._interval_s = min(0.25, timeout_s / 10)
        self._lock = threading.Lock()
        self._entered = 0
        self._waits: dict[int, tuple[Activity, Awaited | None]] = {}
        self._looked_s = time.monotonic()
        self._ended: dict[str, float] = {}  # when a job last was in a wait of this rank's own
        self._leaving: Leaving | None = None
        self._asking, self._questions = False, 0
        self._asked: set[int] = set()  # ranks that are about to report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcross-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch and answer. Without other ranks there is nobody to wait for, and no thread."""
        if self._others:
            self._comm.start()
            self._thread.start()

    def stop(self) -> None:
        """This rank's script ended: watches on until all have, then ends the thread. MPI may be finalised after that.

        Waits for all ranks, as leaving MPI does.
        """
        self._flight.words("left", "its script ended")
        self._stop.set()
        try:
            if self._thread.is_alive():
                self._thread.join()
        except KeyboardInterrupt as error:
            ending = stop_of(self._rank, terminated=isinstance(error, Terminated))
            abort_everywhere(f"jaxcross: {ending.reason} while it waited for the others to end.", ending)
        self._comm.stop()

    def tell(self, ending: AbortReason) -> None:
        """Tells all other ranks why this one ends them. Waits a second at most."""
        self._notices.tell(ending)

    def watching(
        self, *, job: str, step: int, segment: int, what: str, awaited: Awaited | None = None, own: bool = False
    ) -> Watch:
        """A context whose length is watched."""
        return _Watching(self, job, step, segment, what, awaited, own)

    def enter(
        self, job: str, step: int, segment: int, what: str, awaited: Awaited | None = None, own: bool = False
    ) -> int:
        if own and awaited is None:
            itself = {self._rank: f"own {what} is its own affair"}
            awaited = lambda _: itself  # noqa: E731
        with self._lock:
            if awaited is None:
                self._entered += 1
                self._asked.clear()  # whoever asked before spoke of an earlier wait
            number = self._entered if awaited is None else 0
            wait = Activity.now(what, job=job, step=step, segment=segment, number=number, own=own)
            token = self._flight.begin(wait)
            self._waits[token] = wait, awaited
        return token

    def leave(self, token: int, *, failed: bool) -> None:
        with self._lock:
            wait, _ = self._waits.pop(token)
            if wait.own:
                self._ended[wait.job] = time.monotonic()
        self._flight.end(token, failed=failed)

    def renew(self, token: int) -> None:
        with self._lock:
            if token in self._waits:
                wait, awaited = self._waits[token]
                self._waits[token] = replace(wait, since_s=time.monotonic()), awaited

    def _standing(self) -> RankStatus:
        with self._lock:
            waits = tuple(wait for wait, _ in self._waits.values())
            since_s = time.monotonic() - self.timeout_s
            self._ended = {job: end_s for job, end_s in self._ended.items() if end_s > since_s}
            return RankStatus(entered=self._entered, waits=waits, asking=self._asking, lately=frozenset(self._ended))

    def _run(self) -> None:
        from mpi4py import MPI

        while True:
            try:
                if self._stop.wait(self._interval_s):
                    self._leaving = self._leaving or self._leave()
                    if self._leaving.over():
                        return
                    threading.Event().wait(_LEAVING_INTERVAL_S)
                self._attend()
                self._look_at_waits()
            except MPI.Exception as error:
                self._report(f"MPI cannot reach a rank any more: it, its host or the link to it is gone ({error})")

    def _attend(self) -> None:
        """What must go on whatever else is done. Often: between two calls less than a second goes by."""
        self._leave_out_stops()
        self._notices.hear()
        self._serve()
        self._beat()
        if self._termination is not None and self._termination.overdue():
            ending = stop_of(self._rank, terminated=True)
            abort_everywhere(f"jaxcross: {ending.reason} while its main thread was busy in C; all ranks end.", ending)

    def _leave_out_stops(self) -> None:
        """A process that was stopped, and its watchdog with it, has not waited meanwhile."""
        now_s = time.monotonic()
        away_s, self._looked_s = now_s - self._looked_s - _LONGEST_TURN_S, now_s
        if away_s <= 0:
            return
        with self._lock:
            for token, (wait, awaited) in self._waits.items():
                self._waits[token] = replace(wait, since_s=min(wait.since_s + away_s, now_s)), awaited
            self._ended = {job: min(end_s + away_s, now_s) for job, end_s in self._ended.items()}
        if self._leaving is not None and self._leaving.silent_since_s is not None:
            self._leaving.silent_since_s += away_s

    def _look_at_waits(self) -> None:
        with self._lock:
            waits = sorted(self._waits.items(), key=lambda item: item[1][0].since_s)
        if (shared := next((wait for _, (wait, awaited) in waits if awaited is None), None)) is not None:
            self._check_left(shared)
        if waits and self._lasts(waits[0][0]):
            self._investigate(waits[0][0])

    def _lasts(self, token: int) -> Activity | None:
        """The wait, if it goes on and has for too long."""
        with self._lock:
            wait, _ = self._waits.get(token, (None, None))
        return wait if wait is not None and time.monotonic() - wait.since_s > self.timeout_s else None

    def _leave(self) -> Leaving:
        if self._heartbeat is not None:
            self._heartbeat.farewell(self._entered)
        return Leaving(self._comm)

    def _beat(self) -> None:
        if self._leaving is not None and self._leaving.silent_since_s is not None:
            if time.monotonic() - self._leaving.silent_since_s > self._limit_s:
                self._report("MPI does not let it leave after all scripts: a rank, its host or a link is gone")
        elif self._heartbeat is not None and (loss := self._heartbeat.turn()) is not None:
            self._report(str(loss), loss.rank)

    def _serve(self) -> None:
        """Answer what other ranks have asked; print this rank's stacks where they ask for them."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_QUERY, status=status):
            asker = status.Get_source()
            number, question = self._comm.recv(source=asker, tag=_QUERY)
            if question == "stacks":
                with suppress(Exception):  # a stream that is closed, or has no letters for a line of a stack
                    print(f"jaxcross: stacks of rank {self._rank}:\n{stacks()}", flush=True)
            else:
                with self._lock:
                    self._asked.add(asker)
            self._comm.send((number, self._standing()), dest=asker, tag=_ANSWER)

    def _give_up(self, rank: int | None) -> None:
        """A call of MPI does not return."""
        if rank is None or self._heartbeat is None:
            whom = "any rank" if rank is None else f"rank {rank}"
            self._report(f"MPI does not come back from a message to {whom}: a rank, its host or a link is gone")
        else:
            self._report(str(self._heartbeat.loss(rank, self._heartbeat.heartbeat_timeout_s)), rank)

    def _check_left(self, wait: Activity) -> None:
        """Who has left will never come: there is no need to wait for the watchdog's whole time."""
        if self._heartbeat is None or time.monotonic() - wait.since_s < self._heartbeat.heartbeat_timeout_s:
            return
        for rank, entered in self._heartbeat.left().items():
            if entered < wait.number:
                done = f"its script ended after {entered} of {wait.number} exchanges"
                self._report(f"rank {rank} does not come to {wait}: {done}", rank)

    def _report(self, reason: str, *lost: int) -> None:
        text = f"jaxcross: rank {self._rank} ends all ranks while {self._flight.standing()}, because {reason}"
        abort_everywhere(text, AbortReason(reason=reason, how="reported", lost=lost))

    def _ask(self, question: str, ranks: list[int]) -> dict[int, RankStatus | None]:
        from mpi4py import MPI

        self._questions += 1
        pending = [self._comm.isend((self._questions, question), dest=r, tag=_QUERY) for r in ranks]
        answers: dict[int, RankStatus | None] = dict.fromkeys(ranks)
        status = MPI.Status()
        # Counted are this thread's own turns: a process that was stopped meanwhile has still to hear the answers.
        for _ in range(round(_ANSWER_S / _ASKING_INTERVAL_S)):
            if None not in answers.values():
                break
            self._attend()
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_ANSWER, status=status):
                source = status.Get_source()
                number, standing = self._comm.recv(source=source, tag=_ANSWER)
                if number == self._questions:  # not to an earlier one, late
                    answers[source] = standing
            self._stop.wait(_ASKING_INTERVAL_S)
        del pending  # whoever did not answer did not receive either; the abort comes next
        return answers

    def _investigate(self, token: int) -> None:
        """Reports and aborts, unless another rank does so, or the wait ends meanwhile.

        One report is enough. Of two ranks, one was asked before it began to ask, and leaves it to the other; or both
        asked at once, see that of each other, and the lower one speaks. Who holds back speaks after all where nobody
        has ended it in 10 s. What is a rank's own affair it reports itself, whoever else asks.
        """
        with self._lock:
            wait, awaited = self._waits.get(token, (None, None))
            if wait is None or self._stop.is_set():
                return
            held = bool(self._asked) and not wait.own
            self._asking = not held
        answers = {} if held else self._ask("standing", self._others)
        lower = any(s is not None and s.asking and r < self._rank for r, s in answers.items())
        if held or (lower and not wait.own):
            deadline = time.monotonic() + _HOLD_S
            while time.monotonic() < deadline and not self._stop.wait(self._interval_s):
                self._attend()
            if not self._stop.is_set():
                answers = self._ask("standing", self._others)
        self._leave_out_stops()
        wait = self._lasts(token)
        self._asking = wait is not None and not self._stop.is_set()
        if wait is None or not self._asking:
            return
        those = None if awaited is None else awaited(answers)
        # Who answers nothing for a while is the heartbeats' affair, where there are any.
        if those is not None and not those and (self._heartbeat is not None or None not in answers.values()):
            self._asking = False
            self.renew(token)
            return
        late = late_ranks(wait, answers, those)
        self._ask("stacks", [r for r in late or self._others if r != self._rank])
        waited_s = time.monotonic() - wait.since_s
        report = explain(self._rank, wait, waited_s, answers, those)
        late += [r for r, standing in answers.items() if standing is None]
        names = f" for rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}" if set(late) - {self._rank} else ""
        abort_everywhere(
            f"{report}\njaxcross: stacks of rank {self._rank}:\n{stacks()}",
            AbortReason(
                reason=f"rank {self._rank} has waited {waited_s:.0f} s{names} in {wait}",
                how="reported",
                lost=tuple(late),
            ),
        )


@final
class _Watching:
    __slots__ = ("_token", "_wait", "_watchdog")

    def __init__(self, watchdog: Watchdog, *wait: Any) -> None:
        self._watchdog, self._wait = watchdog, wait

    def renew(self) -> None:
        self._watchdog.renew(self._token)

    def __enter__(self) -> None:
        self._token = self._watchdog.enter(*self._wait)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self._watchdog.leave(self._token, failed=kind is not None)
