"""All orders in which a small case can happen, on all ranks: no clock, no luck.

`explore` takes every move of every thread in every order, with one real interleaver a rank, and
looks at each state that can come of it. It raises if a rule is broken (`model_spec`,
`check_lanes`), if ranks stand at different slots of the exchange lane or count differently, if a
rank can come to a stand, if from some state the end can no longer be reached, or if a thread is
left behind.

**Why it need not try orders across ranks.** Between two slots ranks do not touch each other, and
what passes between them at a slot is what each says there. So two orders that differ only in which
*rank* moved first lead to the same joint state; and where it is given what every rank has said at
every slot so far, whatever one rank can be in is independent of what the others are in. A node of
the search is therefore one set of states a rank, and stands for all combinations of them. Within a
rank nothing is left out.

**Why the end can be reached from every state, not from every set.** Any move that can be taken is
taken in the end. So if from a joint state the one course leads to the end in which all threads move
until they can no more, then the ranks meet, and so on, the end can be reached from it. That course
is followed from all combinations of states of all nodes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from jaxcross.errors import InternalError
from tests.model.model_case import Arrival, Case, meet
from tests.model.model_rank import Move, RankModel

_SHOWN = 40  # moves of a rank that an error tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What was found: nothing wrong.

    Attributes:
        outcomes: Every way in which the case can end: committed steps of each job; how it ended,
            and what ranks said.
        states: Different states of one rank.
        moves: Moves between them.
        meetings: Different sets of states in which the ranks meet at a slot.
        joint_states: States of all ranks together that they stand for, at the least: of each slot,
            the largest meeting.
    """

    outcomes: frozenset[Any]
    states: int
    moves: int
    meetings: int
    joint_states: int


@dataclass(frozen=True, slots=True)
class _Standing:
    """All states in which one rank can stand at a slot, given what all ranks said before and what
    it says here.
    """

    arrival: Arrival
    states: frozenset[int]


def explore(case: Case, limit: int = 1_000_000) -> Explored:
    """Looks at every state that can be reached. Neither waits nor communicates; pure.

    Args:
        case: Scripts of all ranks, and the interleaver.
        limit: States of single ranks, or meetings, after which it gives up.

    Raises:
        InternalError: Something can go wrong; says what, and the moves that lead there.
        MemoryError: There are more than `limit`.
    """
    return _Search(limit).run(case)


class _Search:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.models: list[RankModel | None] = []  # None: nobody asks for it again
        self.arrivals: list[Arrival | None] = []
        self.origin: list[tuple[int, Any]] = []  # from which state, by which move
        self.numbers: dict[bytes, int] = {}
        self.taken: list[list[tuple[Move, int]] | None] = []
        self.left: dict[tuple[int, Any], int] = {}
        self.standings: list[_Standing] = []
        self.standing_numbers: dict[_Standing, int] = {}
        self.waits: dict[int, frozenset[int]] = {}
        self.drained: dict[int, int] = {}
        self.fine: set[tuple[int, ...]] = set()  # joint states from which the end was reached

    def run(self, case: Case) -> Explored:
        starts = [
            self._number(RankModel(case, rank), -1, f"rank {rank} starts")
            for rank in range(len(case.scripts))
        ]
        after: dict[tuple[int, Any], list[int]] = {}
        largest: dict[Any, int] = defaultdict(int)
        outcomes: set[Any] = set()
        seen = {
            tuple(sorted(node))
            for node in itertools.product(*(self._standings([start]) for start in starts))
        }
        todo = deque(seen)
        while todo:
            node = todo.popleft()
            standings = [self.standings[n] for n in node]
            result = self._meet([min(s.states) for s in standings])
            self._check_progress(node)
            slot = standings[0].arrival.slot
            joint = prod(len(self._waiting(n)) for n in node)
            largest[slot, result] = max(largest[slot, result], joint)
            if slot == ("done",):
                outcomes.add(standings[0].arrival.shared)
                continue
            for n in node:
                if (n, result) not in after:
                    after[n, result] = self._standings(
                        [self._leave(state, result) for state in self._waiting(n)]
                    )
            # Nothing asks for a rank's number, so that joint states which differ in those alone are
            # one.
            for successor in {
                tuple(sorted(s)) for s in itertools.product(*(after[n, result] for n in node))
            } - seen:
                seen.add(successor)
                todo.append(successor)
            if len(seen) > self.limit:
                raise MemoryError(f"more than {self.limit} meetings: make the case smaller")
        return Explored(
            outcomes=frozenset(outcomes),
            states=len(self.models),
            moves=sum(len(t or ()) for t in self.taken),
            meetings=len(seen),
            joint_states=sum(largest.values()),
        )

    # One rank.

    def _number(self, model: RankModel, origin: int, move: Any) -> int:
        number = self.numbers.setdefault(model.name(), len(self.models))
        if number == len(self.models):
            if number >= self.limit:
                raise MemoryError(f"more than {self.limit} states of a rank: make the case smaller")
            self.models.append(model)
            self.arrivals.append(model.arrival)
            self.origin.append((origin, move))
            self.taken.append(None)
        return number

    def _next(self, number: int) -> list[tuple[Move, int]]:
        """The moves that a state allows, and where they lead."""
        taken = self.taken[number]
        if taken is None:
            taken = self.taken[number] = []
            model = self._model(number)
            moves = model.moves()
            for move in moves:
                # A state at a slot is left from there again and again. Others end with their last
                # move.
                ends = move is moves[-1] and model.arrival is None
                after = self._changed(
                    number, move, lambda model, move=move: model.take(move), copy=not ends
                )
                taken.append((move, self._number(after, number, move)))
                if ends:
                    self.models[number] = None
        return taken

    def _leave(self, number: int, result: Any) -> int:
        known = self.left.get((number, result))
        if known is None:
            move = f"left {self._arrival(number).slot}"
            model = self._changed(number, move, lambda model: model.leave(result))
            known = self.left[number, result] = self._number(model, number, move)
        return known

    def _changed(
        self, number: int, move: Any, change: Callable[[RankModel], None], copy: bool = True
    ) -> RankModel:
        model = self._model(number).copy() if copy else self._model(number)
        try:
            change(model)
        except (InternalError, AssertionError) as error:
            raise InternalError(f"{error}\n{self._story(number)}\n{move}") from error
        return model

    def _model(self, number: int) -> RankModel:
        model = self.models[number]
        assert model is not None
        return model

    def _arrival(self, number: int) -> Arrival:
        arrival = self.arrivals[number]
        assert arrival is not None
        return arrival

    def _waiting(self, standing: int) -> frozenset[int]:
        """What a rank's threads can make of a standing's states while it stands."""
        if standing not in self.waits:
            found = set(self.standings[standing].states)
            todo = list(found)
            while todo:
                for _, number in self._next(todo.pop()):
                    if number not in found:
                        found.add(number)
                        todo.append(number)
            self.waits[standing] = frozenset(found)
        return self.waits[standing]

    def _standings(self, states: Iterable[int]) -> list[int]:
        """Every way in which a rank that is at no slot, or has just come to one, can come to the
        next.
        """
        found, arrived = set(states), defaultdict[Arrival, set[int]](set)
        todo = list(found)
        while todo:
            number = todo.pop()
            arrival = self.arrivals[number]
            if arrival is not None:
                arrived[arrival].add(number)
                continue
            self._must_move(number)
            for _, successor in self._next(number):
                if successor not in found:
                    found.add(successor)
                    todo.append(successor)
        return [
            self._standing(_Standing(arrival, frozenset(numbers)))
            for arrival, numbers in arrived.items()
        ]

    def _standing(self, standing: _Standing) -> int:
        number = self.standing_numbers.setdefault(standing, len(self.standings))
        if number == len(self.standings):
            self.standings.append(standing)
        return number

    def _must_move(self, number: int) -> list[int]:
        """What follows a state by itself: no one needs to interrupt."""
        following = [successor for move, successor in self._next(number) if move != ("person",)]
        if not following and self.arrivals[number] is None:
            raise InternalError(f"a rank stands still\n{self._story(number)}")
        return following

    def _drain(self, number: int) -> int:
        """The state in which all threads have done what they can without the other ranks."""
        course, at = [], number
        while at not in self.drained:
            course.append(at)
            following = self._must_move(at)
            if not following:
                self.drained[at] = at
                break
            at = following[0]
        for passed in course:
            self.drained[passed] = self.drained[at]
        return self.drained[number]

    # All ranks.

    def _meet(self, states: Iterable[int]) -> Any:
        try:
            return meet([self._arrival(number) for number in states])
        except InternalError as error:
            raise InternalError(f"{error}\n{self._stories(states)}") from error

    def _check_progress(self, node: Iterable[int]) -> None:
        ends = [{self._drain(number) for number in self._waiting(standing)} for standing in node]
        for combination in itertools.product(*ends):
            joint, course = tuple(sorted(combination)), set[tuple[int, ...]]()
            while joint not in self.fine:
                if joint in course:
                    raise InternalError(
                        f"ranks meet for ever and nothing comes of it\n{self._stories(joint)}"
                    )
                course.add(joint)
                result = self._meet(joint)
                if self._model(joint[0]).through:
                    self._check_end(joint)
                    break
                joint = tuple(sorted(self._drain(self._leave(number, result)) for number in joint))
            self.fine |= course

    def _check_end(self, joint: Iterable[int]) -> None:
        for number in joint:
            try:
                self._model(number).check_end()
            except InternalError as error:
                raise InternalError(f"{error}\n{self._story(number)}") from error

    def _story(self, number: int) -> str:
        """Moves that lead a rank to a state."""
        told: list[str] = []
        while number >= 0:
            number, move = self.origin[number]
            told.append(str(move))
        return "\n".join(["moves of one rank:", *reversed(told[:_SHOWN])])

    def _stories(self, states: Iterable[int]) -> str:
        return "\n".join(self._story(number) for number in states)
