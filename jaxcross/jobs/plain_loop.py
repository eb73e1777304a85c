"""`run`: what `Runner` does, for jobs that are the plain loop `state, metrics = step(state,
batch)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import shortened
from jaxcross.interleave.instrument import Instrument
from jaxcross.interleave.policy import Policy
from jaxcross.jobs.fused import FusedJob, Fusion
from jaxcross.jobs.outcome import raise_first
from jaxcross.jobs.plain_job import Job, check_batches_apart
from jaxcross.jobs.runner import Runner
from jaxcross.report import Report
from jaxcross.runtime.emulated_link import Link
from jaxcross.runtime.joint_start import Start
from jaxcross.world import World


def run(
    jobs: Sequence[Job | FusedJob],
    *,
    policy: Policy | None = None,
    world: World | None = None,
    instruments: Iterable[Instrument] = (),
    depth: int | None = None,
    link: Link | str | None = None,
    memory: int | str | None = None,
    start: Start = "together",
    events: str | os.PathLike[str] | None = None,
    checkpoints: Checkpoints | None = None,
    metrics: str | os.PathLike[str] | None = None,
    progress: bool | float | None = None,
) -> Report:
    """Runs plain training loops that share this rank's device. Waits for all ranks; see `Runner`.

    Raises:
        TypeError: `jobs` are not all of the class `Job`, or an argument is of another type.
        ValueError: Two jobs take batches from one iterator, or there are `checkpoints` and jobs
            that `fuse` has fused.
        Exception: As `Runner` and `Runner.run` do.

    Example:
        >>> report = jaxcross.run([jaxcross.Job("a", step, state, batches, steps=100)])
    """
    found = list(jobs) if isinstance(jobs, Iterable) else []
    if not isinstance(jobs, Iterable) or not all(isinstance(job, Job | FusedJob) for job in found):
        raise TypeError(
            f"`jobs` must be a list of `jaxcross.Job`s, got {shortened(repr(jobs), 100)}."
        )
    fused = [job for job in found if isinstance(job, FusedJob)]
    check_batches_apart(
        each for job in found for each in (job.members if isinstance(job, FusedJob) else (job,))
    )
    if fused and checkpoints is not None:
        raise ValueError(
            f"`checkpoints` cannot keep the fused job `{fused[0].name}`: its jobs could not be "
            "restored one by one. Run the jobs without `jaxcross.fuse`, or without `checkpoints`."
        )
    with Runner(
        world,
        policy,
        instruments=instruments,
        depth=depth,
        link=link,
        memory=memory,
        start=start,
        events=events,
        checkpoints=checkpoints,
        metrics=metrics,
        progress=progress,
    ) as runner:
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
