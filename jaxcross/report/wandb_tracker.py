"""`WandB`: sends the metrics of jobs to Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from jaxcross.errors import require_extra
from jaxcross.report.tracker import Row, TrackedJob, TrackedRun, Tracker, check_name

_ASIDE = "superseded"
_EXIT_CODES = {"ended": 0, "stopped early": 0, "pruned": 0}


@final
class WandB(Tracker):
    """Sends what jobs log to Weights & Biases (W&B), with one run per job.

    Pass it to `instruments` on every rank; only rank 0 uses it. If the run has checkpoints, also
    pass `metrics`. A job that's resumed then continues its W&B run, in which each step occurs
    exactly once, no matter how the earlier run ended.

    The W&B run has the job's name, and its config consists of the arguments of the job's function,
    as far as they're numbers, strings, or lists and dicts of these. The trials of a sweep are in
    one group. When the job ends, its status is in the summary, as `jaxcross/status`.

    Metrics are sent by a separate thread, so the job never waits for W&B, and doesn't fail if W&B
    can't be reached. The end of the run waits for at most three minutes.

    Everything else is configured by W&B's own environment variables, such as `WANDB_ENTITY`,
    `WANDB_DIR` and `WANDB_MODE=offline`. If an offline job is resumed, W&B creates a new folder for
    its run. We write the complete history of the run into it, and move the earlier folder into a
    folder `superseded`, where `wandb sync` doesn't find it.

    Args:
        project: The name of the W&B project.

    Raises:
        MissingExtraError: wandb is not installed. The extra `wandb` installs it.
        ValueError: `project` is empty.

    Example:
        >>> tracker = WandB("my-project")  # doctest: +SKIP
        >>> jaxcross.run(jobs, metrics="metrics", instruments=[tracker])  # doctest: +SKIP
    """

    service = "W&B"
    suffix = "wandb"
    reopens = False

    def __init__(self, project: str) -> None:
        require_extra("wandb", "`WandB`", "wandb")
        check_name(project, "project", "a W&B project")
        super().__init__()
        self._project = project

    def open_run(self, job: TrackedJob) -> TrackedRun:
        """See `Tracker`."""
        import wandb

        saved = job.saved
        resumes = saved.get("project") == self._project
        run_id = saved["id"] if resumes else secrets.token_hex(8)
        if not resumes:
            job.save(project=self._project, id=run_id, folder="")
        run = wandb.init(
            project=self._project,
            id=run_id,
            name=job.name,
            group=job.group or None,
            config=job.params,
            resume="allow" if resumes else None,
            reinit="create_new",  # a process has one run for each job
            settings=wandb.Settings(console="off"),  # all jobs share the output of the process
        )
        folder = Path(run.settings.sync_dir)
        earlier = {folder.parent, Path(job.saved.get("folder") or folder.parent)}
        job.save(project=self._project, id=run_id, folder=str(folder.parent))
        for parent in earlier:
            for old in parent.glob(f"offline-run-*-{run_id}"):
                if old != folder:
                    (parent / _ASIDE).mkdir(exist_ok=True)
                    old.rename(parent / _ASIDE / old.name)
        # Online, the number of steps comes from the service. Offline, it's 0, as the run has a new
        # folder that has to contain everything.
        return _WandBRun(run, first_step=run.step)


@final
class _WandBRun:
    def __init__(self, run: Any, *, first_step: int) -> None:
        self._run = run
        self._first_step = first_step

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.step >= self._first_step:
                self._run.log({**row.values, "_timestamp": row.time_s}, step=row.step)

    def finish(self, status: str) -> None:
        self._run.summary["jaxcross/status"] = status
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))
