"""Measures several jobs of one step, taking turns and fused, on copies of their states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any

from jaxcross._pytree import PyTree
from jaxcross.jobs.fused import FusedJob, FusedStep
from jaxcross.jobs.latest_state import form, own_copy
from jaxcross.jobs.plain_job import Job
from jaxcross.jobs.plain_loop import run
from jaxcross.step.crossover import Step
from jaxcross.step.measured_together import Subject, measure_on_all_ranks
from jaxcross.step.solo_cost import Settings
from jaxcross.step.timed_trial import by_turns
from jaxcross.world import World
from jaxcross.world.control_plane import gather

_WARM_UP_STEPS = 5
_STEPS = 20  # timed per run
_TURNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A job to measure, with its first batch."""

    job: Job
    batch: PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCost:
    """What the jobs cost on the slowest rank; the same on every rank.

    Attributes:
        step_s: Seconds of the longest step alone, computation and exchange (c + m).
        in_turns_s: Seconds for one step of every job if they take turns; None if not measured.
        fused_s: The same if they're fused.
    """

    step_s: float
    in_turns_s: float | None = None
    fused_s: float | None = None


def measure(
    trials: Sequence[Trial], fused: Step[..., Any], *, limit_s: float, world: World
) -> FusedCost:
    """Measures the step alone, then all jobs in turns and fused. Waits for all ranks.

    The second part is left out if a step alone takes more than `limit_s`.

    Raises:
        CutError, ExchangeError: As `measure_on_all_ranks` does.
        JobError: A step fails; raised on every rank.
    """
    step_s = max(_alone_s(trials[n], world) for n in _unlike(trials, world))
    if step_s > limit_s:
        return FusedCost(step_s=step_s)
    rivals = [partial(_step_of_each_s, trials, step, world) for step in (None, fused)]
    measured = by_turns(rivals, warm_up=0, timed=_TURNS)
    in_turns_s, fused_s = (median(times) for times in measured if not isinstance(times, str))
    return FusedCost(step_s=step_s, in_turns_s=in_turns_s, fused_s=fused_s)


def _unlike(trials: Sequence[Trial], world: World) -> list[int]:
    """Returns one job per shape, the same jobs on every rank. Waits for all ranks."""
    first: dict[str, int] = {}
    for n, trial in enumerate(trials):
        first.setdefault(repr((form(trial.job.state), form(trial.batch))), n)
    with world.monitor(job="", step=0, segment=-1, what="jobs to fuse"):
        ranks = gather(world.control, [*first.values()])
    return sorted({n for numbers in ranks for n in numbers})


def _alone_s(trial: Trial, world: World) -> float:
    step = trial.job._function
    assert isinstance(step, Step)

    def subject() -> Subject:
        traced, leaves = step.bind(trial.job.state, trial.batch)
        return Subject(
            traced=traced, leaves=leaves, bucket_bytes=step.bucket_bytes, settings=Settings()
        )

    cost = measure_on_all_ranks(subject, step.__name__, world=world, job=None).cost
    return cost.compute_s + cost.exchange_s


def _step_of_each_s(trials: Sequence[Trial], fused: FusedStep | None, world: World) -> float:
    """Returns the seconds for one step of every job, on the slowest rank. Waits for all ranks."""
    stamps: list[list[float]] = []
    jobs = [
        Job(
            trial.job.name,
            trial.job._function if fused else _timed(trial.job._function, stamps),
            own_copy(trial.job.state),
            _repeated(trial),
            steps=_WARM_UP_STEPS + _STEPS,
            mode="local",
        )
        for trial in trials
    ]
    run([FusedJob(jobs, _timed(fused, stamps))] if fused else jobs, world=world, progress=False)
    begin, end = (max(each[n] for each in stamps) for n in (_WARM_UP_STEPS, -1))
    with world.monitor(job="", step=0, segment=-1, what="jobs to fuse"):
        return max(gather(world.control, (end - begin) / (_STEPS - 1)))


def _repeated(trial: Trial) -> Iterator[PyTree]:
    """Yields the batch over and over.

    Yields copies if the step may overwrite the batch, because the job will still train on it.
    """
    step = trial.job._function
    assert isinstance(step, Step)
    donated = any(n % 2 for n in step.donate.numbers)  # the batch is the second of two arguments
    return map(own_copy, repeat(trial.batch)) if donated else repeat(trial.batch)


def _timed(step: Callable[..., Any], stamps: list[list[float]]) -> Callable[..., Any]:
    """Returns the step, wrapped to note the time of each call."""
    mine: list[float] = []
    stamps.append(mine)

    def call(*args: Any) -> Any:
        mine.append(time.perf_counter())
        return step(*args)

    return call


def seconds(value: float) -> str:
    """Formats a short time for people."""
    return f"{1000 * value:.3g} ms"
