"""The loops over batches in a job's function.

A `Prefetcher` only delivers batches. This module adds what a job does between two batches: run the
evaluations that are due, check replicas, measure how long the job waits for data, and end the loop
if the job stops early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from jaxcross.jobs.arguments import check_batches
from jaxcross.jobs.data_position import START
from jaxcross.jobs.host import JobHost
from jaxcross.jobs.lifecycle import JobLifecycle
from jaxcross.jobs.prefetch import Prefetcher, number_of_batches, to_device
from jaxcross.world import World

_END = object()


@final
class BatchLoops:
    """Begins a job's loops over batches, does what's due between two batches, and ends loops early.

    Args:
        life: The job's part in the run.
        host: Runs the job's steps.
        world: All ranks.
        finish_step: Called before each next batch, once the loop's body has finished.
    """

    __slots__ = ("_begun", "_ending", "_finish_step", "_host", "_life", "_world")

    def __init__(
        self, life: JobLifecycle, host: JobHost, world: World, finish_step: Callable[[], None]
    ) -> None:
        self._life, self._host, self._world, self._finish_step = life, host, world, finish_step
        self._begun = 0
        # The streams of the loops that end because the job stops early.
        self._ending: set[int] | None = None

    def begin(self, data: Iterable[Any], steps: int | None) -> Iterator[Any]:
        """Begins a loop and returns its batches; see `JobContext.batches`."""
        life, host = self._life, self._host
        driver, record = life.running()
        check_batches(life.name, data, steps)
        if life.ends_stray_loop():
            return iter(())
        # We forget closed loops here rather than where a loop ends, because the garbage collector
        # may finish an abandoned generator in any thread.
        loops = host.loops = [loop for loop in host.loops if not loop.closed]
        resumption = life.resumption
        # After a restart, an evaluation that was still due may open a loop before the training loop
        # that resumes. It mustn't take that loop's position.
        evaluates = host.evaluations.running
        start = START if resumption is None or evaluates else resumption.next_position()
        if not loops and not evaluates:  # a loop alongside others may be an evaluation's
            count = number_of_batches(data, steps)
            host.planned_steps = (
                None if count is None else host.step + max(0, count - start.n_batches)
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
        """Ends the loops that are open now when they next request a batch."""
        if self._ending is None:
            self._ending = {loop.stream for loop in self._host.loops if not loop.closed}

    def _measured(self, loop: Prefetcher) -> Iterator[Any]:
        host, used = self._host, False
        try:
            while not self._life.ends_stray_loop():
                # Requesting the first batch doesn't mean that a batch was used: two loops may be
                # read side by side.
                if used:
                    host.replicas.next_batch(host.run_on_all_ranks)
                self._finish_step()
                if self._ending is not None and loop.stream in self._ending:
                    return
                start_ns = time.monotonic_ns()
                batch = next(loop, _END)
                if batch is _END:
                    host.left_over = host.left_over or loop.left_over
                    return
                host.note_span(start_ns, "input", loop.storage)
                host.replicas.batches += 1
                host.examples.next_batch(batch, self._world.size)
                yield batch
                used = True
        finally:
            loop.close()
