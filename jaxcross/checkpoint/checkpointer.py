"""One job's checkpoints on one rank: restores the newest, writes new ones, deletes old ones."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxcross._pytree import Form, Leaf, forms_of, rebuild, snapshot, unlike
from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.layout import Folders, Mark, checkpoint_name, step_of
from jaxcross.checkpoint.part import Part, Saved
from jaxcross.checkpoint.rank_gather import RankGather, Together
from jaxcross.checkpoint.restore import UNREADABLE, CheckpointerWorld, Found, find
from jaxcross.checkpoint.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job has come, beside its state. The same on every rank, but for the texts in `places`.

    Attributes:
        step: Its steps.
        places: For each data that its loops had open at that step: batches taken, and the iterator's own word for it.
        cuts: Which cut was found fastest for which program.
    """

    step: int
    places: tuple[tuple[int, str | None], ...]
    cuts: Mapping[str, int]


class JobCheckpointer:
    """Restores and saves one job. Its calls follow one another, in one order on all ranks.

    Args:
        talk: The job's voice.
        world: Rank, size, and a broadcast.
        folders: Where the parts lie.
        keep: How many complete checkpoints are kept.
        environment: What else decides the last bits of results.
        writer: The thread that writes.
    """

    def __init__(
        self,
        talk: RankGather,
        *,
        world: CheckpointerWorld,
        folders: Folders,
        keep: int,
        environment: Mapping[str, str],
        writer: Writer,
    ) -> None:
        self._talk, self._world, self._folders, self._keep = talk, world, folders, keep
        self._environment, self._writer = environment, writer
        self._wanted: dict[str, Form] | None = None  # the state that the job restored
        self._complete: list[str] = []  # on all ranks, oldest first
        self._own: set[str] = set()  # there at the start, or begun in this run: another run's would not be deleted
        self._writing: tuple[str, Future[None]] | None = None
        self._saved: tuple[int, list[str]] | None = None  # step and digests of the newest

    @property
    def begun(self) -> bool:
        """Whether the job has restored its state: from then on it can be saved."""
        return self._wanted is not None

    def restore(self, target: Any, together: Together, *, local: bool = False) -> tuple[Any, Progress] | None:
        """The newest state that is whole on all ranks, made like `target`; None if there is none. Waits for all ranks.

        Args:
            target: What the job would begin with.
            together: Runs what communicates.
            local: Ranks mean each their own `target`.

        Raises:
            JobError: On every rank: the newest checkpoint is of another model, of a number of ranks that this one
                cannot take over from, or of another version of jaxcross; a rank cannot read; there are checkpoints, and
                all are damaged; or the job has restored a state before.
            TypeError: A leaf is no array and no number.
        """
        if self._wanted is not None:
            raise self._talk.error(
                "restores twice. A checkpoint holds one state: put all that it trains into one tree, and restore that."
            )
        wanted = forms_of(target)
        found = find(
            target, wanted, world=self._world, folders=self._folders, talk=self._talk, together=together, local=local
        )
        self._wanted = wanted  # on all ranks alike, whatever this one's disk does next
        self._own = set(self._folders.names())
        if found is None:
            if self._own:
                self._talk.warn(
                    f"nothing in `{self._folders.path}` was ever written to its end: the job starts from its beginning"
                )
            self._mark("whole", None)  # of checkpoints that somebody has deleted
            return None
        part = found.part
        self._complete = found.whole
        self._mark("whole", found.name)
        self._saved = (part.step, [saved.digest for saved in part.leaves.values()])
        self._say_what_changed(found)
        return rebuild(target, part.forms, found.arrays), Progress(step=part.step, places=part.places, cuts=part.cuts)

    def standing(self, together: Together) -> tuple[bool, bool]:
        """Whether an earlier run left the job stopped, by itself and for good, or paused; the same on every rank, for
        which it waits. What it says of a job that is over otherwise is forgotten: it begins anew.

        Raises:
            JobError: On every rank: one cannot read.
        """
        left = paused = trouble = ""
        cause = None
        try:
            left, paused = self._folders.marked("left"), self._folders.marked("paused")
        except OSError as error:
            trouble, cause = f"{type(error).__name__}: {error}", error
        told = self._talk.gather(together, "its standing", json.dumps([left, paused, trouble]))
        said = [json.loads(text) for text in told]
        self._talk.check(UNREADABLE, [trouble for *_, trouble in said], cause)
        stopped = any(left == "stopped" for left, *_ in said)
        rests = any(paused for _, paused, _ in said) and not stopped
        if stopped:
            marks = self._folders.path / "left-*"
            self._talk.warn(f"was stopped in an earlier run, and stays so. To let it go on, delete `{marks}`")
        elif rests:
            self._talk.warn("rests, as in an earlier run, until somebody resumes it")
        if left and not stopped:
            self._mark("left", None)
        return stopped, rests

    def left(self, how: str) -> None:
        """The job is over, and not because the run is. Does not wait; on disk before what is saved later."""
        self._mark("left", how)
        self._mark("paused", None)

    def paused(self, paused: bool) -> None:
        """The job rests, or goes on. Does not wait; on disk before what is saved later."""
        self._mark("paused", "paused" if paused else None)

    def _mark(self, what: Mark, text: str | None) -> None:
        def write() -> None:
            try:
                self._folders.mark(what, text)
            except OSError as error:
                news = "which checkpoints were whole" if what == "whole" else f"that it is {text or 'going on'}"
                self._talk.warn(f"a restart will not know {news}: {error}")

        self._writer.submit(write)

    def save(
        self, state: Any, progress: Progress, together: Together, *, unfit: str = "", last: bool = False
    ) -> list[dict[str, str]] | None:  # fmt: skip
        """Begins a checkpoint; the state may be donated when it returns. Waits for the state's values, for the
        previous checkpoint to be written, and for all ranks; not for the disk.

        Args:
            state: The job's state.
            progress: Where the job stands.
            together: Runs what communicates.
            unfit: Why the job could not resume from it, if the caller knows a reason.
            last: Nothing is written, nor raised, if the newest checkpoint is equal or the state unfit.

        Returns:
            The digests of every rank's leaves, by rank; None where the state is unfit or the job made no step.

        Raises:
            JobError: On every rank: it is no state that the job could resume from, or a disk failed.
        """
        leaves: dict[str, Leaf] = {}
        trouble, cause = "", None
        unfit = unfit or self._unfit(state)
        try:
            self._wait_for_writer()
            leaves = {} if unfit else snapshot(state)
        except Exception as error:
            trouble, cause = f"{type(error).__name__}: {error}", error
        digests = {path: leaf.digest for path, leaf in leaves.items()}
        same = last and self._saved == (progress.step, list(digests.values()))
        said = {"step": progress.step, "same": same, "trouble": trouble, "unfit": unfit, "digests": digests}
        texts = self._talk.gather(together, "save", json.dumps({**said, "token": f"{time.time_ns():016x}"}))
        heard = [json.loads(text) for text in texts]
        self._previous_is_over([rank["trouble"] for rank in heard], cause)
        steps = [rank["step"] for rank in heard]
        if last and not any(steps):
            return None
        reasons = [rank["unfit"] for rank in heard]
        if last and any(reasons):
            self._talk.warn(f"its last state is not saved: {next(filter(None, reasons))}")
            return None
        self._talk.check("cannot save this state", reasons)
        if len(set(steps)) > 1:
            raise self._talk.error(f"cannot be saved: its ranks have made {steps} steps, and could not resume together")
        if not all(rank["same"] for rank in heard):
            common = {path for path, d in digests.items() if all(rank["digests"].get(path) == d for rank in heard)}
            self._begin(checkpoint_name(progress.step, heard[0]["token"]), leaves, common, progress)
            self._saved = (progress.step, list(digests.values()))
        return [rank["digests"] for rank in heard]

    def settle(self, together: Together) -> None:
        """Waits until the newest checkpoint is complete on all ranks, and deletes what is too old.

        Raises:
            JobError: On every rank: a disk failed.
        """
        trouble, cause = "", None
        try:
            self._wait_for_writer()
        except Exception as error:
            trouble, cause = f"{type(error).__name__}: {error}", error
        self._previous_is_over(self._talk.gather(together, "written", trouble), cause)
        self._folders.delete(self._superfluous())

    def _say_what_changed(self, found: Found) -> None:
        part = found.part
        for key, value in self._environment.items():
            was = part.environment.get(key)
            if was != value and self._world.rank == 0:
                self._talk.warn(f"{key} is `{value}`, was `{was}`: the last bits may differ from here on")
        if part.ranks != self._world.size:
            began = "; each begins with all that the one rank had" if part.ranks == 1 else ""
            ranks = f"{self._world.size} ranks go on from {part.ranks}"
            self._talk.warn(f"{ranks}: with other shares of data, other sums{began}")
        self._talk.note(f"resumes after step {part.step}")

    def _unfit(self, state: Any) -> str:
        if self._wanted is None:
            return "the job has not called `job.restore`, which says what a restart is to restore"
        try:
            differs = unlike(self._wanted, forms_of(state))
        except TypeError as error:
            return str(error)
        return f"it is not like the state that the job restored: {differs}" if differs else ""

    def _begin(self, name: str, leaves: Mapping[str, Leaf], common: set[str], progress: Progress) -> None:
        held = {p: leaf.array for p, leaf in leaves.items() if self._world.rank == 0 or p not in common}
        describe = partial(
            Part, job=self._talk.job, step=progress.step, rank=self._world.rank, ranks=self._world.size,
            leaves={p: Saved(form=leaf.form, digest=leaf.digest, common=p in common) for p, leaf in leaves.items()},
            places=progress.places, cuts=dict(progress.cuts), environment=self._environment,
        )  # fmt: skip
        superfluous = self._superfluous()
        self._own.add(name)

        def write() -> None:
            with self._world.flight.during("checkpoint", job=self._talk.job, step=progress.step):
                self._folders.part_path(name).mkdir(parents=True)
                arrays.write(self._folders.arrays_path(name), held)
                self._folders.commit(name, describe(files=self._folders.describe_files(name)))
                self._folders.delete(superfluous)

        self._writing = (name, self._writer.submit(write))

    def _wait_for_writer(self) -> None:
        if self._writing is None:
            return
        name, written = self._writing
        self._writer.wait_for(written, self._world, job=self._talk.job, step=step_of(name), lacks="the last checkpoint")

    def _previous_is_over(self, troubles: list[str], cause: Exception | None) -> None:
        writing, self._writing = self._writing, None
        self._talk.check("could not be saved", troubles, cause)
        if writing is not None:
            if not self._complete:
                self._mark("whole", writing[0])
            self._complete.append(writing[0])

    def _superfluous(self) -> set[str]:
        """What no restart can need, as newer checkpoints are complete on all ranks; also what is damaged."""
        kept = self._complete[-self._keep :]
        return {name for name in self._own if name not in kept and name < kept[-1]} if kept else set()
