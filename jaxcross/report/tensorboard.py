"""The metrics of a run as event files for TensorBoard, by tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

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

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Adds a point to each curve."""
        if (writer := self._writers.get(job)) is None:
            from tensorboardX import SummaryWriter

            writer = self._writers[job] = SummaryWriter(
                str(self._folder / quote(job, safe=" ")), purge_step=step, flush_secs=5
            )
        for key, value in flat(values):
            if isinstance(value, bool | int | float):
                writer.add_scalar(key, value, step)

    def note(self, *, job: str, kind: str, step: int = -1, value: float | str | None = None) -> None:
        """Writes what is left of a job that is over."""
        del step, value
        if kind in ("done", "status") and (writer := self._writers.get(job)) is not None:
            writer.flush()
