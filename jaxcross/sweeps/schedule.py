"""`Schedule`: in which order a search receives results, and when which trial begins. Pure.

The answers of a search depend on the order in which it receives results. On a real machine that
order depends on which trial happens to be faster, so it would change from run to run. To make a
sweep repeatable, the schedule therefore has its own clock, which counts steps: a trial that began
at time t makes its step n at time t + n. Events are handed to the search in the order of this
clock, and events at the same time in the order of the trials' numbers, as if the steps of all
trials took equally long.

The price is waiting. An event at time t can only be handed on once every running trial has come
that far, because otherwise one of them could still cause an earlier event. In crossover the trials
take turns, so the wait is a step or two.

As a result, the answers of the search are a function of what each trial did at which of its steps.
They don't depend on threads or on kills.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, final

Status: TypeAlias = Literal["finished", "pruned", "failed", "stopped"]
Parameters: TypeAlias = Mapping[str, Any]
T = TypeVar("T")


class Search(Protocol):
    """Where trials come from. Its methods are called in the same order in every run.

    Attributes:
        ordered: Whether its answers depend on results, so that the order of results matters.
        prunes: Whether it ends trials early.
    """

    @property
    def ordered(self) -> bool: ...
    @property
    def prunes(self) -> bool: ...
    def ask(self, number: int) -> Parameters | None:
        """Returns the parameters of the next trial; None if there are no more trials."""
        ...

    def report(self, number: int, step: int, value: float) -> bool:
        """Receives a value of a running trial, and returns whether to prune the trial."""
        ...

    def tell(self, number: int, status: Status, value: float | None) -> None:
        """Receives the end of a trial."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A trial may begin at a time of the schedule; `after` is the trial whose place it takes."""

    number: int
    parameters: Parameters
    after: int | None
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The search has ended a trial."""

    number: int
    step: int
    value: float
    time: int


Decision: TypeAlias = Started | Pruned


@dataclass(slots=True)
class _Running:
    """A trial that hasn't ended: when it began, and the step that it is known to have reached."""

    begin: int
    step: int = 0
    reported: int = -1  # the latest step whose report was queued
    ending: bool = False


@dataclass(frozen=True, slots=True, order=True)
class _Event:
    time: int
    number: int
    is_end: bool  # sorts a report before the trial's end at the same step
    step: int
    value: float | None
    status: Status = "finished"


@final
class Schedule:
    """Call `begin` once, then the other methods as things happen. Calls of different trials may
    come in any order, as long as each trial's own calls come in the order of its steps.

    Args:
        search: Where trials come from.
        concurrent: Number of trials at a time.
        known_until: After a restart, the time and trial of the last event that is known to have
            been handed on. Events up to there are handed on by `repeat`, which you call once
            everything in the log about the trials that have begun has been reported.

    Attributes:
        error: The error that the search raised, if any. After that the search isn't called any
            more, so no trial begins and none is pruned.
    """

    def __init__(
        self, search: Search, *, concurrent: int, known_until: tuple[int, int] = (-1, -1)
    ) -> None:
        self._search, self._concurrent, self._known_until = search, concurrent, known_until
        self._repeating = known_until >= (0, 0)
        self._running: dict[int, _Running] = {}
        self._queue: list[_Event] = []
        self._decided: set[tuple[int, int]] = set()
        self._pruned: dict[int, int] = {}
        self._asked = 0
        self._exhausted = False
        self.error: Exception | None = None

    @property
    def running(self) -> list[int]:
        """Numbers of the trials that have begun and haven't ended."""
        return sorted(self._running)

    def waits(self, number: int) -> bool:
        """Whether a report of the trial is still queued."""
        return any(each.number == number and not each.is_end for each in self._queue)

    def has_begun(self, number: int) -> bool:
        """Whether the search has been asked for the trial."""
        return number < self._asked

    def decided(self, number: int, step: int) -> bool | None:
        """Whether the report at this step pruned the trial; None if that isn't decided yet."""
        if self._pruned.get(number) == step:
            return True
        return False if (number, step) in self._decided else None

    def begin(self) -> list[Decision]:
        """Asks for the first trials, one per place."""
        found: list[Decision] = []
        for _ in range(self._concurrent):
            found += self._ask(0, None)
        return found

    def advance(self, number: int, step: int) -> list[Decision]:
        """Notes that a trial has made `step` steps, which rules out earlier events of it."""
        trial = self._running.get(number)
        if trial is not None:
            trial.step = max(trial.step, step)
        return self.settle() if self._queue else []

    def report(self, number: int, step: int, value: float) -> list[Decision]:
        """Notes a value. Ignores a repeated step, as after a restart."""
        trial = self._running.get(number)
        if trial is None or trial.ending or step <= trial.reported:
            return []
        trial.reported = trial.step = max(trial.step, step)
        heapq.heappush(self._queue, _Event(trial.begin + step, number, False, step, value))
        return self.settle()

    def end(self, number: int, step: int, status: Status, value: float | None) -> list[Decision]:
        """Notes that a trial has ended. A no-op the second time."""
        trial = self._running.get(number)
        if trial is None or trial.ending:
            return []
        trial.ending, trial.step = True, max(trial.step, step)
        heapq.heappush(self._queue, _Event(trial.begin + step, number, True, step, value, status))
        return self.settle()

    def repeat(self) -> list[Decision] | None:
        """Hands on one event from before a restart; returns None once there are no more."""
        if (
            self._repeating
            and self._queue
            and (self._queue[0].time, self._queue[0].number) <= self._known_until
        ):
            return self._hand_on(heapq.heappop(self._queue))
        self._repeating = False
        return None

    def settle(self) -> list[Decision]:
        """Hands on all events before which no trial can cause another one any more."""
        found: list[Decision] = []
        while not self._repeating and self._queue and self._is_next(self._queue[0]):
            found += self._hand_on(heapq.heappop(self._queue))
        return found

    def _hand_on(self, event: _Event) -> list[Decision]:
        if event.number not in self._running:
            return []  # pruned by an earlier event
        if event.is_end:
            return self._close(event, event.status)
        value = event.value
        assert value is not None
        self._decided.add((event.number, event.step))
        if not self._call(lambda: self._search.report(event.number, event.step, value)):
            return []
        self._pruned[event.number] = event.step
        pruned = Pruned(number=event.number, step=event.step, value=value, time=event.time)
        return [pruned, *self._close(event, "pruned")]

    def _is_next(self, event: _Event) -> bool:
        here = (event.time, event.number)
        return not self._search.ordered or all(
            (trial.begin + trial.step, number) > here
            for number, trial in self._running.items()
            if number != event.number
        )

    def _close(self, event: _Event, status: Status) -> list[Decision]:
        del self._running[event.number]
        self._call(lambda: self._search.tell(event.number, status, event.value))
        return self._ask(event.time, event.number)

    def _ask(self, time: int, after: int | None) -> list[Decision]:
        if self._exhausted:
            return []
        parameters = self._call(lambda: self._search.ask(self._asked))
        if parameters is None:
            self._exhausted = True
            return []
        number = self._asked
        self._running[number] = _Running(time)
        self._asked += 1
        return [Started(number=number, parameters=parameters, after=after, time=time)]

    def _call(self, call: Callable[[], T]) -> T | None:
        """Calls the search, unless it has raised before. Keeps its errors rather than raising them,
        since the trial whose call this is didn't cause them.
        """
        if self.error is not None:
            return None
        try:
            return call()
        except Exception as error:
            self.error = error
            return None
