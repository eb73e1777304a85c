"""Loops over batches in a job's function.

A `Prefetcher` just delivers batches. Everything else that has to happen between two batches is done
here: running the evaluations that are due, comparing the state across ranks, measuring how long the
job waited for data, and counting the examples in each batch. This is also where a loop is cut short
when the job stops early.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from jaxcross._pytree import PyTree
from jaxcross.jobs.arguments import check_batches
from jaxcross.jobs.prefetch import START, Prefetcher, number_of_batches, to_device

if TYPE_CHECKING:
    from jaxcross.jobs.engine import JobEngine

_END = object()


@final
class BatchLoops:
    """Begins a job's loops over batches, does the work between batches, and ends loops early.

    Args:
        engine: The job.
    """

    __slots__ = ("_begun", "_ending", "_engine")

    def __init__(self, engine: JobEngine) -> None:
        self._engine = engine
        self._begun = 0
        # Stream numbers of the loops to end because the job stops early; None if it doesn't.
        self._ending: set[int] | None = None

    def begin(self, data: Iterable[Any], steps: int | None) -> Iterator[Any]:
        """Begins a loop and returns its batches; see `JobContext.batches`."""
        engine = self._engine
        driver, record = engine.running()
        check_batches(engine.name, data, steps)
        if engine.ends_stray_loop():
            return iter(())
        # Prune closed loops from the list here, when another loop begins, rather than as each loop
        # ends. The generator of an abandoned loop is finalized by the garbage collector, possibly
        # in another thread, which would then modify the list under the job's feet.
        loops = engine.loops = [loop for loop in engine.loops if not loop.closed]
        resumption = engine.resumption
        # After a restart, an evaluation may be due before the first training step, and the
        # evaluation function may well loop over its own batches. Such a loop should start from its
        # first batch: the position saved in the checkpoint is meant for the training loop, which
        # comes later.
        evaluates = engine.evaluations.running
        start = START if resumption is None or evaluates else resumption.next_position()
        if not loops and not evaluates:  # a second open loop may belong to an evaluation
            count = number_of_batches(data, steps)
            engine.planned_steps = (
                None if count is None else engine.step + max(0, count - start.n_batches)
            )
        loop = Prefetcher(
            driver=driver,
            job=record,
            stream=self._begun,
            open_streams=[other.stream for other in loops],
            data=data,
            steps=steps,
            prepare=to_device,
            start=start,
            resumable=resumption is not None,
        )
        self._begun += 1
        loops.append(loop)
        if resumption is not None:
            resumption.note_loop(loop)
        return self._measured(loop)

    def end_early(self) -> None:
        """Makes all loops that are currently open end at their next request for a batch."""
        if self._ending is None:
            self._ending = {loop.stream for loop in self._engine.loops if not loop.closed}

    def _measured(self, loop: Prefetcher) -> Iterator[Any]:
        engine = self._engine
        used = False
        try:
            while not engine.ends_stray_loop():
                # Hold off on comparing the ranks' copies of the state until the job has trained on
                # a batch from this loop. Requesting the first batch doesn't prove that yet: a job
                # that reads two loops in parallel requests a batch from each of them before it
                # trains on either.
                if used:
                    engine.replicas.next_batch(engine.run_on_all_ranks)
                engine.finish_step()
                if self._ending is not None and loop.stream in self._ending:
                    return
                start_ns = time.monotonic_ns()
                batch = next(loop, _END)
                if batch is _END:
                    engine.left_over = engine.left_over or loop.left_over
                    return
                engine.note_span(start_ns, "input", loop.storage)
                engine.replicas.batches += 1
                engine.examples.next_batch(batch, engine.world.size)
                yield batch
                used = True
        finally:
            loop.close()


@final
class ExampleCount:
    """Keeps a running average of the examples per step, unless the user sets `per_step`.

    Attributes:
        per_step: How many examples all ranks together use per step, averaged over the steps so far;
            None if unknown.
        unit: What reports call an example.
    """

    __slots__ = ("_counted", "_in_batch", "_mean", "_steps", "per_step", "unit")

    def __init__(self) -> None:
        self.per_step: float | None = None
        self.unit = "examples"
        self._in_batch: float | None = None  # in the latest batch, on all ranks
        self._mean: float | None = None  # differs from `per_step` if the user sets that
        self._counted = 0.0
        self._steps = 0

    def next_batch(self, batch: PyTree, ranks: int) -> None:
        """Records the size of the batch that the next step will use."""
        self._in_batch, unit = count_examples(batch, ranks)
        if self.per_step is None:
            self.per_step = self._mean = self._in_batch
            self.unit = unit

    def count_step(self) -> None:
        """Counts a step that used the latest batch."""
        if self._in_batch is None or self.per_step != self._mean:
            return
        self._counted += self._in_batch
        self._steps += 1
        self.per_step = self._mean = self._counted / self._steps


def count_examples(batch: PyTree, ranks: int) -> tuple[float | None, str]:
    """Returns the number of examples per step, summed over all ranks, and what to call them."""
    shapes = [
        leaf.shape
        for leaf in jax.tree.leaves(batch)
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim
    ]
    if not shapes:
        return None, "examples"
    shape = shapes[0]
    images = False
    if len(shape) == 4:
        # These may be images, with the channels either in the last dimension, as in Flax, or in the
        # second. An image has more rows and columns than channels, so the smaller of these two
        # dimensions is the one with the channels.
        size, channels = (shape[1:3], shape[3]) if shape[3] < shape[1] else (shape[2:], shape[1])
        images = min(size) > 4 and channels in (1, 3, 4)
    return float(shape[0] * ranks), "images" if images else "examples"
