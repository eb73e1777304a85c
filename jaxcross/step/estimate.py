"""`jaxcross.estimate`: how much faster several jobs of a step would run next to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxcross.jobs.context import current_job
from jaxcross.plan.estimate import Estimate
from jaxcross.plan.memory import memory_limit
from jaxcross.plan.profiled_cut import Profiles, profiles_of_step
from jaxcross.program.trace import step_name
from jaxcross.step.crossover import Axes, Step, crossover
from jaxcross.step.measured_together import Subject, measure_on_all_ranks
from jaxcross.step.solo_cost import Settings
from jaxcross.world import current_world


def estimate(
    step: Callable[..., Any],
    *args: Any,
    jobs: int = 2,
    steps: int = 3,
    axes: Axes | None = None,
    mbps: float | None = None,
    memory: int | str | None = None,
    profiles: Profiles | None = None,
) -> Estimate:
    """Predicts how much faster jobs of this step would run next to each other, from a few steps on
    the launched ranks.

    The step is timed on copies of its arguments: no argument changes, none is given away, and
    nothing is remembered for the training that follows. Two programs are compiled, the uncut step
    and one that is cut in four. Waits for all ranks, each of which must call it; the result is the
    same on every rank.

    Args:
        step: A `crossover` step, or a function with named-axis collectives, for which `axes` is
            given.
        *args: Its positional arguments, as in training: the initial state, one batch of this rank.
        jobs: Number of equal jobs for which the recommendation is made.
        steps: Number of steps to time, after two that are not timed. The median counts.
        axes: As for `crossover`; only for a function that is not decorated.
        mbps: Rate of a link in Mbit/s. Exchanges are taken to last at least as long as their bytes
            need on it. A single rank then stands for one of two.
        memory: Bytes of arrays that a rank may hold, as a number or as `"80GB"`. By default what
            the device has, on CPUs the rank's share of the machine's memory.
        profiles: A `plan.Profile` of the step, or several of it in several cuts: no step is timed
            then. One without its memory has the step compiled for that.

    Returns:
        The estimate, whose `print` has ten lines.

    Raises:
        TypeError: `step` is not a function, `axes` is missing or superfluous, or another argument
            is of another type.
        ValueError: `jobs`, `steps`, `mbps` or `memory` is out of range, or `mbps` stands next to
            profiles.
        CutError: The step cannot be traced, exchanges nothing, or calls mpi4jax, or a profile is of
            another step or of another number of ranks.
        ExchangeError: The ranks have different steps or arguments, or the step fails on some rank.
        JobError: Another thread is in a step.

    All are raised on every rank before the first exchange, or after the last one: those of one rank
    as `ExchangeError` on the others.

    Example:
        >>> print(jaxcross.estimate(train_step, state, batch, jobs=2))
    """

    def make_subject() -> Subject:
        settings = Settings(
            jobs=jobs,
            steps=steps,
            mbps=mbps,
            memory_bytes=memory_limit(memory),
            profiles=() if profiles is None else profiles_of_step(profiles),
        )
        decorated = _decorated(step, axes)
        traced, leaves = decorated.bind(*args)
        return Subject(
            traced=traced, leaves=leaves, bucket_bytes=decorated.bucket_bytes, settings=settings
        )

    return measure_on_all_ranks(
        make_subject, step_name(step), world=current_world(), job=current_job()
    )


def _decorated(step: Callable[..., Any], axes: Axes | None) -> Step[..., Any]:
    if isinstance(step, Step):
        if axes is not None:
            raise TypeError(
                f"`axes` is for a function that is not decorated: `{step.__name__}` has its own."
            )
        return step
    if axes is None:
        name = step_name(step)
        raise TypeError(
            f"`{name}` is not a `crossover` step: name its axes, as in `estimate({name}, ..., "
            'axes="batch")`.'
        )
    return crossover(step, axes=axes)
