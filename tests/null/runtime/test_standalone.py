"""Tests a step without a runner: what happens to its exchanges when something fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from jaxcross.errors import ExchangeError
from jaxcross.runtime.standalone import Standalone
from jaxcross.world.exchange_owner import ExchangeOwner, check_interval


@pytest.fixture
def owner() -> ExchangeOwner:
    return ExchangeOwner()


def check_continues(owner: ExchangeOwner, *, expected: bool, anew: bool = False) -> None:
    """Checks whether this rank may still exchange, and whether the ranks have to agree first."""
    assert owner.must_agree == anew
    refused = pytest.raises(
        ExchangeError, match="^`next` cannot exchange: `step` failed halfway on this rank."
    )
    with nullcontext() if expected else refused, owner.step("next"):
        pass


class Execution:
    """One segment fails, or an input that a segment waits for has failed.

    If a computation fails, the first exchange stays in flight until the caller waits for it.
    """

    def __init__(self, fails: int, waits: int = -1) -> None:
        self.fails = fails
        self.waits = waits
        self.ended: list[int] = []
        self._caller = threading.current_thread()
        self.awaited = threading.Event()

    def run(self, index: int) -> None:
        if threading.current_thread() is not self._caller and self.fails in (2, 4):
            assert self.awaited.wait(60)
        if index == self.fails:
            raise RuntimeError("out of memory")
        if index in (1, 3):
            self.ended.append(index)

    def wait_inputs(self, index: int) -> None:
        if index == self.waits:
            raise RuntimeError("out of memory")

    def forget(self, index: int) -> None:
        pass

    wait_outputs = branch_mismatch = forget


class Exchanger(ThreadPoolExecutor):
    """The exchange thread. Sets `execution.awaited` once the caller starts to wait for the thread.

    To wait, the caller submits an empty task, which runs after the exchanges in the queue.
    """

    def __init__(self, execution: Execution) -> None:
        super().__init__(1)
        self._execution = execution

    def submit(self, fn: Any, /, *args: Any) -> Any:
        if not args:
            self._execution.awaited.set()
        return super().submit(fn, *args)


def overlapped(execution: Execution, *, is_single_rank: bool = False) -> Any:
    """Returns a step with three computations and an exchange after each of the first two."""
    kinds = ["compute", "collective", "compute", "collective", "compute"]
    psum = SimpleNamespace(op="psum")
    segments = [
        SimpleNamespace(index=n, kind=kind, exchanges=[psum]) for n, kind in enumerate(kinds)
    ]
    return SimpleNamespace(
        program=SimpleNamespace(name="step", segments=segments),
        runnables=[
            SimpleNamespace(segment=segment, is_single_rank=is_single_rank) for segment in segments
        ],
        awaited=[()] * 5,
        carried=frozenset[int](),
        overlaps=not is_single_rank,
        execution=lambda _: execution,
    )


@pytest.mark.parametrize(
    ("fails", "waits", "ended", "continues"),
    [
        (4, -1, [1, 3], True),
        (1, -1, [], False),
        (3, -1, [1], False),
        (-1, 3, [1], False),
        (2, -1, [1], False),
        (0, -1, [], True),
        (-1, 1, [], True),
    ],
)
def test_after_an_error_no_exchange_is_left_under_way(
    owner: ExchangeOwner, fails: int, waits: int, ended: list[int], continues: bool
) -> None:
    """If all exchanges were made, the caller may catch the error and continue, since its next
    exchange uses the same communicator. If none had begun, the ranks have to agree first. After a
    failed exchange, no further exchange is made, because the other ranks are still in the failed
    one.
    """
    execution = Execution(fails, waits)
    compiled = overlapped(execution)
    with Exchanger(execution) as exchanger:
        world: Any = SimpleNamespace(
            exchanger=exchanger, monitor=lambda **_: nullcontext(), exchange_owner=owner
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            Standalone(world, "step").run(compiled, [], None)
        assert execution.ended == ended
        check_continues(owner, expected=continues, anew=continues and not ended)


@pytest.mark.parametrize("fails", range(5))
def test_single_rank_continues_after_any_error(owner: ExchangeOwner, fails: int) -> None:
    world: Any = SimpleNamespace(exchange_owner=owner)
    with pytest.raises(RuntimeError, match="out of memory"):
        Standalone(world, "step").run(overlapped(Execution(fails), is_single_rank=True), [], None)
    check_continues(owner, expected=True)


class Interrupted(Execution):
    """Ctrl-C arrives in the last segment, when the first exchange is in flight and the second is
    queued.
    """

    def __init__(self) -> None:
        super().__init__(fails=-1)
        self.begun, self.peers_came = threading.Event(), threading.Event()

    def run(self, index: int) -> None:
        if index == 1:
            self.begun.set()
            assert self.peers_came.wait(60)
        if index == 4:
            assert self.begun.wait(60)
            threading.Timer(0.1, self.peers_came.set).start()
            raise KeyboardInterrupt
        if index in (1, 3):
            self.ended.append(index)


def test_interrupt_leaves_no_exchange_and_begins_none(owner: ExchangeOwner) -> None:
    """The caller may catch the interrupt and save its state, so no exchange may still be in flight.
    The other ranks may have left the step at a different point.
    """
    execution = Interrupted()
    with ThreadPoolExecutor(1) as exchanger:
        world: Any = SimpleNamespace(
            exchanger=exchanger, monitor=lambda **_: nullcontext(), exchange_owner=owner
        )
        with pytest.raises(KeyboardInterrupt):
            Standalone(world, "step").run(overlapped(execution), [], None)
        assert execution.ended == [1]
        exchanger.submit(lambda: None).result()
        assert execution.ended == [1]
        check_continues(owner, expected=False)


class Carried(Execution):
    """The first segment's computation ends only once the exchange that follows it has run."""

    def __init__(self) -> None:
        super().__init__(fails=-1)
        self.over = threading.Event()

    def run(self, index: int) -> None:
        if index == 1:
            self.over.set()
        elif index == 0:
            assert self.over.wait(60), "the exchange was to begin before the computation"
        self.ended.append(index)

    def outputs(self) -> str:
        return "results"


def test_carried_exchange_begins_before_the_computation(owner: ExchangeOwner) -> None:
    execution = Carried()
    compiled = overlapped(execution)
    compiled.carried = frozenset({1})
    watched: list[dict[str, Any]] = []

    def monitor(**wait: Any) -> nullcontext[None]:
        watched.append(wait)
        return nullcontext()

    with ThreadPoolExecutor(1) as exchanger:
        world: Any = SimpleNamespace(exchanger=exchanger, monitor=monitor, exchange_owner=owner)
        assert Standalone(world, "step").run(compiled, [], None) == "results"
    assert [(wait["segment"], wait["what"]) for wait in watched] == [(1, "psum"), (3, "psum")]
    assert execution.ended[:2] == [1, 0] and sorted(execution.ended) == [*range(5)], "each once"
    check_continues(owner, expected=True)


@pytest.mark.parametrize(
    ("error", "continues"),
    [(None, True), (ExchangeError("other steps"), True), (KeyboardInterrupt(), False)],
)
@pytest.mark.parametrize("carried", [frozenset[int](), frozenset({1})])
def test_ranks_compare_their_calls_once_before_the_first_exchange(
    owner: ExchangeOwner, error: BaseException | None, continues: bool, carried: frozenset[int]
) -> None:
    """If steps differ, every rank raises before anything is exchanged. If the comparison is
    interrupted, the other ranks may already have continued.
    """
    execution: Any = Carried()
    compiled = overlapped(execution)
    compiled.carried = carried
    execution.over.set()
    exchanged_before: list[list[int]] = []

    def compare() -> None:
        exchanged_before.append([n for n in execution.ended if n in (1, 3)])
        if error is not None:
            raise error

    with ThreadPoolExecutor(1) as exchanger:
        world: Any = SimpleNamespace(
            exchanger=exchanger, monitor=lambda **_: nullcontext(), exchange_owner=owner
        )
        with nullcontext() if error is None else pytest.raises(type(error)):
            Standalone(world, "step").run(compiled, [], None, compare=compare)
    assert exchanged_before == [[]]
    assert {1, 3} & set(execution.ended) == (set() if error else {1, 3})
    check_continues(owner, expected=continues, anew=isinstance(error, ExchangeError))


def test_rank_that_speaks_to_nobody_compares_nothing(owner: ExchangeOwner) -> None:
    execution: Any = Carried()
    execution.over.set()
    compare = pytest.fail
    world: Any = SimpleNamespace(exchange_owner=owner)
    step = Standalone(world, "step")
    assert (
        step.run(overlapped(execution, is_single_rank=True), [], None, compare=compare) == "results"
    )


@pytest.mark.parametrize(("every", "due"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (8, [])])
def test_calls_are_compared_at_the_interval(every: int, due: list[int]) -> None:
    owner = ExchangeOwner(every)
    assert [call for call in range(1, 8) if owner.check_due()] == due


def test_interval_of_comparisons_is_a_whole_number() -> None:
    assert [
        check_interval(env)
        for env in ({}, {"JAXCROSS_CHECK_CALLS": ""}, {"JAXCROSS_CHECK_CALLS": "20"})
    ] == [
        1,
        1,
        20,
    ]
    for text in ("0", "-1", "1.5", "often"):
        with pytest.raises(
            ValueError, match=r"^`JAXCROSS_CHECK_CALLS` .* whole number of at least 1, .*, got '"
        ):
            check_interval({"JAXCROSS_CHECK_CALLS": text})
