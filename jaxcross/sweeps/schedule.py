"""Decides the order in which a search receives results, and when each trial begins. Pure.

**The problem.** Optuna's samplers propose parameters based on the results received so far, and its
pruners compare a trial with the values reported by others so far. Either way, the order in which
results arrive matters. On a real machine, that's the order in which trials happen to get there,
which depends on the load and is different every time. As a result, sweeps wouldn't be repeatable.
They couldn't be restarted either: after a kill, we replay the logged results into a new search (see
`coordinator`), which only takes us back to the same state if we know their order.

**The idea.** Results are passed to the search in an order that's independent of real time. The
schedule has its own clock, which counts steps: for a trial that began at time t, step n happens at
time t + n, as if every step of every trial took the same time. Reports and ends of trials are
events with a time on this clock. The search receives events in order of time, with ties broken by
the trial's number. When a trial ends at time t, the next trial begins at time t.

**The price** is waiting. When a trial reports a value at time t, we can't pass it on right away,
because a slower trial may yet report a value with an earlier time. We put the event into a queue
until every running trial has reached time t, which is why trials also tell us about steps without a
report (`advance`). If the search prunes, the trial that reports has to wait for the answer. In
practice, that's a step or two, since trials running in crossover make steps at about the same rate.
A search that ignores results, such as a grid without a pruner, isn't `ordered`, and nothing waits.

**The result** is that the search's proposals and pruning decisions depend only on the values that
each trial has reported at each of its steps, regardless of how fast trials happen to run. Replaying
the logged events after a restart leads to the same decisions as before.
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
    """Proposes trials. In every run of a sweep, its methods are called in the same order.

    Attributes:
        ordered: Whether its answers depend on results, which means that their order matters.
        prunes: Whether it may end trials early.
    """

    @property
    def ordered(self) -> bool: ...
    @property
    def prunes(self) -> bool: ...
    def ask(self, number: int) -> Parameters | None:
        """Returns the next trial's parameters, or None if there are no more trials."""
        ...

    def report(self, number: int, step: int, value: float) -> bool:
        """Receives a value reported by a running trial. Returns whether to prune the trial."""
        ...

    def tell(self, number: int, status: Status, value: float | None) -> None:
        """Receives the end of a trial."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A trial begins. If an earlier trial had to end for that, it's `after`."""

    number: int
    parameters: Parameters
    after: int | None
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The search has pruned a trial."""

    number: int
    step: int
    value: float
    time: int


Decision: TypeAlias = Started | Pruned


@dataclass(slots=True)
class _Running:
    """A trial that hasn't ended: when it began, and how many steps we know it has made."""

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
    """Passes results to a search in an order that's independent of real time.

    Call `begin` once. From then on, call the other methods whenever a trial has made a step,
    reported a value, or ended. Calls for the same trial must be made in step order; calls for
    different trials can be interleaved arbitrarily.

    Args:
        search: Proposes the trials, and receives the results.
        concurrent: How many trials run at the same time.
        known_until: After a restart, the time and the trial of the latest event that the search is
            known to have received before. Events up to this one don't have to wait for other
            trials, because all preceding events are in the log. They're passed on by `repeat`,
            which you call after reporting everything that the log contains about the trials begun
            so far.

    Attributes:
        error: The error raised by the search, if any. After an error, the search isn't called any
            more, which means that no trials begin or are pruned.
    """

    def __init__(
        self, search: Search, *, concurrent: int, known_until: tuple[int, int] = (-1, -1)
    ) -> None:
        self._search = search
        self._concurrent = concurrent
        self._known_until = known_until
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
        """The numbers of the trials that have begun and haven't ended."""
        return sorted(self._running)

    def waits(self, number: int) -> bool:
        """Whether the search has yet to receive a report from the trial."""
        return any(each.number == number and not each.is_end for each in self._queue)

    def has_begun(self, number: int) -> bool:
        """Whether the search has been asked for the trial."""
        return number < self._asked

    def decided(self, number: int, step: int) -> bool | None:
        """Whether the report at this step has pruned the trial; None if we don't know yet."""
        if self._pruned.get(number) == step:
            return True
        return False if (number, step) in self._decided else None

    def begin(self) -> list[Decision]:
        """Asks for the first trials, as many as can run at the same time."""
        found: list[Decision] = []
        for _ in range(self._concurrent):
            found += self._ask(0, None)
        return found

    def advance(self, number: int, step: int) -> list[Decision]:
        """Records that a trial has made `step` steps, and won't cause any events before that."""
        trial = self._running.get(number)
        if trial is not None:
            trial.step = max(trial.step, step)
        return self.settle() if self._queue else []

    def report(self, number: int, step: int, value: float) -> list[Decision]:
        """Records a reported value. A no-op if the step was already reported."""
        trial = self._running.get(number)
        # Ignore reports from trials that have been pruned or have ended. Also ignore steps that
        # were already reported: after a restart, a trial repeats the steps since its last
        # checkpoint, reporting their values again.
        if trial is None or trial.ending or step <= trial.reported:
            return []
        trial.reported = trial.step = max(trial.step, step)
        heapq.heappush(self._queue, _Event(trial.begin + step, number, False, step, value))
        return self.settle()

    def end(self, number: int, step: int, status: Status, value: float | None) -> list[Decision]:
        """Records that a trial has ended. A second call is a no-op."""
        trial = self._running.get(number)
        if trial is None or trial.ending:
            return []
        trial.ending = True
        trial.step = max(trial.step, step)
        heapq.heappush(self._queue, _Event(trial.begin + step, number, True, step, value, status))
        return self.settle()

    def repeat(self) -> list[Decision] | None:
        """Passes on one event from before a restart. Returns None if there are no more."""
        if (
            self._repeating
            and self._queue
            and (self._queue[0].time, self._queue[0].number) <= self._known_until
        ):
            return self._hand_on(heapq.heappop(self._queue))
        self._repeating = False
        return None

    def settle(self) -> list[Decision]:
        """Passes on all events that nothing can get ahead of any more."""
        found: list[Decision] = []
        # After a restart, the events of the earlier run have to be repeated first. Until that's
        # done, don't pass on anything else, because an event that should come first may not have
        # been reported yet.
        while not self._repeating and self._queue and self._is_next(self._queue[0]):
            found += self._hand_on(heapq.heappop(self._queue))
        return found

    def _hand_on(self, event: _Event) -> list[Decision]:
        if event.number not in self._running:
            return []  # an earlier event has pruned it
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
        # The event can be passed on if no other trial can still cause an earlier one. The next
        # report of a trial comes from its current step at the earliest, so compare that step's time
        # with the event's. In a tie, the lower trial number goes first.
        return not self._search.ordered or all(
            (trial.begin + trial.step, number) > here
            for number, trial in self._running.items()
            if number != event.number
        )

    def _close(self, event: _Event, status: Status) -> list[Decision]:
        del self._running[event.number]
        self._call(lambda: self._search.tell(event.number, status, event.value))
        # The next trial begins at the time of this event, no matter how long it really takes for
        # its job to run.
        return self._ask(event.time, event.number)

    def _ask(self, time: int, after: int | None) -> list[Decision]:
        if self._exhausted:
            return []
        parameters = self._call(lambda: self._search.ask(self._asked))
        # This is also None if the search has raised an error.
        if parameters is None:
            self._exhausted = True
            return []
        number = self._asked
        self._running[number] = _Running(time)
        self._asked += 1
        return [Started(number=number, parameters=parameters, after=after, time=time)]

    def _call(self, call: Callable[[], T]) -> T | None:
        """Calls the search, unless it has raised an error before.

        An error from the search is stored in `error` instead of raised here. Any trial's thread may
        happen to make this call, so raising the error could fail a trial that has nothing to do
        with it.
        """
        if self.error is not None:
            return None
        try:
            return call()
        except Exception as error:
            self.error = error
            return None
