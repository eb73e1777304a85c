"""One job's checkpoints on one rank: restores the newest, writes new ones, deletes old ones.

**Saving.** Training shouldn't have to wait for the disk, so `save` just copies the state and agrees
with the other ranks on what to write, while the actual writing happens in a separate thread. A
checkpoint is only usable if every rank has written its part, but ranks can't see each other's
disks. They report success to each other in the next call of `save` or in `wait_until_complete`;
only then does the checkpoint count as complete.

**Deleting.** A run may be killed at any moment, even while it's writing a checkpoint, and there
should always be a checkpoint to resume from. That's why we never delete the newest complete
checkpoint, and only delete older ones once their successors are complete on all ranks.

**Who writes what.** In data-parallel training, most leaves of a job's state are identical on all
ranks, so rank 0 writes them on behalf of everyone. The remaining leaves are written by every rank:
those with different values, and those that the job declares as rank-local, even if their values
happen to be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from jaxcross._endings import JobStatus
from jaxcross._pytree import Form, Leaf, PyTree, forms_of, rebuild, snapshot, unlike
from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.folders import Folders, Mark, checkpoint_name, step_of
from jaxcross.checkpoint.part import Part, SavedLeaf
from jaxcross.checkpoint.rank_gather import JobLog, RankGather
from jaxcross.checkpoint.rank_local import rank_local_leaves
from jaxcross.checkpoint.restore import UNREADABLE, Found, find
from jaxcross.world import RunOnAllRanks, World

_LOOK_S = 0.2  # how often a waiting thread checks whether the disk is making progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProgress:
    """A job's progress apart from its state. Identical across ranks, except for iterator states.

    Attributes:
        step: The number of steps made.
        places: For each loop over batches that was open at that step, the number of batches taken
            and the iterator's own state.
        cuts: The fastest cut found for each program.
        notes: The results of the job's evaluations, and its skipped steps.
        best_step: The step of the best state so far; None if there is none, or best states aren't
            kept.
    """

    step: int
    places: tuple[tuple[int, str | None], ...]
    cuts: Mapping[str, int]
    notes: Mapping[str, str]
    best_step: int | None


class Writer:
    """A thread that writes the checkpoints of all jobs.

    A single thread is enough, and any cores or disk bandwidth it uses are lost to training.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "jaxcross-checkpoint")
        self._done = 0  # number of tasks done; stops growing if the disk hangs

    def submit(self, write: Callable[[], None]) -> Future[None]:
        """Runs `write` after all tasks that were submitted before it. Doesn't wait."""

        def run() -> None:
            try:
                write()
            finally:
                self._done += 1

        return self._pool.submit(run)

    def wait_for(
        self, written: Future[None], world: World, *, job: str, step: int, missing: str
    ) -> None:
        """Waits until the task `written` is done, and raises its error, if any.

        If the disk hangs, the watchdog reports it; `missing` describes what hasn't been written. A
        disk that's merely slow isn't an error, though, and may take a long time just for the tasks
        ahead of this one, so we reset the watchdog's timer each time a task finishes.
        """
        late = {world.rank: f"its disk has not taken {missing}"}
        watch = world.monitor(
            job=job,
            step=step,
            segment=-1,
            what="checkpoint",
            local=True,
            waiting_for=lambda _: late,
        )
        with watch:
            done = self._done
            while wait([written], _LOOK_S).not_done:
                if self._done != done:
                    done = self._done
                    watch.renew()
            written.result()

    def close(self) -> None:
        """Ends the thread after finishing all tasks. Waits for it."""
        self._pool.shutdown()


class JobCheckpointer:
    """One job's checkpoints. All ranks must call its methods in the same order, one at a time.

    Methods that communicate take a `run_on_all_ranks` function for that purpose, because the
    mechanism depends on when they're called. During a run, communication has to wait its turn in
    the exchange lane (the thread that runs all collective operations); after the run, the ranks
    communicate directly.

    Args:
        log: For warnings and errors about the job.
        world: Rank, size, and a broadcast.
        folders: Where the parts are on this rank's disk.
        keep: How many complete checkpoints to keep.
        environment: Everything else that affects the last bits of results, such as versions.
        writer: The thread that does the writing.
    """

    def __init__(
        self,
        log: JobLog,
        *,
        world: World,
        folders: Folders,
        keep: int,
        environment: Mapping[str, str],
        writer: Writer,
    ) -> None:
        self._log = log
        self._world = world
        self._folders = folders
        self._keep = keep
        self._environment = environment
        self._writer = writer
        self._forms: dict[str, Form] | None = None  # shapes and types of the restored state
        self._named: Collection[str] = ()  # paths of leaves named as rank-local
        self._complete: list[str] = []  # complete on all ranks, oldest first
        # The checkpoints that we may delete: those that were there when this run started, and those
        # that it has begun itself. If another run uses the same directory by mistake, its
        # checkpoints aren't in this set and are therefore safe.
        self._known: set[str] = set()
        self._writing: tuple[str, Future[None]] | None = None
        # Step, notes and digests of the newest checkpoint.
        self._saved: tuple[int, dict[str, str], list[str]] | None = None
        # Checkpoints whose state was the best so far at the time they were begun, oldest first.
        self._bests: list[str] = []

    @property
    def begun(self) -> bool:
        """Whether the job has restored its state, without which it can't be saved."""
        return self._forms is not None

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint that's complete on all ranks, or None."""
        return step_of(self._complete[-1]) if self._complete else None

    def restore(
        self,
        target: PyTree,
        run_on_all_ranks: RunOnAllRanks,
        *,
        local: bool = False,
        named: Collection[str] = (),
    ) -> tuple[PyTree, SavedProgress] | None:
        """Restores the newest checkpoint that's complete on all ranks. Waits for all ranks.

        Returns:
            The state, in a tree with the structure of `target`, and the job's progress; None if
            there's no checkpoint.

        Args:
            target: The state that the job would start from if there were no checkpoint.
            run_on_all_ranks: Used to communicate.
            local: Whether `target` differs between ranks by design.
            named: Paths of the leaves that the job declares as rank-local, the same on every rank.
                From now on, every rank writes these leaves, even if they happen to be identical
                everywhere.

        Raises:
            JobError: Raised on every rank. The newest checkpoint belongs to a different model or
                version of jaxcross, or can't be used with this number of ranks; a rank can't read
                its disk; there are checkpoints, but all of them are damaged; or the job has already
                restored a state.
            TypeError: A leaf is neither an array nor a number, and can't be static.
        """
        if self._forms is not None:
            raise self._log.error(
                "has called `job.restore` twice, but a checkpoint holds a single state. Put "
                "everything that the job trains into one tree, and restore that."
            )
        wanted = forms_of(target)
        ranks = RankGather(self._log, run_on_all_ranks)
        found = find(
            target,
            wanted,
            world=self._world,
            folders=self._folders,
            ranks=ranks,
            local=local,
            named=named,
        )
        self._named = named
        # From here on, the job counts as restored, which means that it can be saved. Set this
        # before accessing the disk, because it has to be the same on all ranks, whereas disk errors
        # may hit just one of them.
        self._forms = wanted
        self._known = set(self._folders.names())
        if found is None:
            if self._known:
                self._log.warn(
                    f"no checkpoint in `{self._folders.path}` was ever complete: the job starts "
                    "from scratch"
                )
            # If there's still a mark saying that a checkpoint was complete, someone must have
            # deleted that checkpoint by hand.
            self._mark("whole", None)
            return None
        part = found.part
        self._complete = found.complete
        self._mark("whole", found.name)
        self._saved = (
            part.step,
            dict(part.notes),
            [saved.digest for saved in part.leaves.values()],
        )
        self._warn_of_changes(found)
        self._record(
            found.name, any_ranks=not (part.rank_local or named or rank_local_leaves(target))
        )
        return rebuild(target, part.forms, found.arrays), SavedProgress(
            step=part.step,
            places=part.places,
            cuts=part.cuts,
            notes=part.notes,
            best_step=self._resumed_best(part),
        )

    def _resumed_best(self, part: Part) -> int | None:
        self._bests = [name for name in self._complete if step_of(name) == part.best_step]
        if self._bests or part.best_step is None:
            return part.best_step
        self._log.warn(
            f"the checkpoint of its best state, of step {part.best_step}, is gone. From now on, "
            "the best state since the restart is kept"
        )
        return None

    def markers(self, run_on_all_ranks: RunOnAllRanks) -> tuple[bool, bool]:
        """Returns whether the job was stopped or paused in an earlier run. Waits for all ranks.

        Each rank keeps small files on its disk, called marks, which say how a job ended and whether
        it was paused. We only care about stopped and paused jobs here. A job that has ended or
        failed is simply resumed, and its mark deleted. The result is the same on every rank.

        Raises:
            JobError: Raised on every rank if one of them can't read its disk.
        """
        done = paused = error_text = ""
        cause = None
        try:
            done = self._folders.marked("left")
            paused = self._folders.marked("paused")
        except OSError as error:
            error_text = f"{type(error).__name__}: {error}"
            cause = error

        def forget(gathered: Sequence[tuple[str, bool, str]]) -> None:
            if done and not any(how == JobStatus.STOPPED or text for how, _, text in gathered):
                self._mark("left", None)

        ranks = RankGather(self._log, run_on_all_ranks)
        # Delete the old mark in the exchange lane (`then=forget`), not in this thread. If the next
        # vote stops the job, the exchange lane writes a new mark of the same name; a belated
        # deletion by this thread would hit that mark instead.
        gathered = ranks.gather("its job markers", [done, paused, error_text], then=forget)
        ranks.check(UNREADABLE, [text for *_, text in gathered], cause)
        # When a job is stopped or paused, every rank writes a mark, but the earlier run may have
        # been killed before all of them got around to it. A mark on a single rank is enough.
        is_stopped = any(status == JobStatus.STOPPED for status, *_ in gathered)
        is_paused = any(mark for _, mark, _ in gathered) and not is_stopped
        if is_stopped:
            marks = self._folders.path / "left-*"
            self._log.warn(
                f"was stopped in an earlier run, and stays stopped. To resume it, delete `{marks}`"
            )
        elif is_paused:
            self._log.warn("was paused in an earlier run, and stays paused until it is resumed")
        return is_stopped, is_paused

    def mark_done(self, status: JobStatus) -> None:
        """Leaves a mark that the job itself has ended, rather than just the run. Doesn't wait.

        The mark is written before any checkpoint that's begun later.
        """
        self._mark("left", status)
        self._mark("paused", None)

    def mark_paused(self, paused: bool) -> None:
        """Adds or removes the mark that the job is paused. Doesn't wait.

        This takes effect before any checkpoint that's begun later is written.
        """
        self._mark("paused", "paused" if paused else None)

    def _mark(self, what: Mark, text: str | None) -> None:
        def write() -> None:
            try:
                self._folders.mark(what, text)
            except OSError as error:
                lost = f"that it is {text or 'not paused'}"
                if what == "whole":
                    lost = "which checkpoints were complete"
                self._log.warn(
                    f"a restart will not know {lost}, because that cannot be written: {error}"
                )

        self._writer.submit(write)

    def save(
        self,
        state: PyTree,
        progress: SavedProgress,
        run_on_all_ranks: RunOnAllRanks,
        *,
        unsavable_reason: str = "",
        last: bool = False,
    ) -> list[dict[str, str]] | None:
        """Starts a checkpoint. Once this returns, the state may be donated.

        Blocks until the state has been computed, the job's previous checkpoint is on disk, and all
        ranks have joined in. The new checkpoint is written by another thread, without waiting for
        it.

        Args:
            state: The job's state.
            progress: The job's progress.
            run_on_all_ranks: Used to communicate.
            unsavable_reason: Why the job couldn't resume from this state; "" if the caller knows of
                no reason.
            last: Whether this is the job's last checkpoint. In that case, nothing is written if the
                newest checkpoint already contains this state, and a state that can't be saved only
                causes a warning.

        Returns:
            The digests of the leaves, for each rank. None if `last` is set and the state can't be
            saved or the job hasn't made a step.

        Raises:
            JobError: Raised on every rank. The job couldn't resume from this state, or a disk
                failed.
        """
        leaves: dict[str, Leaf] = {}
        error_text = ""
        cause = None
        unsavable_reason = unsavable_reason or self._unsavable_reason(state)
        try:
            self._wait_for_writer()
            leaves = {} if unsavable_reason else snapshot(state)
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
            cause = error
        digests = {path: leaf.digest for path, leaf in leaves.items()}
        saved = (progress.step, dict(progress.notes), list(digests.values()))
        same = last and self._saved == saved
        mine = {
            "step": progress.step,
            "same": same,
            "error": error_text,
            "unsavable": unsavable_reason,
        }
        ranks = RankGather(self._log, run_on_all_ranks)
        # A run may be killed while it's writing the checkpoint of, say, step 100. The restart will
        # then write a checkpoint for step 100 again, which mustn't get mixed up with the remains of
        # the first attempt. To prevent that, the name of a checkpoint also contains a token that's
        # different for each attempt. It's created by rank 0 and used by all ranks.
        gathered = ranks.gather(
            "save", {**mine, "digests": digests, "token": f"{time.time_ns():016x}"}
        )
        self._finish_previous(ranks, [rank["error"] for rank in gathered], cause)
        steps = [rank["step"] for rank in gathered]
        if last and not any(steps):
            return None
        reasons = [rank["unsavable"] for rank in gathered]
        if last and any(reasons):
            self._log.warn(f"its last state is not saved: {next(filter(None, reasons))}")
            return None
        ranks.check("cannot save this state", reasons)
        if len(set(steps)) > 1:
            raise self._log.error(
                f"cannot be saved: its ranks have made different numbers of steps, {steps}, so "
                "they could not resume together. Save after the same step on every rank."
            )
        if not all(rank["same"] for rank in gathered):
            # Leaves that are identical on all ranks, bit for bit, are only written by rank 0. The
            # exceptions are leaves that the job declares as rank-local, which are written by every
            # rank even if they happen to be equal right now, because they mustn't be restored on a
            # different number of ranks.
            equal = {
                path
                for path, d in digests.items()
                if all(rank["digests"].get(path) == d for rank in gathered)
            }
            common = equal.difference(self._named)
            # If all leaves are identical on all ranks, the checkpoint can be restored on any number
            # of ranks. With a single rank, though, there's nothing to compare with, so all leaves
            # look identical. That's why we also check whether the types of any objects in the state
            # declare leaves as rank-local.
            any_ranks = len(common) == len(leaves) and not rank_local_leaves(state)
            self._begin(
                checkpoint_name(progress.step, gathered[0]["token"]),
                leaves,
                common,
                progress,
                any_ranks,
            )
            self._saved = saved
        return [rank["digests"] for rank in gathered]

    def wait_until_complete(self, run_on_all_ranks: RunOnAllRanks) -> None:
        """Waits until the newest checkpoint is complete on all ranks, then deletes old ones.

        Raises:
            JobError: Raised on every rank if a disk failed.
        """
        error_text = ""
        cause = None
        try:
            self._wait_for_writer()
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
            cause = error
        ranks = RankGather(self._log, run_on_all_ranks)
        self._finish_previous(ranks, ranks.gather_text("written", error_text), cause)
        self._folders.delete(self._superfluous())

    def _warn_of_changes(self, found: Found) -> None:
        part = found.part
        for key, value in self._environment.items():
            was = part.environment.get(key)
            if was != value and self._world.rank == 0:
                self._log.warn(
                    f"{key} is `{value}`, but was `{was}` when the checkpoint was saved, so "
                    "results may differ in the last bits from here on"
                )
        if part.ranks != self._world.size:
            began = ". Each rank begins with a copy of the state" if part.ranks == 1 else ""
            ranks = f"{self._world.size} ranks resume from a checkpoint of {part.ranks}"
            self._log.warn(f"{ranks}, so the data is sharded differently and sums differ{began}")
        self._log.note(f"resumes after step {part.step}")

    def _unsavable_reason(self, state: PyTree) -> str:
        if self._forms is None:
            return (
                "the job has not called `job.restore`, so a restart would not know what to "
                "restore. Call it before the first step"
            )
        try:
            differs = unlike(self._forms, forms_of(state))
        except TypeError as error:
            return str(error)
        return (
            f"it does not have the form of the state that the job restored: {differs}"
            if differs
            else ""
        )

    def _record(self, name: str, *, any_ranks: bool) -> None:
        """Records a checkpoint in the event file, for whoever wants to restart the run."""
        self._world.flight.checkpoint(name, job=self._log.job, any_ranks=any_ranks)

    def _begin(
        self,
        name: str,
        leaves: Mapping[str, Leaf],
        common: set[str],
        progress: SavedProgress,
        any_ranks: bool,
    ) -> None:
        held = {
            p: leaf.array for p, leaf in leaves.items() if self._world.rank == 0 or p not in common
        }
        describe = partial(
            Part,
            job=self._log.job,
            step=progress.step,
            rank=self._world.rank,
            ranks=self._world.size,
            leaves={
                p: SavedLeaf(form=leaf.form, digest=leaf.digest, common=p in common)
                for p, leaf in leaves.items()
            },
            places=progress.places,
            cuts=dict(progress.cuts),
            environment=self._environment,
            notes=dict(progress.notes),
            best_step=progress.best_step,
        )
        superfluous = self._superfluous()
        self._known.add(name)
        if progress.best_step == progress.step:
            self._bests.append(name)

        def write() -> None:
            with self._world.flight.during("checkpoint", job=self._log.job, step=progress.step):
                self._folders.part_path(name).mkdir(parents=True)
                arrays.write(self._folders.arrays_path(name), held)
                self._folders.commit(name, describe(files=self._folders.describe_files(name)))
                self._record(name, any_ranks=any_ranks)
                self._folders.delete(superfluous)

        self._writing = (name, self._writer.submit(write))

    def _wait_for_writer(self) -> None:
        if self._writing is None:
            return
        name, written = self._writing
        self._writer.wait_for(
            written,
            self._world,
            job=self._log.job,
            step=step_of(name),
            missing="the last checkpoint",
        )

    def _finish_previous(
        self, ranks: RankGather, errors: list[str], cause: Exception | None
    ) -> None:
        """Counts the previous checkpoint as complete, or raises if a rank failed to write it."""
        writing = self._writing
        self._writing = None
        ranks.check("could not be saved", errors, cause)
        if writing is not None:
            if not self._complete:
                self._mark("whole", writing[0])
            self._complete.append(writing[0])

    def _superfluous(self) -> set[str]:
        """Returns the checkpoints that can be deleted, including damaged ones.

        Anything older than the newest complete checkpoint can go, except for the `keep` newest
        complete checkpoints and the one with the best state so far. The latter stays until a
        checkpoint with a better state is complete on all ranks.
        """
        kept = self._complete[-self._keep :]
        best = [name for name in self._bests if name in self._complete][-1:]
        if not kept:
            return set()
        return {name for name in self._known if name not in [*kept, *best] and name < kept[-1]}
