"""What ties a job to its checkpoints: where it goes on, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxcross.checkpoint.keeper import Keeper, Progress
from jaxcross.checkpoint.talk import Together
from jaxcross.runtime.feed import Feed
from jaxcross.runtime.place import START, Place


class Resumption:
    """One job's, on one rank; used by the job's thread, and by the runner after it.

    The places in the data that are saved are those at the latest committed step of training: a batch that was taken
    but not yet trained on is taken again.

    Args:
        keeper: Reads and writes the checkpoints.
        cuts: What `cut="auto"` found, shared with the job.
        every: After how many steps the plain loop is to save, if at all.

    Attributes:
        first_step: How many steps earlier runs made.
    """

    def __init__(self, keeper: Keeper, cuts: dict[str, int], every: int | None) -> None:
        self._keeper, self._cuts, self.every = keeper, cuts, every
        self.first_step = 0
        self._ahead: list[Place] = []  # where the next loops begin
        self._places: tuple[Place, ...] = ()

    def restore(self, target: Any, together: Together, *, local: bool = False) -> Any:
        """The state of the newest checkpoint, or None. Waits for all ranks; see `Keeper.restore`."""
        found = self._keeper.restore(target, together, local=local)
        if found is None:
            return None
        state, progress = found
        self.first_step = progress.step
        self._places = tuple(Place(*place) for place in progress.places)
        self._ahead = list(self._places)
        self._cuts.update(progress.cuts)
        return state

    def standing(self, together: Together) -> tuple[bool, bool]:
        """Whether an earlier run left the job stopped or paused. Waits for all ranks; see `Keeper.standing`."""
        return self._keeper.standing(together)

    def left(self, how: str) -> None:
        """The job is over, and not because the run is."""
        self._keeper.left(how)

    def paused(self, paused: bool) -> None:
        """The job rests, or goes on."""
        self._keeper.paused(paused)

    def next_place(self) -> Place:
        """Where the job's next loop over batches begins."""
        return self._ahead.pop(0) if self._ahead else START

    def stepped(self, feeds: Iterable[Feed]) -> None:
        """A step of training is committed on all ranks."""
        self._places = tuple(feed.place for feed in feeds if not feed.closed)

    def save(self, state: Any, step: int, together: Together, *, unfit: str) -> list[dict[str, str]] | None:
        """Begins a checkpoint, and returns every rank's digests. Waits for all ranks; see `Keeper.save`."""
        return self._keeper.save(state, self._progress(step), together, unfit=unfit)

    def save_last(self, state: Any, step: int, together: Together, *, unfit: str) -> None:
        """The job is over: makes sure that its state survives, unless it never began. Waits for all ranks and disks."""
        if self._keeper.begun:  # on one rank perhaps after its first step, on another before it
            self._keeper.save(state, self._progress(step), together, unfit=unfit, last=True)
            self._keeper.settle(together)

    def _progress(self, step: int) -> Progress:
        cuts: Mapping[str, int] = dict(self._cuts)
        return Progress(step=step, places=tuple((place.taken, place.state) for place in self._places), cuts=cuts)
