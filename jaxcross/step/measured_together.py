"""Measures a step on all ranks at once, or raises an error on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from jaxcross.errors import ExchangeError, clause, first_line
from jaxcross.jobs.context import JobContext
from jaxcross.plan.estimate import Estimate, estimate_of
from jaxcross.program.trace import Traced
from jaxcross.runtime.failure_text import describe
from jaxcross.runtime.standalone import Standalone
from jaxcross.runtime.step_host import StepHost
from jaxcross.step.solo_cost import Settings, SoloCost, run_watched
from jaxcross.world import World
from jaxcross.world.control_plane import gather, raise_failure, require_same


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A step to measure, and how to measure it.

    Attributes:
        traced: The step.
        leaves: Its flat arguments.
        bucket_bytes: As for `crossover`.
        settings: How to measure.
    """

    traced: Traced
    leaves: Sequence[Any]
    bucket_bytes: int
    settings: Settings


def measure_on_all_ranks(
    make_subject: Callable[[], Subject], name: str, *, world: World, job: JobContext | None
) -> Estimate:
    """Measures a step and returns an estimate, the same on every rank. Waits for all ranks.

    Args:
        make_subject: Called once. If it raises on some rank, all ranks raise before anything is
            exchanged.
        name: The step's name.
        world: All ranks.
        job: The job that asks; None outside a run.

    Raises:
        ExchangeError: Another rank has an error and this one doesn't, or as `SoloCost.measure`
            does.
        Exception: Whatever `make_subject` raises.
    """
    with ExitStack() as turn:
        host: StepHost
        if job is None:
            owner = world.exchange_owner
            owner.check_not_stray(name)
            turn.enter_context(owner.step(name))
            host = Standalone(world, name)
        else:
            host = job._host
        solo, settings, failure = None, None, None
        try:
            subject = make_subject()
            settings = subject.settings
            solo = SoloCost(
                subject.traced,
                subject.leaves,
                host=host,
                world=world,
                settings=settings,
                bucket_bytes=subject.bucket_bytes,
            )
            solo.check()
        except Exception as error:  # compared over ranks, and raised below
            failure = error
        _begin_together(host, world, name, settings, failure)
        assert solo is not None and settings is not None
        return estimate_of(
            solo.measure(where="" if job is None else f"job `{job.name}`"), settings.jobs
        )


def _begin_together(
    host: StepHost, world: World, name: str, settings: Settings | None, failure: Exception | None
) -> None:
    """Makes sure that all ranks can measure, with equal settings. Waits for all ranks."""
    error_text = "" if failure is None else clause(first_line(describe(failure)))
    mine = [error_text, None if settings is None else settings.as_data()]
    ranks = run_watched(host, world, name, lambda control: gather(control, mine))
    raise_failure(
        failure,
        [text for text, _ in ranks],
        lambda rank, text: ExchangeError(
            f"`{name}` cannot be measured, as rank {rank} failed: {text}."
        ),
    )
    require_same(
        [theirs for _, theirs in ranks],
        lambda rank, first, theirs: ExchangeError(
            f"Ranks 0 and {rank} ask for different estimates of `{name}`: {first} and "
            f"{theirs}. Give the same arguments on every rank."
        ),
    )
