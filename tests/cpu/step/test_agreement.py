"""Ranks compare their next calls outside a run: either they match, or every rank raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.runtime.standalone import Standalone
from jaxcross.step.exchange_agreement import ExchangeAgreement, comparison_of_calls
from jaxcross.step.step import Step, crossover
from tests.support.fakes import FakeControl, FakeWorld, plain_program, run_ranks
from tests.support.interleavings import WatchedLock

F, G = "`f` (function 1 of the script)", "`g` (function 2 of the script)"
Call = Callable[[FakeWorld], None]


def host(world: FakeWorld, name: str, number: int, calls: int) -> Standalone:
    made: Any = Standalone(world, name)  # type: ignore[arg-type]
    made.number, made.calls = number, calls
    return made


def first(name: str, number: int = 0, *, calls: int = 1, by_call: bool = False) -> Call:
    """Returns a rank's agreement on its first call of a step.

    If the rank has agreed on this step before and only repeats that, the step has a number.
    """

    def call(world: Any) -> None:
        function = host(world, name, number, calls).function
        ExchangeAgreement(
            program=plain_program(name),
            world=world,
            order=0,
            function=function,
            call=calls,
            by_call=by_call,
        ).standalone()

    return call


def later(name: str, number: int, calls: int = 2) -> Call:
    """Returns a later call of a step."""

    def call(world: Any) -> None:
        variant: Any = SimpleNamespace(
            default=plain_program(name), world=world, is_unit=False, cut_note=""
        )
        compare = comparison_of_calls(variant, host(world, name, number, calls))
        assert compare is not None
        compare()

    return call


def outcomes(*calls: Call) -> set[str]:
    """Returns the error texts that the ranks get, each from its own call, or an empty one."""

    def work(world: FakeWorld) -> str:
        try:
            calls[world.rank](world)
        except ExchangeError as error:
            return str(error)
        return ""

    return set(run_ranks(len(calls), work))


@pytest.mark.parametrize(
    "calls",
    [
        (first("f"), first("f"), first("f")),
        (first("f"), first("f", calls=2)),
        (later("f", 1), later("f", 1)),
        (later("f", 1), later("f", 1, calls=3)),
        (
            first("f", 1, calls=3),
            later("f", 1),
            later("f", 1),
        ),  # after an error before its first exchange
    ],
)
def test_equal_calls_of_one_step_raise_nothing(calls: tuple[Call, ...]) -> None:
    assert outcomes(*calls) == {""}


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ((first("f"), first("g")), "rank 0 `f`, call 1, rank 1 `g`, call 1"),
        (
            (later("f", 1), later("f", 1), later("g", 2, calls=7)),
            f"rank 0 {F}, call 2, rank 1 {F}, call 2, rank 2 {G}, call 7",
        ),
        (
            (later("f", 1), later("f", 2)),
            f"rank 0 {F}, call 2, rank 1 {F.replace('1', '2')}, call 2",
        ),
        ((later("f", 1), first("f")), f"rank 0 {F}, call 2, rank 1 `f`, call 1"),
        (
            (first("f", 1, by_call=True), later("g", 2)),
            f"rank 0 {F}, call 1, rank 1 {G}, call 2",
        ),
    ],
)
def test_calls_of_different_steps_are_an_error_on_every_rank(
    calls: tuple[Call, ...], steps: str
) -> None:
    (text,) = outcomes(*calls)
    assert text.startswith(
        f"the ranks of the script call different steps: {steps}. Exchanges match by their order"
    )


def test_calls_that_take_a_branch_at_different_numbers_are_an_error() -> None:
    (text,) = outcomes(first("f", 1, calls=2, by_call=True), first("f", 1, calls=3, by_call=True))
    assert text.startswith(
        "`f` takes a branch with exchanges at different calls: rank 0 in call 2, rank 1 in call 3"
    )


def test_steps_are_numbered_in_the_order_in_which_the_ranks_agree_on_them() -> None:
    def work(world: Any) -> list[int]:
        hosts = [Standalone(world, name) for name in ("a", "b")]
        for n in (1, 1, 0, 1):
            hosts[n].agreed()
        return [each.number for each in hosts]

    assert run_ranks(1, work) == [[2, 1]]


@pytest.mark.parametrize("exchanges", [0, 1])
def test_threads_that_call_a_step_first_have_one_host(
    exchanges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two threads call a new step at the same time, they must share one `Standalone`.

    The ranks agree on a step's number only once. If each thread made its own object, the one with
    the number could be overwritten, and later calls of the ranks would no longer match.
    """
    (control, _), lock = FakeControl.group(2), WatchedLock()
    world: Any = FakeWorld(control)
    step: Any = crossover(lambda x: x, axes="batch")

    def call(exchanges: int) -> int:
        variant = SimpleNamespace(program=plain_program(exchanges=exchanges), tunes_cut=False)
        return step._run_standalone(variant, world, [])

    def other() -> None:
        with suppress(JobError):  # rejected if the first thread is already in the step
            call(1)
        lock.awaited.set()

    thread = threading.Thread(target=other)

    def make(world: Any, name: str) -> Standalone:
        made = Standalone(world, name)
        if thread.ident is None:
            lock.awaited.clear()
            thread.start()
            assert lock.awaited.wait(60)
        return made

    module = "jaxcross.step.step"
    monkeypatch.setattr(step, "_host_lock", lock, raising=False)
    monkeypatch.setattr(f"{module}.Standalone", make)
    monkeypatch.setattr(f"{module}.prepare", lambda variant, host: None)
    monkeypatch.setattr(Step, "_agree", lambda self, variant, host: host.agreed() or True)
    monkeypatch.setattr(
        Standalone, "run", lambda self, compiled, leaves, record, compare=None: self.number
    )
    call(exchanges)
    thread.join()
    assert call(1) == 1
    assert world.exchange_owner.functions == 1
