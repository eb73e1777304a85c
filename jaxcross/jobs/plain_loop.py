"""`run`: a `Runner` for jobs that are the plain loop `state, metrics = step(state, batch)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Unpack

from jaxcross.errors import shortened
from jaxcross.jobs.fused import FusedJob, Fusion
from jaxcross.jobs.options import RunOptions, check_options
from jaxcross.jobs.plain_job import Job, check_batches_apart
from jaxcross.jobs.runner import Runner, raise_first
from jaxcross.report import Report


def run(jobs: Sequence[Job | FusedJob], **options: Unpack[RunOptions]) -> Report:
    """Runs plain training loops that share this rank's device. Waits for all ranks.

    Args:
        jobs: The jobs, the same on every rank.
        options: `world`, `policy`, `checkpoints`, `metrics`, `instruments`, `memory`, `events` and
            `progress`, as for `Runner`.

    Returns:
        The report, which is the same on every rank.

    Raises:
        TypeError: `jobs` aren't all instances of `Job`, or an argument has the wrong type.
        ValueError: Two jobs take batches from the same iterator, or you passed `checkpoints`
            together with jobs that `fuse` has fused.
        Exception: As `Runner` and `Runner.run` do.

    Example:
        >>> report = jaxcross.run([jaxcross.Job("a", step, state, batches, steps=100)])
    """
    check_options("run", options, RunOptions)
    found = list(jobs) if isinstance(jobs, Iterable) else []
    if not isinstance(jobs, Iterable) or not all(isinstance(job, Job | FusedJob) for job in found):
        raise TypeError(
            f"`jobs` must be a list of `jaxcross.Job`s, got {shortened(repr(jobs), 100)}."
        )
    fused = [job for job in found if isinstance(job, FusedJob)]
    check_batches_apart(
        each for job in found for each in (job.members if isinstance(job, FusedJob) else (job,))
    )
    if fused and options.get("checkpoints") is not None:
        raise ValueError(
            f"`checkpoints` cannot keep the fused job `{fused[0].name}`: its jobs could not be "
            "restored one by one. Run the jobs without `jaxcross.fuse`, or without `checkpoints`."
        )
    with Runner(**options) as runner:
        contexts = {job: runner.add(job.name, job._run) for job in found}
        for job, context in contexts.items():
            job._attach(context)
        try:
            report = runner.run()
        finally:
            for job in fused:
                job._finish(contexts[job])
        raise_first([error for job in fused for error in job.errors])
        return replace(report, fusion=jobs.reasons) if isinstance(jobs, Fusion) else report
