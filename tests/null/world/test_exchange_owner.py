"""Tests who may exchange: either one run, or one thread in a step."""

from __future__ import annotations

import threading

import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.world import exchange_owner
from jaxcross.world.exchange_owner import ExchangeOwner
from tests.support.interleavings import interrupted


def test_run_is_rejected_while_a_thread_is_in_a_step() -> None:
    """The run's first messages would get mixed up with the step's exchanges. The run may begin once
    the step has ended.
    """
    owner, name = ExchangeOwner(), threading.current_thread().name
    with owner.step("mine"):
        with pytest.raises(
            JobError,
            match=f"^A run can't start in thread `{name}` while thread `{name}` is running `mine`",
        ):
            owner.run()
        with pytest.raises(JobError, match="^`second` was called"):
            owner.step("second")
    with owner.run():
        pass


def test_step_is_rejected_before_a_run_has_lanes() -> None:
    """While a run sends its first and last messages, none of its threads is alive."""
    owner = ExchangeOwner()
    with owner.run():
        with pytest.raises(
            JobError,
            match=r"^`mine` was called from thread .* is running `runner\.run\(\)`\. Exch",
        ):
            owner.step("mine")
        with pytest.raises(JobError, match="^A run is in progress in this process"):
            owner.run()
    with owner.step("mine"):
        pass


def test_no_step_begins_after_one_that_failed_halfway() -> None:
    """Another thread's step may fail halfway and release its turn while this step is just
    beginning, at any point.
    """
    inside, at, errors = True, 0, set[type[Exception]]()
    while inside:
        at += 1
        owner = ExchangeOwner()
        turn = owner.step("theirs")

        def fail(owner: ExchangeOwner = owner, turn=turn) -> None:
            owner.broken_step = "theirs"
            turn.close()

        def begin(owner: ExchangeOwner = owner) -> None:
            with pytest.raises((JobError, ExchangeError)) as refused:
                owner.step("mine")
            errors.add(refused.type)

        _, inside = interrupted(begin, at, fail, module=exchange_owner)
        if inside:
            with pytest.raises(
                ExchangeError, match="^`next` cannot exchange: `theirs` failed halfway"
            ):
                owner.step("next")
    assert errors == {JobError, ExchangeError}
