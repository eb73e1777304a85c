"""Stores logged metrics. Logging doesn't wait for the device.

JAX runs computations asynchronously, so by the time `log` is called, the metrics usually haven't
been computed yet. Reading their values right away would make every step wait for the device.
Instead, `log` just makes a copy on the device, which is read back once it's been computed: by a
later call of `log`, or when the job ends. We need the copy because the next step may donate the
logged arrays in the meantime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from jaxcross._jax_compat import Tracer
from jaxcross._pytree import PyTree, is_key
from jaxcross.jobs.job_state import own_copy
from jaxcross.report import as_logged, is_of
from jaxcross.world import RunOnAllRanks, gather

if TYPE_CHECKING:
    from jaxcross.sweeps import TrialObserver

Leaf: TypeAlias = jax.Array | np.ndarray | complex  # complex includes Python's other numbers


BeginFiles: TypeAlias = Callable[..., list[dict[str, Any]]]
"""`MetricFiles.begin` for one job on rank 0; on other ranks, a function that returns no lines."""


class MetricLog:
    """One job's metrics.

    Args:
        listen: Called with the step and metrics of each `log` call, once they've been read back.
        begin_files: Truncates the metrics files to the restored step. None if there are no files.

    Attributes:
        observer: If the job is a trial of a sweep, the object that follows it on behalf of the
            sweep. It gets the metrics as soon as they're logged, i.e. before they're read back.
    """

    def __init__(
        self, listen: Callable[[int, PyTree], None], begin_files: BeginFiles | None = None
    ) -> None:
        self.history: list[tuple[int, PyTree]] = []
        self.observer: TrialObserver | None = None
        self._listen = listen
        self._begin_files = begin_files
        self._pending: deque[tuple[int, PyTree]] = deque()

    def begin(self, step: int, run_on_all_ranks: RunOnAllRanks | None) -> None:
        """Prepares the metrics files to continue after this step, keeping earlier runs' lines.

        Args:
            step: The last step of earlier runs.
            run_on_all_ranks: Required if earlier runs made any steps. In that case, rank 0 sends
                the lines of these runs to all ranks, which add them to `history`. This waits for
                all ranks.
        """
        if self._begin_files is None:
            return
        lines = self._begin_files(step)
        if run_on_all_ranks is not None:
            lines = run_on_all_ranks(
                "metrics of earlier runs", lambda control: gather(control, lines)
            )[0]
            self.history[:0] = [as_logged(line) for line in lines]
            if self.observer is not None:
                self.observer.restored(len(lines))

    def drop(self, step: int, evaluation: str) -> None:
        """Removes the metrics of an evaluation at this step, which is about to log them again.

        Without metrics files, nothing is kept from earlier runs, so there's nothing to remove.
        """
        if self._begin_files is None:
            return
        self._begin_files(step, without=evaluation)
        left = [
            (at, values)
            for at, values in self.history
            if at != step or not (isinstance(values, Mapping) and is_of(values, evaluation))
        ]
        more = len(left) - len(self.history)
        self.history[:] = left
        if self.observer is not None:
            self.observer.restored(more)

    def add(self, step: int, metrics: PyTree) -> None:
        """Stores a copy, and reads back any earlier metrics that are ready. Doesn't wait.

        Raises:
            TypeError: A leaf is a tracer, i.e. the call is inside `jax.jit` or a step.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(metrics)):
            raise TypeError(
                "`job.log` was called with traced values, inside a `jax.jit` or a step, where it "
                "would only run once, during tracing. Return the metrics from the step, and log "
                "them in the job's function."
            )
        self._pending.append((step, own_copy(jax.tree.map(_key_data, metrics))))
        while self._pending and _computed(self._pending[0][1]):
            self._read_back()
        if self.observer is not None:
            self.observer.logged(step, metrics)

    def read_remaining(self) -> Exception | None:
        """Reads back all remaining metrics. Waits for the device.

        Returns:
            The first error, if any.
        """
        failure = None
        while self._pending:
            try:
                self._read_back()
            except Exception as error:
                failure = failure or error
        return failure

    def _read_back(self) -> None:
        step, metrics = self._pending.popleft()
        values = jax.tree.map(_host_value, metrics)
        self.history.append((step, values))
        self._listen(step, values)


def _key_data(leaf: Leaf) -> Leaf:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _computed(metrics: PyTree) -> bool:
    arrays: list[PyTree] = [
        leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)
    ]
    return all(array.is_ready() for array in arrays)


def _host_value(leaf: Leaf) -> np.ndarray | complex:
    array = np.asarray(leaf)
    return array.item() if array.ndim == 0 else array
