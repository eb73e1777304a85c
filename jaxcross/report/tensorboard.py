"""The metrics of a run as event files for TensorBoard, by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

from jaxcross.errors import require_extra
from jaxcross.interleave.instrument import Instrument
from jaxcross.report.metric_files import flat


@final
class TensorBoard(Instrument):
    """Writes the numbers that jobs log, with a folder of event files for each job. For one rank's `instruments`.

    After a restart TensorBoard shows the new values from the first step on that was logged again. A killed run may lack
    its last seconds.

    Args:
        folder: For `tensorboard --logdir`.

    Raises:
        MissingExtraError: tensorboardX is not installed, which the extra `tensorboard` brings.

    Example:
        >>> sinks = [TensorBoard("logs")] if world.rank == 0 else []  # doctest: +SKIP
        >>> jaxcross.run(jobs, instruments=sinks)  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        require_extra("tensorboard", "`TensorBoard`", "tensorboardX")
        self._folder = Path(folder).absolute()
        self._writers: dict[str, Any] = {}
        atexit.register(self.close)

    def writes_to(self) -> str:
        """Returns the folder."""
        return str(self._folder)

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Adds a point to each curve."""
        if (writer := self._writers.get(job)) is None:
            from tensorboardX import SummaryWriter

            # TensorBoard hides what a killed run has from this step on.
            writer = SummaryWriter(str(self._folder / quote(job, safe=" ")), purge_step=step, flush_secs=5)
            self._writers[job] = writer
        for key, value in flat(values):
            if isinstance(value, bool | int | float):
                writer.add_scalar(key, value, step)

    def note(self, *, job: str, kind: str, step: int = -1, value: float | str | None = None) -> None:
        """Writes what is left of a job that is over. Waits for the disk."""
        del step, value
        if kind in ("done", "closed") and (writer := self._writers.pop(job, None)) is not None:
            writer.close()  # its `flush` would leave what its thread has not taken yet

    def close(self) -> None:
        """Writes what is left of the other jobs, as the process does at its end."""
        while jobs := list(self._writers):
            for job in jobs:  # a thread that is left may note the end of one at the same time
                self.note(job=job, kind="closed")
