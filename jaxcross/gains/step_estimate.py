"""`jaxcross.estimate`: predicts how much faster jobs with the same step would run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxcross.gains.solo_cost import Settings, Subject, measure_on_all_ranks
from jaxcross.jobs import current_engine, memory_limit
from jaxcross.plan import Estimate, MachineContention, Profiles, profiles_of_step
from jaxcross.program import step_name
from jaxcross.step import Axes, Step, crossover
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
    contention: MachineContention | None = None,
) -> Estimate:
    """Predicts how much faster jobs with this step would run together, by timing it on all ranks.

    We run a few steps on copies of the arguments, so your arguments are neither modified nor
    donated, and subsequent training isn't affected. We compile two programs: the whole step, and
    the step cut into four segments of exchanges, between which other jobs could run. All ranks must
    call this function, and wait for each other. The result is the same on every rank.

    Args:
        step: A `crossover` step, or a function with named-axis collectives together with `axes`.
        *args: Its positional arguments, as in training, e.g. the initial state and one of this
            rank's batches.
        jobs: Number of equal jobs to make a recommendation for.
        steps: Number of steps to time, after two untimed warm-up steps. We use the median.
        axes: As for `crossover`. Only for functions that aren't decorated.
        mbps: Link rate in Mbit/s. We then assume that each exchange takes at least as long as its
            bytes need on such a link. If there's only one rank, we treat it as one of two.
        memory: Bytes of arrays that a rank may hold, as a number or a string such as `"80GB"`.
            Defaults to what the device has or, on CPUs, to the rank's share of the machine's
            memory.
        profiles: A `plan.Profile` of the step, or several profiles with different cuts. If given,
            no step is timed. We still compile the step if a profile has no memory figures.
        contention: How much computation and exchange slow each other down on your machine, as
            measured by `jaxcross contention` and read by `plan.MachineContention.load`. If None, we
            use what we measured on two-core hosts, and on accelerators only state a bound.

    Returns:
        The estimate. Its `print` has ten lines, and an eleventh that names a rank that computes
        clearly longer than the others.

    Raises:
        TypeError: `step` is not a function, `axes` is missing or superfluous, or another argument
            has the wrong type.
        ValueError: `jobs`, `steps`, `mbps` or `memory` is out of range, or both `mbps` and profiles
            are given.
        CutError: The step can't be traced, exchanges nothing, or calls mpi4jax, or a profile
            belongs to a different step or number of ranks.
        ExchangeError: The ranks have different steps or arguments, or the step fails on some rank.
        JobError: Another thread is in a step.

    If the measurement fails on one rank, all ranks raise an error: that rank raises its own, and
    the others an `ExchangeError` that reports it. This happens either before the first exchange or
    after the last, so no rank is left waiting for another.

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
            contention=contention,
        )
        decorated = _decorated(step, axes)
        traced, leaves = decorated.bind(*args)
        return Subject(
            traced=traced, leaves=leaves, bucket_bytes=decorated.bucket_bytes, settings=settings
        )

    return measure_on_all_ranks(
        make_subject, step_name(step), world=current_world(), job=current_engine()
    )


def _decorated(step: Callable[..., Any], axes: Axes | None) -> Step[..., Any]:
    if isinstance(step, Step):
        if axes is not None:
            raise TypeError(
                f"`{step.__name__}` is a `crossover` step and has its own axes. Leave out `axes`, "
                "which is only for functions that are not decorated."
            )
        return step
    if axes is None:
        name = step_name(step)
        raise TypeError(
            f"`{name}` is not a `crossover` step, so you have to pass its axes, as in "
            f'`estimate({name}, ..., axes="batch")`.'
        )
    return crossover(step, axes=axes)
