"""The outcome of a run: its report, the jobs that never joined, and the errors of failed jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from jaxcross._endings import JobStatus
from jaxcross.errors import JobError
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.replicas import RankReport, exchange
from jaxcross.report import JobSummary, Report
from jaxcross.report.record import Recorder
from jaxcross.report.units import as_float
from jaxcross.world import World
from jaxcross.world.control_plane import gather

MAX_ERRORS_SHOWN = 8
"""The number of jobs whose errors `Runner.run` shows."""


def report_of(
    jobs: Sequence[JobContext],
    recorder: Recorder,
    *,
    world: World,
    policy: str,
    link: str,
    start_ns: int,
    end_ns: int,
    watch: AbstractContextManager[Any],
) -> Report:
    """Builds the report, the same on every rank. Waits for all ranks, inside of `watch`."""
    devices = jax.local_devices()
    over = "" if world.over == "mpi4jax" else f", exchanges over {world.over}"
    return Report.build(
        recorder.spans(),
        jobs=[_facts(job) for job in jobs if job.status != JobStatus.LEFT_OUT],
        rank=world.rank,
        size=world.size,
        start_ns=start_ns,
        end_ns=end_ns,
        policy=policy,
        placement=(
            f"{devices[0].platform}, {len(devices)} device{'s' if len(devices) > 1 else ''} a "
            f"rank{over}"
        ),
        link=link,
        dropped=recorder.dropped,
        control=world.control if world.size > 1 else None,
        watch=watch,
    )


def _facts(job: JobContext) -> JobSummary:
    metrics: dict[str, float] = {}
    for _, values in job.history:
        if isinstance(values, dict):
            metrics.update({key: as_float(v) for key, v in _numbers(values)})
    loss = metrics.pop("loss", None)
    return JobSummary(
        name=job.name,
        steps=job._host.steps_made,
        examples_per_step=job.examples_per_step,
        final_loss=loss,
        metrics=metrics,
        how=job.status or JobStatus.ENDED,
        why=job._host.evaluations.stop_reason if job.error is None else str(job.error),
        skipped=job.skipped - job._host.skipped.before,
        replicas=job._host.replicas.findings.text,
        first_step=job.step - job._host.steps_made,
        unit=job.unit,
        program=job._host.registry.most_run(),
        left_over=(job._host.world.rank,) if job._host.left_over else (),
    )


def _numbers(values: dict[Any, Any]) -> Iterator[tuple[str, int | float]]:
    for key, value in values.items():
        if isinstance(value, int | float):
            yield str(key), value
        elif isinstance(value, dict):
            yield from ((f"{key}/{inner}", number) for inner, number in _numbers(value))


def left_out(world: World, jobs: Sequence[JobContext], names: Sequence[str]) -> JobError | None:
    """Returns the error for jobs that never joined, or None. Waits for all ranks.

    The same on every rank. `names` are the jobs that this rank added and that never joined.
    """
    ranks: dict[str, list[str]] = {}
    for rank, theirs in enumerate(gather(world.control, names)):
        for name in theirs:
            ranks.setdefault(name, []).append(str(rank))
    if not ranks:
        return None
    what = ", ".join(
        f"`{name}` (rank {', '.join(where)} of {world.size})" for name, where in ranks.items()
    )
    error = JobError(
        "Jobs were added during the run but not on every rank, or when it was ending, and never "
        f"joined: {what}. Add a job on all ranks while another one still has to wait for them, for "
        "example in a job's function."
    )
    for job in jobs:
        if job.status == JobStatus.LEFT_OUT:
            job.error = error
    return error


def tell_unread(world: World, jobs: Sequence[JobContext]) -> None:
    """Makes a metric that some rank can't read back the job's error on every rank.

    Waits for all ranks.
    """
    mine = {
        job.name: f"{type(job._unread).__name__}: {job._unread}"
        for job in jobs
        if job._unread is not None
    }
    for rank, failures in enumerate(gather(world.control, mine)):
        for job in jobs:
            failure = failures.get(job.name)
            if job.error is None and failure:
                job.error = JobError(
                    f"Job `{job.name}`: rank {rank} cannot read back what it logged: {failure}"
                )
                job.error.__cause__ = job._unread


def compare_replicas(world: World, jobs: Sequence[JobContext]) -> None:
    """Compares the last states of all jobs that joined. Waits for all ranks.

    If they're equal, this costs one small all-reduce. If they differ in a job that checks its
    replicas, that's the job's error on every rank.
    """
    joined = [job for job in jobs if job.status != JobStatus.LEFT_OUT] if world.size > 1 else []
    found = (
        exchange(world.control, [job._host.replicas.end or RankReport(0, "", {}) for job in joined])
        if joined
        else []
    )
    for job, every in zip(joined, found, strict=True):
        error = job._host.replicas.settle(every) if job._host.replicas.end is not None else None
        job.error = job.error or error


def raise_errors(jobs: Sequence[JobContext], missing: JobError | None) -> None:
    """Raises the first failed job's error, or else `missing`, with notes about further errors."""
    errors = [
        job.error
        for job in jobs
        if job.error is not None and job.status not in (JobStatus.EJECTED, JobStatus.LEFT_OUT)
    ]
    raise_first([*errors, *([missing] if missing is not None else [])])


def raise_first(errors: Sequence[Exception]) -> None:
    """Raises the first error, if any, with notes about the further ones."""
    if not errors:
        return
    for other in errors[1:MAX_ERRORS_SHOWN]:
        errors[0].add_note(f"Also: {other}")
    if more := len(errors[MAX_ERRORS_SHOWN:]):
        errors[0].add_note(f"And {more} more jobs failed: `runner.report` says why.")
    raise errors[0]
