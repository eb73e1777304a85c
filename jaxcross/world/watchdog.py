"""Who has not arrived? A thread of its own asks the other ranks while an exchange is stuck, reports, and aborts.

It talks point to point over its own communicator; such messages pass while a collective on another one is stuck.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

from jaxcross.world.abort import abort_everywhere
from jaxcross.world.stacks import stacks

Awaited = Callable[[], Mapping[int, str]]
"""The ranks that a wait is for, and why; asked when it is reported."""

_QUERY, _ANSWER = 1, 2
_ANSWER_S = 3.0
_HOLD_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One wait of one rank: what for, which in its sequence of waits (0: outside of it), since when (s, monotonic)."""

    job: str
    step: int
    segment: int
    what: str
    number: int
    since_s: float

    def __str__(self) -> str:
        return f"job {self.job!r}, step {self.step}, segment {self.segment} ({self.what})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a rank is: waits it has entered, those it is in, and whether it is about to report."""

    entered: int
    waits: tuple[Wait, ...]
    asking: bool = False


def explain(
    rank: int,
    wait: Wait,
    waited_s: float,
    answers: Mapping[int, Standing | None],
    awaited: Mapping[int, str] | None = None,
) -> str:
    """The report of a stuck wait. Pure.

    Args:
        rank: The rank that reports.
        wait: What it is stuck in.
        waited_s: For how long.
        answers: Every other rank's standing; None where none came.
        awaited: The ranks that it waits for and why, where the order of waits does not tell.
    """
    lines = [f"jaxcross: rank {rank} has waited {waited_s:.0f} s in {wait}."]
    late = late_ranks(wait, answers, awaited)
    for r in late:
        standing = answers[r]
        assert standing is not None
        where = f"it is in {standing.waits[-1]}" if standing.waits else "it is in no exchange"
        if awaited is None:
            lines.append(f"  rank {r} has not arrived: {where}, after {standing.entered} of {wait.number} exchanges.")
        else:
            lines.append(f"  rank {r} has not arrived: {awaited[r]}; {where}.")
    silent = [r for r, standing in answers.items() if standing is None]
    lines += [f"  rank {r} does not answer: it has ended, or its interpreter is blocked." for r in silent]
    unlike = _unlike_waits(wait, answers)
    if unlike:
        lines += [f"  rank {r} waits in {other}." for r, other in unlike]
        lines.append(
            "  The ranks wait for different things. Did shapes or types of a step's arguments change on some ranks "
            "only, as in a shorter last batch? There the step is agreed on anew, while the others go on with it."
        )
    elif not late and not silent:
        lines.append("  All ranks have arrived: MPI or the network is stuck.")
    lines.append(
        "  Remedy: look at the stacks of the late ranks. If they are merely slow (compilation, input, evaluation), "
        "raise `initialize(watchdog_s=...)`."
    )
    return "\n".join(lines)


def late_ranks(
    wait: Wait, answers: Mapping[int, Standing | None], awaited: Mapping[int, str] | None = None
) -> list[int]:
    """Ranks that answered and are `awaited`, or have not entered this wait: all ranks enter theirs in one order."""
    return [
        r
        for r, s in sorted(answers.items())
        if s is not None and (s.entered < wait.number if awaited is None else r in awaited)
    ]


def _unlike_waits(wait: Wait, answers: Mapping[int, Standing | None]) -> list[tuple[int, Wait]]:
    """Ranks whose wait of the same number is for something else, and that wait."""
    return [
        (rank, other)
        for rank, standing in sorted(answers.items())
        if standing is not None
        for other in standing.waits
        if other.number == wait.number > 0 and (other.what, other.segment) != (wait.what, wait.segment)
    ]


@final
class Watchdog:
    """Watches this rank's waits and answers the other ranks' questions.

    Args:
        comm: A communicator that nothing else uses.
        timeout_s: Seconds after which a wait is reported and all ranks are aborted.
    """

    def __init__(self, comm: Any, *, timeout_s: float) -> None:
        self._comm = comm
        self._rank: int = comm.Get_rank()
        self._others = [r for r in range(comm.Get_size()) if r != self._rank]
        self.timeout_s = timeout_s
        self._interval_s = min(0.25, timeout_s / 10)
        self._lock = threading.Lock()
        self._entered = 0
        self._waits: dict[int, tuple[Wait, Awaited | None]] = {}
        self._tokens = itertools.count()
        self._asking = False
        self._asked: set[int] = set()  # ranks that are about to report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcross-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch and answer. Without other ranks there is nobody to wait for, and no thread."""
        if self._others:
            self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it. MPI may be finalised after that."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def watching(
        self, *, job: str, step: int, segment: int, what: str, awaited: Awaited | None = None
    ) -> AbstractContextManager[None]:
        """A context whose length is watched."""
        return _Watching(self, job, step, segment, what, awaited)

    def enter(self, job: str, step: int, segment: int, what: str, awaited: Awaited | None = None) -> int:
        with self._lock:
            if awaited is None:
                self._entered += 1
                self._asked.clear()  # whoever asked before spoke of an earlier wait
            number = self._entered if awaited is None else 0
            wait = Wait(job=job, step=step, segment=segment, what=what, number=number, since_s=time.monotonic())
            token = next(self._tokens)
            self._waits[token] = wait, awaited
        return token

    def leave(self, token: int) -> None:
        with self._lock:
            del self._waits[token]

    def _standing(self) -> Standing:
        with self._lock:
            waits = tuple(wait for wait, _ in self._waits.values())
            return Standing(entered=self._entered, waits=waits, asking=self._asking)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._serve()
            with self._lock:
                oldest = min(self._waits.values(), key=lambda pair: pair[0].since_s, default=None)
            if oldest is not None and time.monotonic() - oldest[0].since_s > self.timeout_s:
                self._investigate(*oldest)

    def _serve(self) -> None:
        """Answer what other ranks have asked; print this rank's stacks where they ask for them."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_QUERY, status=status):
            asker = status.Get_source()
            question = self._comm.recv(source=asker, tag=_QUERY)
            if question == "stacks":
                print(f"jaxcross: stacks of rank {self._rank}:\n{stacks()}", flush=True)
            else:
                with self._lock:
                    self._asked.add(asker)
            self._comm.send(self._standing(), dest=asker, tag=_ANSWER)

    def _ask(self, question: str, ranks: list[int]) -> dict[int, Standing | None]:
        from mpi4py import MPI

        pending = [self._comm.isend(question, dest=r, tag=_QUERY) for r in ranks]
        answers: dict[int, Standing | None] = dict.fromkeys(ranks)
        deadline = time.monotonic() + _ANSWER_S
        status = MPI.Status()
        while any(a is None for a in answers.values()) and time.monotonic() < deadline:
            self._serve()
            while self._comm.iprobe(source=MPI.ANY_SOURCE, tag=_ANSWER, status=status):
                source = status.Get_source()
                answers[source] = self._comm.recv(source=source, tag=_ANSWER)
            self._stop.wait(0.02)
        del pending  # whoever did not answer did not receive either; the abort comes next
        return answers

    def _investigate(self, wait: Wait, awaited: Awaited | None) -> None:
        """Reports and aborts, unless another rank does so, or the wait ends meanwhile.

        One report is enough. Of two ranks, one was asked before it began to ask, and leaves it to the other; or both
        asked at once, see that of each other, and the lower one speaks. Who holds back speaks after all where nobody
        has ended it in 10 s.
        """
        with self._lock:
            held = bool(self._asked)
            self._asking = not held
        answers = {} if held else self._ask("standing", self._others)
        if held or any(s is not None and s.asking and r < self._rank for r, s in answers.items()):
            deadline = time.monotonic() + _HOLD_S
            while time.monotonic() < deadline and not self._stop.wait(self._interval_s):
                self._serve()
            if not self._stop.is_set():
                answers = self._ask("standing", self._others)
        with self._lock:
            self._asking = any(wait is other for other, _ in self._waits.values()) and not self._stop.is_set()
            if not self._asking:
                return
        those = None if awaited is None else awaited()
        self._ask("stacks", late_ranks(wait, answers, those))
        report = explain(self._rank, wait, time.monotonic() - wait.since_s, answers, those)
        abort_everywhere(f"{report}\njaxcross: stacks of rank {self._rank}:\n{stacks()}")


@final
class _Watching:
    __slots__ = ("_token", "_wait", "_watchdog")

    def __init__(
        self, watchdog: Watchdog, job: str, step: int, segment: int, what: str, awaited: Awaited | None
    ) -> None:
        self._watchdog = watchdog
        self._wait = (job, step, segment, what, awaited)

    def __enter__(self) -> None:
        self._token = self._watchdog.enter(*self._wait)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self._watchdog.leave(self._token)
