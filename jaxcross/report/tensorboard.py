"""Writes a run's metrics for TensorBoard. Uses tensorboardX, so TensorFlow isn't needed."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from jaxcross._files import with_time
from jaxcross.errors import require_extra
from jaxcross.interleave import Instrument
from jaxcross.report.metric_files import flatten_metrics


@final
class TensorBoard(Instrument):
    """Writes the numbers that jobs log to event files, with one folder per job.

    Only pass it to `instruments` on a single rank.

    A resumed run repeats the steps after its checkpoint, which means that they're logged twice.
    From the first repeated step on, TensorBoard only shows the new values. If a run is killed, the
    values of its last few seconds may be missing.

    Args:
        folder: The folder for `tensorboard --logdir`.

    Raises:
        MissingExtraError: tensorboardX is not installed. The extra `tensorboard` installs it.

    Example:
        >>> sinks = [TensorBoard("logs")] if world.rank == 0 else []  # doctest: +SKIP
        >>> jaxcross.run(jobs, instruments=sinks)  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        require_extra("tensorboard", "`TensorBoard`", "tensorboardX")
        self._folder = with_time(folder).absolute()
        self._writers: dict[str, Any] = {}
        atexit.register(self.close)

    def writes_to(self) -> str:
        """Returns the folder."""
        return str(self._folder)

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Adds a point to each curve."""
        writer = self._writers.get(job)
        if writer is None:
            from tensorboardX import SummaryWriter

            # If this run resumes a killed run, it may be about to repeat steps that the killed run
            # has already logged. `purge_step` tells TensorBoard to hide all earlier values from
            # this step on, so the old curve doesn't overlap with the new one.
            writer = SummaryWriter(
                str(self._folder / quote(job, safe=" ")), purge_step=step, flush_secs=5
            )
            self._writers[job] = writer
        for key, value in flatten_metrics(values):
            if isinstance(value, bool | int | float):
                writer.add_scalar(key, value, step)

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        """Writes out the remaining values of a job that has ended. Waits for the disk."""
        del step, value
        if kind not in ("done", "closed"):
            return
        writer = self._writers.pop(job, None)
        if writer is not None:
            # `flush` would miss values that the writer's thread hasn't gotten to yet.
            writer.close()

    def close(self) -> None:
        """Writes out the remaining values of all other jobs. Also called at process exit."""
        while jobs := list(self._writers):
            for job in jobs:  # another thread may call `note` for one of these at the same time
                self.note(job=job, kind="closed")
