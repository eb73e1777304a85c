"""Connects a job to its checkpoints: where the job resumes, and what it saves.

A checkpoint must contain the position in the data that belongs to the state: otherwise, a restart
would skip batches or train on them twice. The job may have taken batches on which it hasn't trained
yet, so the positions are those at the latest committed step rather than the current ones. If the
job trains in a way for which they can't be right, e.g. in several loops one after the other, saving
is refused with the reason.
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
    """The checkpoints of one job on one rank.

    Used by the job's thread, and by the runner after it.

    Args:
        checkpointer: Reads and writes the checkpoints.
        cuts: The cuts that `cut="auto"` found, shared with the job.
        every: The interval, in steps, at which the plain loop saves; None if it doesn't.
        evaluations: The job's evaluations, whose outcome so far is a part of the job's progress.
        skipped: The job's skipped steps, which are a part of its progress too.

    Attributes:
        first_step: How many steps earlier runs made.
    """

    def __init__(
        self,
        checkpointer: JobCheckpointer,
        cuts: dict[str, int],
        every: int | None,
        evaluations: Evaluations,
        skipped: SkippedSteps,
    ) -> None:
        self._checkpointer, self._cuts, self.every = checkpointer, cuts, every
        self._evaluations, self._skipped = evaluations, skipped
        self.first_step = 0
        self._next_positions: list[DataPosition] = []  # of loops that haven't begun yet
        self._positions: tuple[DataPosition, ...] = ()  # at the latest step, saved next
        # The loops that were open at the latest step, and their numbers of batches by then.
        self._trained: list[tuple[Prefetcher, int]] = []
        self._trains_in_several_loops = False
        # The function whose calls are steps, and whether it returns a state.
        self._step: tuple[str, bool] | None = None
        self._uncounted_reason = ""  # the reason if another function trains too

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
        """Returns the state of the newest checkpoint, or None. Waits for all ranks.

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
        """Whether an earlier run left the job stopped, and whether paused. Waits for all ranks."""
        return self._checkpointer.markers(run_on_all_ranks)

    def mark_done(self, status: JobStatus) -> None:
        """Records that the job has ended, for a reason other than the end of the run."""
        self._checkpointer.mark_done(status)

    def mark_paused(self, paused: bool) -> None:
        """Records that the job is paused, or resumed."""
        self._checkpointer.mark_paused(paused)

    def next_position(self) -> DataPosition:
        """Returns the position at which the job's next loop over batches begins."""
        return self._next_positions.pop(0) if self._next_positions else START

    def note_loop(self, prefetcher: Prefetcher) -> None:
        """Records that a loop over batches has begun at `next_position`."""
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
        """Records that all ranks committed a call of a function with exchanges.

        Args:
            name: The function's name.
            prefetchers: The job's loops over batches.
            trains: Whether the call is a step of the job.
            state: A tree with the structure, shapes and types of the job's state.
            results: The function's results.
        """
        reading = [(each, each.position.n_batches) for each in prefetchers if not each.closed]
        if trains:
            # If a loop was closed since the latest step, the job now trains in a second one.
            self._trains_in_several_loops |= any(each.closed for each, _ in self._trained)
            self._trained = reading
            self._positions = tuple(each.position for each, _ in reading)
            self._step = self._step or (name, holds_state(state, results))
        assert self._step is not None
        counted, counted_trains = self._step
        if trains:
            self._uncounted_reason = self._uncounted_reason if not counted_trains else ""
            return
        # This function trains too if it returns a state and either uses other batches than the
        # latest step, or the function whose calls count as steps only evaluates.
        took_others = any(each.position.n_batches != n for each, n in self._trained) or (
            reading and not self._trained
        )
        if (took_others or not counted_trains) and holds_state(state, results):
            self._uncounted_reason = (
                f"`{name}` trains, but steps are the calls of `{counted}`, the first function with "
                "exchanges that the job called: a restart would take the wrong batches. Train by "
                "one function, with a static argument for what differs, and evaluate after its "
                "first step"
            )

    @property
    def unsavable_reason(self) -> str:
        """Why a restart couldn't find its position in the data; "" if it could."""
        if self._trains_in_several_loops:
            return (
                "its function trains in several loops over `job.batches`, one after the other or "
                "one inside another, and a restart could not tell them apart: take all batches "
                "from one loop"
            )
        return self._uncounted_reason

    def save(
        self, state: PyTree, step: int, run_on_all_ranks: RunOnAllRanks, *, unsavable_reason: str
    ) -> list[dict[str, str]] | None:
        """Begins a checkpoint, and returns every rank's digests. Waits for all ranks.

        See `JobCheckpointer.save`.
        """
        return self._checkpointer.save(
            state, self._progress(step), run_on_all_ranks, unsavable_reason=unsavable_reason
        )

    def save_last(
        self, state: PyTree, step: int, run_on_all_ranks: RunOnAllRanks, *, unsavable_reason: str
    ) -> None:
        """Saves the state of a job that has ended, unless it never began.

        Waits for all ranks and their disks.
        """
        # We check `begun`, which is the same on all ranks. The first step isn't: one rank may not
        # have made it.
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
