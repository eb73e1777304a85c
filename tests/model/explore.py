"""Explores every order in which a small case can happen, on all ranks. No clock, no randomness.

`explore` takes every move of every thread in every order, with one real interleaver per rank, and
checks every state that it reaches. It raises if a rule is broken (`model_spec`, `check_lanes`), if
ranks are at different slots of the exchange lane or their shared state differs, if a rank can get
stuck, if the end is unreachable from some state, or if a thread is still waiting at the end.

**Why we needn't try orders across ranks.** Ranks don't interact between two slots, and at a slot
they exchange only what each of them contributes. So two orders that differ only in which *rank*
moved first lead to the same joint state. And once we fix what every rank contributed to every slot
so far, the states that one rank can be in don't depend on the states of the others. A node of the
search is therefore one set of states per rank, and stands for all combinations of them. Within a
rank, we try every order.

**How we know that the end is reachable from every state.** Every move that can be taken is taken
eventually. So for a given joint state it's enough to follow a single course: all threads move until
none of them can, then the ranks meet at the slot, and so on. If that course leads to the end, the
end is reachable from the joint state. We follow the course from every combination of states in
every node, rather than once per node, because a node may also contain a state that leads nowhere.
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

_SHOWN = 40  # how many of a rank's last moves an error lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """The result of an exploration that found no violation.

    Attributes:
        outcomes: Every way in which the case can end: each job's committed steps, how the job
            ended, and the texts that ranks compared.
        states: Number of distinct states of a single rank.
        moves: Number of moves between them.
        meetings: Number of distinct nodes, i.e. sets of states in which the ranks meet at a slot.
        joint_states: Lower bound on the number of distinct joint states that the nodes stand for.
            Counts only the largest node of each slot and result.
    """

    outcomes: frozenset[Any]
    states: int
    moves: int
    meetings: int
    joint_states: int


@dataclass(frozen=True, slots=True)
class _Group:
    """All states in which one rank can arrive at a slot with the same contribution, given what all
    ranks contributed before.
    """

    arrival: Arrival
    states: frozenset[int]


def explore(case: Case, limit: int = 1_000_000) -> Explored:
    """Checks every state that is reachable. Pure: neither waits nor communicates.

    Args:
        case: The scripts of all ranks, and the interleaver.
        limit: The largest number of single-rank states, and of meetings, before the search gives
            up.

    Raises:
        InternalError: Something can go wrong. The text says what, and lists the moves that lead
            there.
        MemoryError: There are more than `limit` states or meetings.
    """
    return _Search(limit).run(case)


class _Search:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.models: list[RankModel | None] = []  # None once it is no longer needed
        self.arrivals: list[Arrival | None] = []
        self.origin: list[tuple[int, Any]] = []  # per state: its predecessor and the move
        self.numbers: dict[bytes, int] = {}
        self.taken: list[list[tuple[Move, int]] | None] = []
        self.left: dict[tuple[int, Any], int] = {}
        self.groups: list[_Group] = []
        self.group_numbers: dict[_Group, int] = {}
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
            for node in itertools.product(*(self._groups([start]) for start in starts))
        }
        todo = deque(seen)
        while todo:
            node = todo.popleft()
            groups = [self.groups[n] for n in node]
            result = self._meet([min(s.states) for s in groups])
            self._check_progress(node)
            slot = groups[0].arrival.slot
            joint = prod(len(self._waiting(n)) for n in node)
            largest[slot, result] = max(largest[slot, result], joint)
            if slot == ("done",):
                outcomes.add(groups[0].arrival.shared)
                continue
            for n in node:
                if (n, result) not in after:
                    after[n, result] = self._groups(
                        [self._leave(state, result) for state in self._waiting(n)]
                    )
            # Nothing depends on a rank's number, so joint states that differ only in the order of
            # the ranks count as one.
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
        """Returns the moves that a state allows, each with the state that it leads to."""
        taken = self.taken[number]
        if taken is None:
            taken = self.taken[number] = []
            model = self._model(number)
            moves = model.moves()
            for move in moves:
                # To save a copy, the last move from a state changes it in place.
                # We can't do that if the state has arrived at a slot, because it's needed again for
                # each result that the slot may have.
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

    def _waiting(self, group: int) -> frozenset[int]:
        """Returns all states that a rank's threads can reach while the rank waits at the slot."""
        if group not in self.waits:
            found = set(self.groups[group].states)
            todo = list(found)
            while todo:
                for _, number in self._next(todo.pop()):
                    if number not in found:
                        found.add(number)
                        todo.append(number)
            self.waits[group] = frozenset(found)
        return self.waits[group]

    def _groups(self, states: Iterable[int]) -> list[int]:
        """Returns every way in which a rank can arrive at its next slot from one of these states. A
        state that is already at a slot counts as an arrival there.
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
            self._group(_Group(arrival, frozenset(numbers))) for arrival, numbers in arrived.items()
        ]

    def _group(self, group: _Group) -> int:
        number = self.group_numbers.setdefault(group, len(self.groups))
        if number == len(self.groups):
            self.groups.append(group)
        return number

    def _must_move(self, number: int) -> list[int]:
        """Returns the successors that don't depend on a person's request, which may never come."""
        following = [successor for move, successor in self._next(number) if move != ("person",)]
        if not following and self.arrivals[number] is None:
            raise InternalError(f"a rank stands still\n{self._story(number)}")
        return following

    def _drain(self, number: int) -> int:
        """Returns the state in which every thread has done what it can without other ranks."""
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
        ends = [{self._drain(number) for number in self._waiting(group)} for group in node]
        for combination in itertools.product(*ends):
            joint, course = tuple(sorted(combination)), set[tuple[int, ...]]()
            while joint not in self.fine:
                if joint in course:
                    raise InternalError(
                        f"ranks keep meeting without progress\n{self._stories(joint)}"
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
        """Returns the last moves that led a rank to a state."""
        taken_moves: list[str] = []
        while number >= 0:
            number, move = self.origin[number]
            taken_moves.append(str(move))
        return "\n".join(["moves of one rank:", *reversed(taken_moves[:_SHOWN])])

    def _stories(self, states: Iterable[int]) -> str:
        return "\n".join(self._story(number) for number in states)
