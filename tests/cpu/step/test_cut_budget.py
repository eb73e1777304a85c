"""The time limit of a cut search is the same on all ranks, whatever their clocks show."""

import itertools
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxcross.jobs.runner import Runner
from jaxcross.step import cut_budget
from jaxcross.step.cut_budget import SHARE, Budget
from jaxcross.step.cut_tuner import gather_hint
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step


def test_all_ranks_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest rank's times and the smallest step count apply; a rank without one agrees."""
    speed = {"rank-0": 1.0, "rank-1": 7.0, "rank-2": 3.0}
    clocks = {name: itertools.count(0.0, seconds) for name, seconds in speed.items()}
    clock = SimpleNamespace(perf_counter=lambda: next(clocks[threading.current_thread().name]))
    monkeypatch.setattr(cut_budget, "time", clock)

    def work(world: Any) -> tuple[int | None, list[bool]]:
        def run_on_all_ranks(_: str, work: Any) -> Any:
            return work(world.control)

        steps = gather_hint(
            "key",
            rank=world.rank,
            run_on_all_ranks=run_on_all_ranks,
            steps=(200, 120, None)[world.rank],
        ).steps
        budget = Budget(steps, run_on_all_ranks)
        assert math.isinf(budget.limit_s)
        budget.set(1.0)
        return steps, [budget.allows_another() for _ in range(6)]

    # There are 30 s for trials that take 7 s each. Three trials finish after 21 s, and the fourth
    # would finish after 28 s, so it's allowed. The fifth would finish after 35 s, which is too
    # late.
    assert SHARE * 120 == 30
    assert run_ranks(3, work) == [(120, [True] * 4 + [False] * 2)] * 3


def test_a_run_of_unknown_length_has_no_limit() -> None:
    budget = Budget(None, lambda *_: pytest.fail("nothing to agree on"))
    budget.set(1e-6)
    assert budget.allows_another()


def test_a_job_knows_how_many_steps_its_loops_have() -> None:
    def work(world: Any) -> list[Any]:
        seen: list[Any] = []

        def fn(job: Any, step: Any) -> None:
            seen.append(job._engine.steps_left)
            for batch in job.batches([1.0] * 5, 3):
                seen.append(job._engine.steps_left)
                step(0.0, batch)
            seen.extend(job._engine.steps_left for _ in job.batches([1.0]))

        runner = Runner(world)
        runner.add("a", fn, {"step": make_step(world)})
        runner.run()
        return seen

    assert run_ranks(2, work) == [[None, 3, 2, 1, None]] * 2
