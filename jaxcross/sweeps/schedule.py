"""`Schedule`: in which order a search hears of its trials, and when which trial begins. Pure.

Which trial ends first on a machine depends on that machine's moods; what a search asks next must
not. So the schedule has a clock of its own, which counts steps: a trial that began at time t makes
its step n at time t + n. What happens is handed to the search in the order of that clock, and at
one time in the order of the trials' numbers, as if the steps of all trials took equally long. It
therefore waits: something at time t is handed on once every trial that runs has come that far. In
crossover the trials take turns, so that this is a step or two.

What the search answers is a function of what each trial did at which of its steps. Neither threads
nor kills enter it.
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
    """Where trials come from. Its methods are called in one order, whatever the threads do.

    Attributes:
        ordered: Whether its answers depend on results.
        prunes: Whether it ends trials early.
    """

    @property
    def ordered(self) -> bool: ...
    @property
    def prunes(self) -> bool: ...
    def ask(self, number: int) -> Parameters | None:
        """Returns the parameters of the next trial; None if there is no other one."""
        ...

    def report(self, number: int, step: int, value: float) -> bool:
        """Takes a value of a trial that runs, and returns whether to prune the trial."""
        ...

    def tell(self, number: int, status: Status, value: float | None) -> None:
        """Takes the end of a trial."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A trial may begin, at a time of the schedule; `after` is the trial whose place it takes."""

    number: int
    parameters: Parameters
    after: int | None
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A trial is over by the search's decision."""

    number: int
    step: int
    value: float
    time: int


Decision: TypeAlias = Started | Pruned


@dataclass(slots=True)
class _Running:
    """A trial that is not over: when it began, and the step that it has reached for sure."""

    begin: int
    step: int = 0
    reported: int = -1  # the latest step whose report is queued or handed on
    ending: bool = False


@dataclass(frozen=True, slots=True, order=True)
class _Event:
    time: int
    number: int
    is_end: bool  # at one step a report comes before the end
    step: int
    value: float | None
    status: Status = "finished"


@final
class Schedule:
    """Call `begin` once, then the other methods as things happen, in any order that keeps each
    trial's own.

    Args:
        search: Where trials come from.
        concurrent: Number of trials at a time.
        known_until: After a restart: what happened up to this time, in this trial, is known in
            full. It is handed on by `repeat`, once everything that is known of the trials that have
            begun was noted.

    Attributes:
        error: What the search raised, if anything. It is not called again: no trial begins, and
            none is pruned.
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
        """Numbers of the trials that have begun and are not over."""
        return sorted(self._running)

    def waits(self, number: int) -> bool:
        """Whether a report of the trial is not handed on yet."""
        return any(each.number == number and not each.is_end for each in self._queue)

    def has_begun(self, number: int) -> bool:
        """Whether the trial has been asked for."""
        return number < self._asked

    def decided(self, number: int, step: int) -> bool | None:
        """Whether the report at this step pruned the trial; None if that is not decided."""
        if self._pruned.get(number) == step:
            return True
        return False if (number, step) in self._decided else None

    def begin(self) -> list[Decision]:
        """Returns the first trials."""
        found: list[Decision] = []
        for _ in range(self._concurrent):
            found += self._ask(0, None)
        return found

    def advance(self, number: int, step: int) -> list[Decision]:
        """Notes that a trial has made `step` steps, so that nothing more can happen in it before
        that step.
        """
        trial = self._running.get(number)
        if trial is not None:
            trial.step = max(trial.step, step)
        return self.settle() if self._queue else []

    def report(self, number: int, step: int, value: float) -> list[Decision]:
        """Notes a value. Of several at one step the first counts; what comes again after a restart
        is known.
        """
        trial = self._running.get(number)
        if trial is None or trial.ending or step <= trial.reported:
            return []
        trial.reported = trial.step = max(trial.step, step)
        heapq.heappush(self._queue, _Event(trial.begin + step, number, False, step, value))
        return self.settle()

    def end(self, number: int, step: int, status: Status, value: float | None) -> list[Decision]:
        """Notes that a trial came to its end, once."""
        trial = self._running.get(number)
        if trial is None or trial.ending:
            return []
        trial.ending, trial.step = True, max(trial.step, step)
        heapq.heappush(self._queue, _Event(trial.begin + step, number, True, step, value, status))
        return self.settle()

    def repeat(self) -> list[Decision] | None:
        """Hands on one thing that is known from before a restart; returns None, for good, if there
        is no more.
        """
        if (
            self._repeating
            and self._queue
            and (self._queue[0].time, self._queue[0].number) <= self._known_until
        ):
            return self._hand_on(heapq.heappop(self._queue))
        self._repeating = False
        return None

    def settle(self) -> list[Decision]:
        """Hands on all that no trial can come before any more."""
        found: list[Decision] = []
        while not self._repeating and self._queue and self._is_next(self._queue[0]):
            found += self._hand_on(heapq.heappop(self._queue))
        return found

    def _hand_on(self, event: _Event) -> list[Decision]:
        if event.number not in self._running:
            return []  # it was pruned before
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
        """Calls the search, as long as it has not raised: the trial whose turn it is has no part in
        its errors.
        """
        if self.error is not None:
            return None
        try:
            return call()
        except Exception as error:
            self.error = error
            return None
