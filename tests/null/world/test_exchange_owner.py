"""Who may exchange: one run, or one thread that calls a step outside any run."""

import threading

import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.world.exchange_owner import ExchangeOwner


def test_a_run_is_refused_while_another_thread_is_in_a_step():
    owner = ExchangeOwner()
    with (
        owner.step("train_step"),
        pytest.raises(
            JobError, match=f"thread `{threading.current_thread().name}` is in `train_step`, outside the run"
        ),
    ):
        owner.run()
    with owner.run(), pytest.raises(JobError, match=r"A run is in progress"):
        owner.run()
    with owner.run():
        pass


def test_a_step_is_refused_while_a_run_begins():
    """The run's lanes don't live yet, so `check_not_stray` lets the step pass."""
    owner = ExchangeOwner()
    with owner.run(), pytest.raises(JobError, match=r"`train_step` was called from .* is in `runner\.run\(\)`"):
        owner.step("train_step")
    with owner.step("train_step"):
        pass


def test_a_step_that_another_thread_breaks_meanwhile_is_refused():
    """The other thread's step fails halfway between this thread's call and the moment at which it gets its turn."""
    owner = ExchangeOwner()
    mine = owner._step

    class Breaking:
        def acquire(self, *, blocking):
            owner.broken_step = "train_step"
            return mine.acquire(blocking=blocking)

        def release(self):
            mine.release()

    owner._step = Breaking()
    for _ in range(2):  # the refusal leaves the lock free
        with pytest.raises(ExchangeError, match="`eval_step` cannot exchange: `train_step` failed halfway"):
            owner.step("eval_step")
