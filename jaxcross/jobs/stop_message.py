"""The message printed by a stopped run: what has been saved, and how to resume. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxcross._endings import JobStatus

MAX_JOBS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedJob:
    """A job of a run that was stopped.

    Attributes:
        name: The job's name.
        status: How the job ended; None if it never joined the run.
        step: How many steps the job has made.
        begun: Whether the job has restored its state. If not, there's nothing to save.
        saved: The step of the job's newest checkpoint that's complete on all ranks, or None.
    """

    name: str
    status: JobStatus | None
    step: int
    begun: bool = False
    saved: int | None = None


def stop_message(jobs: Sequence[StoppedJob], folder: str | None) -> str:
    """Returns the lines to print when a run was stopped.

    Args:
        jobs: The jobs of the run.
        folder: The folder of the run's checkpoints; None if there are none.
    """
    # Only the first few jobs are shown. In a sweep, most of them may be trials that have long
    # ended, which are of no interest here, so move the jobs that will resume to the front.
    jobs = sorted(jobs, key=_is_over)
    shown = jobs[:MAX_JOBS_SHOWN]
    more = len(jobs[MAX_JOBS_SHOWN:])
    if folder is None:
        steps = ", ".join(f"job `{job.name}` {_where(job)}" for job in shown)
        rest = f", and {more} more jobs" if more else ""
        return (
            f"jaxcross: the run has stopped: {steps}{rest}. Nothing was saved, because the runner "
            "has no `checkpoints`."
        )
    lines = ["jaxcross: the run has stopped.", *(_saved(job, folder) for job in shown)]
    lines += [f"And {more} more jobs in {folder}."] if more else []
    return "\n".join([*lines, "Start the same command again to resume."])


def _is_over(job: StoppedJob) -> bool:
    return job.status not in (None, JobStatus.STOPPED, JobStatus.LEFT_OUT)


def _where(job: StoppedJob) -> str:
    return f"{_ended(job)}after step {job.step}"


def _ended(job: StoppedJob) -> str:
    """Returns how the job ended, or "" if it was running until the stop."""
    if job.status in (JobStatus.ENDED, JobStatus.FAILED):
        return f"{job.status} "
    return "was ejected " if job.status == JobStatus.EJECTED else ""


def _saved(job: StoppedJob, folder: str) -> str:
    if not job.begun and _is_over(job):
        return f"Job `{job.name}`: had ended before the stop."
    if not job.begun:
        return f"Job `{job.name}`: had not begun. Its earlier checkpoints are kept."
    if job.saved is None:
        made = f"of its {job.step} steps" if job.step else "since it has made no step"
        return f"Job `{job.name}`: nothing is saved {made}."
    of = f", {job.step - job.saved} before its last" if job.saved < job.step else ""
    ended = f"{_ended(job).rstrip()}, and " if _ended(job) else ""
    return f"Job `{job.name}`: {ended}saved at step {job.saved}{of} in {folder}."
