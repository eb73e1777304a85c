"""Connects a job to its checkpoints, and determines what they contain besides the state.

A checkpoint has to contain the position in the data from which to resume. If it doesn't match the
state, a restarted run skips some batches or trains on them twice. The current position of the job's
iterator won't do, because the job may have taken batches that it hasn't trained on yet. Instead, we
record the positions of all open loops after each committed step, and save the latest of these.

For some jobs, a restart couldn't find the right position. If a job trains in several loops in a
row, for instance, there's no telling which of them it was in. Such a job gets an error when it
tries to save, because a wrong position would silently change the results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from jaxcross._endings import JobStatus
from jaxcross._pytree import PyTree
from jaxcross.checkpoint import JobCheckpointer, SavedProgress
from jaxcross.jobs.evaluations import Evaluations
from jaxcross.jobs.job_state import holds_state
from jaxcross.jobs.prefetch import START, DataPosition, Prefetcher
from jaxcross.jobs.skipped_steps import SkippedSteps
from jaxcross.world import RunOnAllRanks


class Resumption:
    """One job's checkpoints on one rank.

    For use by the job's thread and, after that thread has ended, by the runner.

    Args:
        checkpointer: Reads and writes the checkpoints.
        cuts: The cuts found by `cut="auto"`. This dict is shared with the job.
        every: The interval, in steps, at which a plain loop saves; None if it doesn't save at
            intervals.
        evaluations: The job's evaluations, whose results so far are saved.
        skipped: Counts the job's skipped steps. The counts are saved as well.

    Attributes:
        first_step: How many steps were made by earlier runs.
    """

    def __init__(
        self,
        checkpointer: JobCheckpointer,
        cuts: dict[str, int],
        every: int | None,
        evaluations: Evaluations,
        skipped: SkippedSteps,
    ) -> None:
        self._checkpointer = checkpointer
        self._cuts = cuts
        self.every = every
        self._evaluations = evaluations
        self._skipped = skipped
        self.first_step = 0
        self._next_positions: list[DataPosition] = []  # of loops that haven't begun yet
        self._positions: tuple[DataPosition, ...] = ()  # at the latest step
        # The loops that were open at the latest step, each with its number of batches at that
        # point.
        self._trained: list[tuple[Prefetcher, int]] = []
        self._trains_in_several_loops = False
        # The name of the function whose calls count as steps, and whether it returns a state.
        self._step: tuple[str, bool] | None = None
        self._uncounted_reason = ""  # set if another function trains too

    @property
    def begun(self) -> bool:
        """Whether the job has restored its state."""
        return self._checkpointer.begun

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint that's complete on all ranks, or None."""
        return self._checkpointer.newest_step

    def restore(
        self,
        target: PyTree,
        run_on_all_ranks: RunOnAllRanks,
        *,
        local: bool = False,
        named: Collection[str] = (),
    ) -> PyTree | None:
        """Returns the state from the newest checkpoint, or None. Waits for all ranks.

        See `JobCheckpointer.restore`.
        """
        found = self._checkpointer.restore(target, run_on_all_ranks, local=local, named=named)
        if found is None:
            return None
        state, progress = found
        self.first_step = progress.step
        self._positions = tuple(DataPosition(*position) for position in progress.places)
        self._next_positions = list(self._positions)
        self._cuts.update(progress.cuts)
        self._evaluations.resume(progress.notes, has_best=progress.best_step is not None)
        self._skipped.resume(progress.notes)
        return state

    def markers(self, run_on_all_ranks: RunOnAllRanks) -> tuple[bool, bool]:
        """Returns whether the job was stopped and whether it was paused in an earlier run.

        Waits for all ranks.
        """
        return self._checkpointer.markers(run_on_all_ranks)

    def mark_done(self, status: JobStatus) -> None:
        """Marks the job as done, unlike a job that merely ends because the run does."""
        self._checkpointer.mark_done(status)

    def mark_paused(self, paused: bool) -> None:
        """Records whether the job is paused."""
        self._checkpointer.mark_paused(paused)

    def next_position(self) -> DataPosition:
        """Returns the position where the job's next loop over batches should begin."""
        return self._next_positions.pop(0) if self._next_positions else START

    def note_loop(self, prefetcher: Prefetcher) -> None:
        """Records that a loop over batches has begun at the position from `next_position`."""
        if prefetcher.position != START:  # an earlier run trained in this loop
            self._trained.append((prefetcher, prefetcher.position.n_batches))

    def note_call(
        self,
        name: str,
        prefetchers: Iterable[Prefetcher],
        *,
        trains: bool,
        state: PyTree,
        results: PyTree,
    ) -> None:
        """Records that all ranks have committed a call of a function with exchanges.

        Args:
            name: The function's name.
            prefetchers: The job's loops over batches.
            trains: Whether the call counts as a step of the job.
            state: A tree with the structure, shapes and types of the job's state.
            results: The function's results.
        """
        reading = [(each, each.position.n_batches) for each in prefetchers if not each.closed]
        if trains:
            # Detect jobs that train in several loops: if a loop that was used for training has been
            # closed, the job must now be in another loop. A restart couldn't tell which of them a
            # saved position belongs to.
            self._trains_in_several_loops |= any(each.closed for each, _ in self._trained)
            self._trained = reading
            self._positions = tuple(each.position for each, _ in reading)
            self._step = self._step or (name, holds_state(state, results))
        assert self._step is not None
        counted, counted_trains = self._step
        if trains:
            self._uncounted_reason = self._uncounted_reason if not counted_trains else ""
            return
        # Steps are the calls of a single function, the first function with exchanges. All others
        # usually just evaluate; if one of them trains too, the recorded positions are wrong, which
        # we need to detect.
        #
        # We assume that another function trains if it returns something that looks like the state,
        # and also either uses batches that the latest step didn't use, or the counted function
        # doesn't return a state (in which case that's the one that just evaluates).
        took_others = any(each.position.n_batches != n for each, n in self._trained) or (
            reading and not self._trained
        )
        if (took_others or not counted_trains) and holds_state(state, results):
            self._uncounted_reason = (
                f"`{name}` trains too, but only the calls of `{counted}` count as steps, because "
                "it is the first function with exchanges that the job called, so a restart would "
                "take the wrong batches. Train with a single function, which may have a static "
                "argument for what differs, and evaluate only after its first step"
            )

    @property
    def unsavable_reason(self) -> str:
        """The reason why a restart couldn't find its position in the data, or ""."""
        if self._trains_in_several_loops:
            return (
                "its function trains in several loops over `job.batches`, one after the other or "
                "one inside another, and a restart could not tell them apart. Take all batches "
                "from one loop"
            )
        return self._uncounted_reason

    def save(
        self, state: PyTree, step: int, run_on_all_ranks: RunOnAllRanks, *, unsavable_reason: str
    ) -> list[dict[str, str]] | None:
        """Starts a checkpoint, and returns the digests of every rank. Waits for all ranks.

        See `JobCheckpointer.save`.
        """
        return self._checkpointer.save(
            state, self._progress(step), run_on_all_ranks, unsavable_reason=unsavable_reason
        )

    def save_last(
        self, state: PyTree, step: int, run_on_all_ranks: RunOnAllRanks, *, unsavable_reason: str
    ) -> None:
        """Saves the state of a job that has ended, unless it never restored a state.

        Waits for all ranks and their disks.
        """
        # Saving is collective, so either all ranks save or none of them do. `begun` (whether the
        # job has restored its state) is the same on all ranks. We can't go by the number of steps,
        # because one rank may have made its first step when another rank hasn't yet.
        if self._checkpointer.begun:
            self._checkpointer.save(
                state,
                self._progress(step),
                run_on_all_ranks,
                unsavable_reason=unsavable_reason,
                last=True,
            )
            self._checkpointer.wait_until_complete(run_on_all_ranks)

    def _progress(self, step: int) -> SavedProgress:
        cuts: Mapping[str, int] = dict(self._cuts)
        places = tuple((position.n_batches, position.state) for position in self._positions)
        return SavedProgress(
            step=step,
            places=places,
            cuts=cuts,
            notes=self._evaluations.to_notes() | self._skipped.to_notes(),
            best_step=self._evaluations.best_step,
        )
