"""What ties a job to its checkpoints: where it goes on, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxcross.checkpoint.checkpointer import JobCheckpointer, Progress
from jaxcross.checkpoint.rank_gather import RunOnAllRanks
from jaxcross.jobs.data_position import START, Place
from jaxcross.jobs.latest_state import holds_state
from jaxcross.jobs.prefetch import Prefetcher


class Resumption:
    """One job's, on one rank; used by the job's thread, and by the runner after it.

    The places in the data that are saved are those at the latest committed step of training: a batch that was taken
    but not yet trained on is taken again.

    Args:
        checkpointer: Reads and writes the checkpoints.
        cuts: What `cut="auto"` found, shared with the job.
        every: After how many steps the plain loop is to save, if at all.

    Attributes:
        first_step: How many steps earlier runs made.
    """

    def __init__(self, checkpointer: JobCheckpointer, cuts: dict[str, int], every: int | None) -> None:
        self._checkpointer, self._cuts, self.every = checkpointer, cuts, every
        self.first_step = 0
        self._ahead: list[Place] = []  # where the next loops begin
        self._places: tuple[Place, ...] = ()
        # The loops in which the latest step was, and their batches by then.
        self._trained: list[tuple[Prefetcher, int]] = []
        self._several = False
        self._step: tuple[str, bool] | None = None  # the function whose calls are steps, and whether it returns a state
        self._uncounted = ""  # what is wrong with another function that trains

    def restore(self, target: Any, together: RunOnAllRanks, *, local: bool = False) -> Any:
        """The state of the newest checkpoint, or None. Waits for all ranks; see `JobCheckpointer.restore`."""
        found = self._checkpointer.restore(target, together, local=local)
        if found is None:
            return None
        state, progress = found
        self.first_step = progress.step
        self._places = tuple(Place(*place) for place in progress.places)
        self._ahead = list(self._places)
        self._cuts.update(progress.cuts)
        return state

    def markers(self, together: RunOnAllRanks) -> tuple[bool, bool]:
        """Whether an earlier run left the job stopped, or paused. Waits for all ranks."""
        return self._checkpointer.markers(together)

    def mark_done(self, status: str) -> None:
        """The job is over, and not because the run is."""
        self._checkpointer.mark_done(status)

    def mark_paused(self, paused: bool) -> None:
        """The job rests, or goes on."""
        self._checkpointer.mark_paused(paused)

    def next_place(self) -> Place:
        """Where the job's next loop over batches begins."""
        return self._ahead.pop(0) if self._ahead else START

    def begun(self, feed: Prefetcher) -> None:
        """A loop over batches begins, at `next_place`."""
        if feed.place != START:  # an earlier run trained in it
            self._trained.append((feed, feed.place.taken))

    def called(self, name: str, feeds: Iterable[Prefetcher], *, trains: bool, state: Any, results: Any) -> None:
        """A function with exchanges has come through on all ranks.

        Args:
            name: The function's.
            feeds: The job's loops over batches.
            trains: Whether the call is a step of the job.
            state: Made like the job's state.
            results: What the function returned.
        """
        reading = [(feed, feed.place.taken) for feed in feeds if not feed.closed]
        if trains:
            self._several = self._several or any(feed.closed for feed, _ in self._trained)
            self._trained = reading
            self._places = tuple(feed.place for feed, _ in reading)
            self._step = self._step or (name, holds_state(state, results))
        assert self._step is not None
        counted, counted_trains = self._step
        if trains:
            self._uncounted = self._uncounted if not counted_trains else ""
            return
        # It trains on other batches than the latest step, or in place of a step that only evaluates.
        elsewhere = any(feed.place.taken != taken for feed, taken in self._trained) or (reading and not self._trained)
        if (elsewhere or not counted_trains) and holds_state(state, results):
            self._uncounted = (
                f"`{name}` trains, but steps are the calls of `{counted}`, the first function with exchanges that the "
                "job called: a restart would take the wrong batches. Train by one function, with a static argument for "
                "what differs, and evaluate after its first step"
            )

    @property
    def unsavable_reason(self) -> str:
        """Why a restart would not know where to go on in the data, if so."""
        if self._several:
            return (
                "its function trains in several loops over `job.batches`, one after the other or one inside another, "
                "and a restart could not tell them apart: take all batches from one loop"
            )
        return self._uncounted

    def save(
        self, state: Any, step: int, together: RunOnAllRanks, *, unsavable_reason: str
    ) -> list[dict[str, str]] | None:
        """Begins a checkpoint, and returns every rank's digests. Waits for all ranks; see `JobCheckpointer.save`."""
        return self._checkpointer.save(state, self._progress(step), together, unsavable_reason=unsavable_reason)

    def save_last(self, state: Any, step: int, together: RunOnAllRanks, *, unsavable_reason: str) -> None:
        """The job is over: makes sure that its state survives, unless it never began. Waits for all ranks and disks."""
        if self._checkpointer.begun:  # on one rank perhaps after its first step, on another before it
            self._checkpointer.save(state, self._progress(step), together, unsavable_reason=unsavable_reason, last=True)
            self._checkpointer.wait_until_complete(together)

    def _progress(self, step: int) -> Progress:
        cuts: Mapping[str, int] = dict(self._cuts)
        return Progress(step=step, places=tuple((place.taken, place.state) for place in self._places), cuts=cuts)
