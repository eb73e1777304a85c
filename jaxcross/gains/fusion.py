"""`jaxcross.fuse`: joins tiny jobs with the same step, so that a single program trains them all.

On every step, ranks vote on which job may exchange, and jobs hand the device over to each other. If
the step itself is tiny, this overhead accounts for much of the run time. Jobs that are fused into a
single program share the overhead, and their exchanges share messages.

To find out whether fusing pays off, we take measurements on copies of the jobs' states: first the
step on its own, and then all jobs together, both taking turns and fused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from statistics import median
from typing import Any, Literal, final

from jaxcross._arguments import check_choice
from jaxcross._pytree import PyTree
from jaxcross.errors import CutError, ExchangeError, JobError, clause, first_line, shortened
from jaxcross.gains.solo_cost import Settings, Subject, measure_on_all_ranks
from jaxcross.jobs import (
    FusedJob,
    FusedStep,
    Fusion,
    Job,
    check_batches_apart,
    close_unread,
    current_engine,
    form_of,
    own_copy,
    run,
)
from jaxcross.program import stages
from jaxcross.runtime import describe
from jaxcross.step import Step, nnx
from jaxcross.world import World, current_world, gather

When = Literal["faster", "always"]
MAX_STEP_S = 0.005
"""If a step takes longer than this (computation plus exchange), `"faster"` doesn't fuse its jobs.
"""
_WARM_UP_STEPS = 5
_STEPS = 20  # timed per run
_TURNS = 3


def fuse(jobs: Sequence[Job], *, when: When = "faster", world: World | None = None) -> Fusion:
    """Fuses tiny jobs with the same step into a single job, if that turns out to be faster.

    A fused job's program contains the step once per member. The members' exchanges share buffers
    and messages, and all members together only pay for the votes and hand-overs of a single job.
    Each member ends up in the same state as when it runs alone, bit for bit (see the page on tiny
    jobs for what we compared).

    Members may have different shapes, data and lengths. A member drops out by itself when its data
    end or raise an error, or when it stops early; the program is then recompiled for the remaining
    members. By contrast, an error in the step or in an evaluation ends all members.

    Jobs can only be fused if they have the same step, the same `mode` and the same
    `check_replicas`. The step must be decorated with `crossover` using `cut="whole"`, must exchange
    over named axes, and can't take NNX objects. All jobs must have `nonfinite="ignore"`; otherwise,
    a job with non-finite values would make the others skip a step, or even end them.

    We measure on copies of the states, with each job's first batch: first the step alone, then all
    jobs taking turns, with and without fusing. If the step alone takes more than 5 ms, computation
    plus exchange, the jobs aren't fused. Most of the time goes into compilation, but the run reuses
    the executables. All ranks must call this function with the same jobs, and wait for each other.

    Args:
        jobs: The jobs, each with a unique name.
        when: With `faster`, jobs are fused if that's measured to be faster. With `always`, they're
            fused without measuring, and it's an error if some of them can't be fused.
        world: From `jaxcross.initialize()`. Defaults to the world that was initialized.

    Returns:
        The jobs to pass to `jaxcross.run`. With `Weighted`, a fused job has a single share.

    Raises:
        TypeError: `jobs` contains something other than a `Job`.
        ValueError: `when` is neither of these, two jobs have the same name, or `when="always"` and
            some job can't be fused.
        JobError: The ranks have different jobs, or reading a job's first batch raises an error;
            raised on every rank. Also raised if `fuse` is called inside a job.

    Example:
        >>> jobs = [
        ...     jaxcross.Job(f"lr-{lr}", train_step, make_state(lr), data(), steps=500)
        ...     for lr in rates
        ... ]
        >>> report = jaxcross.run(jaxcross.fuse(jobs))
    """
    found = list(jobs) if isinstance(jobs, Iterable) else []
    if not isinstance(jobs, Iterable) or not all(isinstance(job, Job) for job in found):
        raise TypeError(
            f"`jobs` must be a list of `jaxcross.Job`s, got {shortened(repr(jobs), 100)}."
        )
    check_choice(when, When, "`when`")
    names = [job.name for job in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"Several jobs are named `{min(twice)}`. Give each job a different name, which reports "
            "and errors use."
        )
    check_batches_apart(found)
    world = world if world is not None else current_world()
    if world.estimate_request:  # only the script's first step is measured
        return Fusion(jobs=tuple(found), reasons=())
    engine = current_engine()
    if engine is not None:
        raise JobError(
            f"`jaxcross.fuse` was called in job `{engine.name}`, where it cannot measure. Call it "
            "before the run."
        )
    candidates = _candidates(found, when, world)
    fused: dict[str, FusedJob] = {}
    dropped: set[str] = set()
    reasons = [each.why_not for each in candidates if each.why_not]
    if when == "always" and reasons:
        raise ValueError(
            f'Some jobs cannot be fused: {"; ".join(reasons)}. Pass `when="faster"`, or leave '
            "these jobs out."
        )
    for members in _sets(candidates):
        step = members[0].fused_step()
        jobs_of_step = [each.trial.job for each in members]
        fuses, reason = _decide([each.trial for each in members], step, when, world)
        reasons.append(reason)
        if fuses:
            fused[jobs_of_step[0].name] = FusedJob(jobs_of_step, step)
            dropped |= {job.name for job in jobs_of_step[1:]}
    left = (fused.get(job.name, job) for job in found if job.name not in dropped)
    return Fusion(jobs=tuple(left), reasons=tuple(dict.fromkeys(reasons)))


def _candidates(jobs: Sequence[Job], when: When, world: World) -> list[_Candidate]:
    """Examines all jobs, with the same result on every rank. Waits for all ranks.

    Raises:
        JobError: The ranks have different jobs, or a job's data raise an error on some rank; raised
            on every rank.
    """
    steps = list({id(job._function): None for job in jobs})  # ranks compare positions in this list
    facts = {
        "when": when,
        "jobs": [
            [job.name, job._mode, job._check_replicas, steps.index(id(job._function))]
            for job in jobs
        ],
    }
    failure = None
    found: list[_Candidate] = []
    reading = ""
    try:
        for job in jobs:
            reading = job.name
            found.append(_Candidate.of(job))
    except Exception as error:  # from the data; raised on every rank
        failure = error
    failed = None if failure is None else [reading, describe(failure)]
    mine = [facts, failed, [each.why_not for each in found]]
    with world.monitor(job="", step=0, segment=-1, what="jobs to fuse"):
        ranks = gather(world.control, mine)
    for rank, (theirs, failed, _) in enumerate(ranks):
        if theirs != ranks[0][0]:
            raise JobError(
                f"Ranks 0 and {rank} fuse different jobs: {ranks[0][0]} and {theirs}. For each "
                "job, these list its name, its `mode`, its `check_replicas`, and the number of its "
                "step. Call `jaxcross.fuse` with the same jobs in the same order on every rank, "
                "and let the same jobs share a step."
            )
        if failed is not None:
            name, error_text = failed
            raise JobError(
                f"Reading the first batch of job `{name}` failed on rank {rank}: {error_text}. "
                "Correct the batches that are passed to this job."
            ) from failure
    reasons = [
        next(filter(None, texts), "")
        for texts in zip(*(texts for _, _, texts in ranks), strict=True)
    ]
    return [replace(each, why_not=reason) for each, reason in zip(found, reasons, strict=True)]


def _sets(candidates: Sequence[_Candidate]) -> list[list[_Candidate]]:
    """Groups the jobs that can be fused with each other, in their original order."""
    sets: dict[object, list[_Candidate]] = {}
    for each in candidates:
        if not each.why_not:
            job = each.trial.job
            alike = (id(job._function), job._mode, job._check_replicas)
            sets.setdefault(alike, []).append(each)
    return [members for members in sets.values() if len(members) > 1]


def _decide(
    trials: Sequence[_MeasuredJob], step: Step[..., Any], when: When, world: World
) -> tuple[bool, str]:
    """Decides whether to fuse these jobs, and also returns the reason. Waits for all ranks."""
    who = (
        f"{len(trials)} jobs of `{step.__name__}`, `{trials[0].job.name}` to "
        f"`{trials[-1].job.name}`"
    )
    if when == "always":
        return True, f"{who}: fused, as asked"
    try:
        cost = _measure(trials, step, limit_s=MAX_STEP_S, world=world)
    except (CutError, ExchangeError) as error:  # the run will report it in detail
        return False, f"{who}: not fused, as they cannot be measured: {clause(str(error))}"
    alone = f"one step alone takes {_seconds(cost.step_s)}"
    if cost.fused_s is None or cost.in_turns_s is None:
        return False, f"{who}: not fused, {alone}, more than {_seconds(MAX_STEP_S)}"
    times = (
        f"a step of each takes {_seconds(cost.fused_s)} fused, {_seconds(cost.in_turns_s)} in "
        f"turns; {alone}"
    )
    fuses = cost.fused_s < cost.in_turns_s
    return fuses, f"{who}: {'fused' if fuses else 'not fused'}, {times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A job that might be fused: what to measure it with, and why it can't be fused (if so)."""

    trial: _MeasuredJob
    why_not: str

    @classmethod
    def of(cls, job: Job) -> _Candidate:
        """Examines a job and its first batch. Waits for its data; does not communicate."""
        step = job._function
        if not isinstance(step, Step):
            return cls(
                trial=_MeasuredJob(job=job, batch=None),
                why_not=f"the step of `{job.name}` is not a `crossover` step",
            )
        why_not = ""
        if step.cut != "whole":
            why_not = (
                f'`{step.__name__}` has `cut={step.cut!r}`, and only with `cut="whole"` are the '
                "results of a fused step bitwise identical"
            )
        elif step.static:
            why_not = f"`{step.__name__}` has static arguments"
        elif job.nonfinite != "ignore":
            why_not = (
                f'`{job.name}` has `nonfinite="{job.nonfinite}"`, and other jobs would skip a step '
                "or end along with it"
            )
        if why_not:
            return cls(trial=_MeasuredJob(job=job, batch=None), why_not=why_not)
        batches = _first_of(job)
        if not batches:
            return cls(
                trial=_MeasuredJob(job=job, batch=None), why_not=f"`{job.name}` has no batch"
            )
        return cls(
            trial=_MeasuredJob(job=job, batch=batches[0]),
            why_not=_why_not_traced(step, job, batches[0]),
        )

    def fused_step(self) -> Step[..., Any]:
        step = self.trial.job._function
        assert isinstance(step, Step)
        return fused_step(step)


def fused_step(step: Step[..., Any]) -> Step[..., Any]:
    """Returns a step that trains any number of jobs: `fused(states, batches) -> (states, metrics)`.

    The fused step calls the original step once per job; its states, batches and metrics are tuples
    with an entry for each job. It's created only once per original step. That way, if several sets
    of jobs with this step are fused and the sets have the same shapes, they share one compiled
    program.
    """
    function = step.step

    def fused(
        states: tuple[PyTree, ...], batches: tuple[PyTree, ...]
    ) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
        results = [function(state, batch) for state, batch in zip(states, batches, strict=True)]
        for result in results:
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(
                    f"`{step.__name__}` must return a pair `(state, metrics)`, got "
                    f"{_kind(result)}. Metrics may be an empty dict."
                )
        return tuple(state for state, _ in results), tuple(metrics for _, metrics in results)

    fused.__name__ = step.__name__  # jobs identify their step by its name
    made = step.derived("_fused", lambda: fused)
    made.may_change = True  # its arguments change whenever a job drops out
    return made


def _kind(result: object) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return f"a `{type(result).__name__}`"


def _why_not_traced(step: Step[..., Any], job: Job, batch: PyTree) -> str:
    if nnx.holds_objects((job.state, batch), {}):
        return f"`{step.__name__}` takes NNX objects, which it would change in place"
    try:
        traced = step.trace(job.state, batch)
    except Exception as error:  # the run will raise it as well
        return f"`{step.__name__}` cannot be traced: {clause(first_line(describe(error)))}"
    if traced.undecided is not None:
        return f"`{step.__name__}` exchanges in a conditional that the host decides"
    program = stages.cut(traced)
    if program.is_unit:
        return f"`{step.__name__}` calls mpi4jax"
    return "" if program.exchanges else f"`{step.__name__}` exchanges nothing"


def _first_of(job: Job) -> list[Any]:
    """Returns the first batch as a list, which is empty if there's no batch.

    The job will still train on that batch, even if its data are an iterator.
    """
    if job._steps == 0:
        return []
    data = job._batches
    iterator = iter(job._batches)
    first = list(islice(iterator, 1))
    if isinstance(data, Iterator):
        job._batches = _Unread(first, data)
    else:
        close_unread(iterator)
    return first


@final
class _Unread(Iterator[Any]):
    """Puts batches that were already read from an iterator back in front of the rest."""

    def __init__(self, first: Sequence[Any], rest: Iterator[Any]) -> None:
        self._batches = chain(first, rest)
        self._rest = rest

    def __next__(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        close_unread(self._rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredJob:
    job: Job
    batch: PyTree


@dataclass(frozen=True, slots=True, kw_only=True)
class _FusedCost:
    """Costs on the slowest rank, identical on every rank.

    Attributes:
        step_s: Seconds that the longest step takes alone, computation plus exchange (c + m).
        in_turns_s: Seconds for one step of every job when the jobs take turns, or None if not
            measured.
        fused_s: Seconds for one step of every job when the jobs are fused, or None if not measured.
    """

    step_s: float
    in_turns_s: float | None = None
    fused_s: float | None = None


def _measure(
    trials: Sequence[_MeasuredJob], fused: Step[..., Any], *, limit_s: float, world: World
) -> _FusedCost:
    """Measures the step alone, then all jobs, both taking turns and fused. Waits for all ranks.

    If a step alone takes more than `limit_s`, this bails out without measuring the jobs together.

    Raises:
        CutError, ExchangeError: As `measure_on_all_ranks` does.
        JobError: A step fails; raised on every rank.
    """
    step_s = max(_alone_s(trials[n], world) for n in _unlike(trials, world))
    if step_s > limit_s:
        return _FusedCost(step_s=step_s)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_TURNS):  # interleaved, so that background load affects both
        for fuses, found in times.items():
            found.append(_step_of_each_s(trials, fused if fuses else None, world))
    return _FusedCost(step_s=step_s, in_turns_s=median(times[False]), fused_s=median(times[True]))


def _unlike(trials: Sequence[_MeasuredJob], world: World) -> list[int]:
    """Returns one job for each combination of shapes; the same jobs on every rank.

    Waits for all ranks.
    """
    first: dict[str, int] = {}
    for n, trial in enumerate(trials):
        first.setdefault(repr((form_of(trial.job.state), form_of(trial.batch))), n)
    with world.monitor(job="", step=0, segment=-1, what="jobs to fuse"):
        ranks = gather(world.control, [*first.values()])
    return sorted({n for numbers in ranks for n in numbers})


def _alone_s(trial: _MeasuredJob, world: World) -> float:
    step = trial.job._function
    assert isinstance(step, Step)

    def subject() -> Subject:
        traced, leaves = step.bind(trial.job.state, trial.batch)
        return Subject(
            traced=traced, leaves=leaves, bucket_bytes=step.bucket_bytes, settings=Settings()
        )

    cost = measure_on_all_ranks(subject, step.__name__, world=world, job=None).cost
    return cost.compute_s + cost.exchange_s


def _step_of_each_s(trials: Sequence[_MeasuredJob], fused: FusedStep | None, world: World) -> float:
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


def _repeated(trial: _MeasuredJob) -> Iterator[PyTree]:
    """Yields the batch over and over.

    Yields copies if the step may overwrite the batch (because it's donated), since the job still
    has to train on the batch later.
    """
    step = trial.job._function
    assert isinstance(step, Step)
    donated = any(n % 2 for n in step.donate.numbers)  # the batch is the second of two arguments
    return map(own_copy, repeat(trial.batch)) if donated else repeat(trial.batch)


def _timed(step: Callable[..., Any], stamps: list[list[float]]) -> Callable[..., Any]:
    """Wraps a step so that the time of each call is recorded in `stamps`."""
    mine: list[float] = []
    stamps.append(mine)

    def call(*args: Any) -> Any:
        mine.append(time.perf_counter())
        return step(*args)

    return call


def _seconds(value: float) -> str:
    """Formats a short time in milliseconds."""
    return f"{1000 * value:.3g} ms"
