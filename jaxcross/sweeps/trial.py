"""Each rank's side of a trial: the function that the trial's job runs, and the clean-up after it.

A trial must end at the same step on all ranks, but only rank 0 has the sweep's log and decides
whether to prune the trial, i.e. end it early. For each of these decisions, a collective call sends
rank 0's answer to all ranks (`TrialObserver.answer`).

The other concern is restarts. A restart resumes each trial from its checkpoint and continues the
sweep's log, but the two are written independently. Steps before the checkpoint won't be repeated,
so the log must contain their values of the metric before the checkpoint is written
(`TrialObserver.saving`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, final

import jax

from jaxcross._endings import JobStatus
from jaxcross._pytree import PyTree, snapshot
from jaxcross._schema import unspelt
from jaxcross.checkpoint import Folders, folder_name
from jaxcross.errors import JobError, quoted
from jaxcross.jobs import JobContext, JobDone, JobEngine, current_engine
from jaxcross.report import flatten_metrics
from jaxcross.sweeps.coordinator import Coordinator
from jaxcross.sweeps.sweep_settings import SweepSettings
from jaxcross.world import World, gather

_log = logging.getLogger("jaxcross")


class TrialPruned(BaseException):
    """Raised in a pruned trial's training function to end it on all ranks at the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished trial: its name, its metric, and a digest of its state on all ranks."""

    name: str
    value: float
    digest: str


@dataclass(slots=True, kw_only=True)
class _Shared:
    """The state shared by all trials on this rank.

    Once the trials' jobs have ended, `finished` is the same on every rank.
    """

    finished: dict[int, Finished] = field(default_factory=dict)
    pruned: dict[int, str] = field(default_factory=dict)
    cleaned: set[str] = field(default_factory=set)
    jobs: dict[int, JobContext] = field(default_factory=dict)  # jobs whose state we keep in memory
    metric_logged: bool = False
    closed: dict[int, JobDone] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


@final
class Trials:
    """The trials of one sweep on one rank, across all runs. Their jobs call `run`.

    Args:
        train: The user's training function.
        settings: The settings of the sweep.
        world: All ranks.
        coordinator: The coordinator on rank 0; None on other ranks.

    Attributes:
        prunes: Whether the search may end trials early. Identical on all ranks.
    """

    def __init__(
        self,
        train: Callable[..., Any],
        settings: SweepSettings,
        *,
        world: World,
        coordinator: Coordinator | None,
    ) -> None:
        self._train = train
        self._world = world
        self.settings = settings
        self.coordinator = coordinator
        self.prunes = False
        self._shared = _Shared()

    def take_over(
        self,
        finished: Mapping[int, Finished],
        pruned: Mapping[int, str],
        begins: Sequence[int],
        prunes: bool,
    ) -> None:
        """Records which trials have ended, and which trials the next run begins with."""
        self.prunes = prunes
        with self._shared.lock:
            self._shared.finished |= finished
            self._shared.pruned |= pruned
            self._shared.closed |= {number: JobDone() for number in begins}

    def run(
        self, job: JobContext, number: int, params: Mapping[str, Any], after: int | None
    ) -> PyTree:
        """Runs one trial. This is the function of the trial's job, so it's called on every rank."""
        shared = self._shared
        with shared.lock:
            before = None if after is None else shared.closed.get(after)
            shared.closed.setdefault(number, JobDone())
            shared.jobs[number] = job
        engine = current_engine()
        assert engine is not None
        observer = TrialObserver(self, job, engine, number)
        engine.metrics.observer = observer
        engine.describe(params, "" if self.coordinator is None else self.coordinator.group)
        if before is not None:
            # This trial takes the place of another trial, which may not have ended on this rank
            # yet. Wait for it to free its memory here, since there may not be enough for both.
            with job.measure("host", "waits for a place"):
                before.wait()
        begins = observer.answer("start of the trial", lambda: self._begins(engine, number))
        if begins != "begins":  # a restart may submit trials that turn out to have ended
            observer.pruned = begins == "pruned"
            return None
        try:
            state = self._train(job, **params)
            if state is not None:
                job.state = state
            engine.finish_step()  # an evaluation that is due may log the metric
        except TrialPruned:
            engine.latest.adopt_results()
            observer.pruned = True
            return None
        return observer.finish(state)

    def _begins(self, engine: JobEngine, number: int) -> str:
        assert self.coordinator is not None
        if not self.coordinator.is_due(number):
            engine.excuse_start()  # others mustn't wait for it, because it waits for them
        if self.coordinator.may_begin(number, lambda: engine.stopping):
            return "begins"
        return "pruned" if self.coordinator.is_pruned(number) else "over"

    def note_metric(self) -> None:
        """Records that a trial has logged the metric."""
        self._shared.metric_logged = True

    def give_up(self, observer: TrialObserver, error: JobError) -> None:
        """Ends the sweep, including its other trials, unless some trial has logged the metric.

        This is a no-op on ranks other than 0. Doesn't wait.
        """
        if (
            self.coordinator is None
            or self._shared.metric_logged
            or not self.coordinator.give_up(error)
        ):
            return
        with self._shared.lock:
            others = [job for job in self._shared.jobs.values() if job is not observer.job]
        for job in others:
            job.stop()

    def best(self) -> int | None:
        """Returns the best finished trial's number. In a tie, the lowest number wins."""
        ranked = self._ranked(1)
        return ranked[0] if ranked else None

    def state_of(self, number: int) -> PyTree:
        """Returns the final state of a trial, or None if this process doesn't have it."""
        job = self._shared.jobs.get(number)
        return None if job is None else job.state

    def _ranked(self, count: int) -> list[int]:
        """Returns the numbers of the `count` best finished trials, best first."""
        sign = -1 if self.settings.mode == "max" else 1
        finished = [
            (number, each.value)
            for number, each in self._shared.finished.items()
            if each.value == each.value
        ]
        return [
            number
            for number, _ in nsmallest(count, finished, key=lambda pair: (sign * pair[1], pair[0]))
        ]

    def over(self, observer: TrialObserver, *, asked: bool) -> None:
        """Records that a trial's job has ended, and frees states that are no longer needed.

        Called once on every rank.
        """
        job = observer.job
        number = observer.number
        shared = self._shared
        with shared.lock:
            failed = job.status in (JobStatus.FAILED, JobStatus.EJECTED, JobStatus.LEFT_OUT)
            stopped = job.status == JobStatus.STOPPED
            finished = None if failed or stopped else observer.finished
            if finished is not None:
                shared.finished[number] = finished
            elif observer.pruned and not failed and not stopped:
                shared.pruned[number] = job.name  # no more checkpoints are written after this
            if self.coordinator is not None:
                if failed:
                    self.coordinator.over(number, job.step, "failed", error=str(job.error))
                elif finished is not None:
                    self.coordinator.over(number, job.step, "finished", digest=finished.digest)
                elif asked:
                    self.coordinator.over(number, job.step, "stopped")
            if not stopped or asked:  # otherwise the whole run stops, and will save this state
                best = self.best()
                for other, each in [*shared.jobs.items()]:
                    if other != best and (
                        each is job or (each.done.is_set() and each.status != JobStatus.STOPPED)
                    ):
                        each.state = None
                        del shared.jobs[other]
            if not failed and not stopped:
                self.clean()
            shared.closed[number].set()

    def clean(self) -> None:
        """Deletes this rank's checkpoints of trials that we don't keep. Waits for the disk."""
        folder = self.settings.checkpoint_folder
        keep = self.settings.keep
        shared = self._shared
        if folder is None or keep is None:
            return
        with shared.lock:
            kept = set(self._ranked(keep))
            names = {each.name for number, each in shared.finished.items() if number not in kept}
            for name in names.union(shared.pruned.values()) - shared.cleaned:
                folders = Folders(
                    folder / folder_name(name), rank=self._world.rank, ranks=self._world.size
                )
                folders.delete(folders.names())
                if (
                    not folders.names()
                ):  # otherwise another rank's part is still there, or it failed: try later
                    shared.cleaned.add(name)


@final
class TrialObserver:
    """Follows one trial's job on one rank, and tells the sweep about its progress and metric.

    The job's thread calls these methods, at the same step on every rank, so they're free to
    communicate. An error raised by `logged` or `saving` ends the job just like an error raised by
    the user's training function.

    Attributes:
        job: The job.
        number: The trial's number.
        finished: The result; None until the function has returned on all ranks.
        pruned: Whether the trial was pruned.
        metric: The name of the metric that trials are compared by.
    """

    def __init__(self, trials: Trials, job: JobContext, engine: JobEngine, number: int) -> None:
        self._trials = trials
        self.job = job
        self._engine = engine
        self.number = number
        self.finished: Finished | None = None
        self.pruned = False
        self.metric = trials.settings.metric
        self._coordinator = trials.coordinator
        self._seen = 0  # number of the job's history entries that are in the log
        self._times: Counter[int] = Counter()  # number of logged values by step
        self._saved = -1  # the step of the latest checkpoint in this process
        self._has_metric = False
        self._late: int | None = None  # a step that was saved before its metric was logged

    def answer(self, label: str, ask: Callable[[], str]) -> str:
        """Calls `ask` on rank 0, and returns its result on all ranks. Waits for all ranks."""
        text = ""
        if self._coordinator is not None:
            with self.job.measure("host", label):
                text = ask()
        return self.job.run_on_all_ranks(label, lambda control: control.allgather_text(text))[0]

    def restored(self, entries: int) -> None:
        """Called when metrics of earlier runs have been added to the job's history.

        A negative number of `entries` means that they've been removed again.
        """
        self._seen += entries  # they're in the log already, from the earlier run
        known = self.job.history[: self._seen]
        self._times = Counter(
            step for step, metrics in known if self.metric in dict(flatten_metrics(metrics))
        )

    def stepped(self, step: int) -> None:
        """Called when all ranks have committed a step of the job. Doesn't wait."""
        if self._coordinator is not None:
            self._coordinator.advanced(self.number, step)

    def logged(self, step: int, metrics: PyTree) -> None:
        """Called with the metrics that the job logs, before they're read back. May wait."""
        if self.pruned:
            return  # from an evaluation at the job's end, which is too late
        # Only look at the names of the metrics. Their values may not have been computed yet, and
        # waiting for them in every step would slow down training.
        names = dict(flatten_metrics(jax.tree.map(lambda _: 0.0, metrics)))
        if self.metric not in names:
            self._check_evaluation(list(names))
            return
        self._has_metric = True
        self._trials.note_metric()
        self._check_order(step)
        if not self._trials.prunes:
            return
        self._engine.read_back()
        self._write_values()
        coordinator = self._coordinator

        def ask() -> str:
            assert coordinator is not None
            return str(int(coordinator.prunes(self.number, step, lambda: self._engine.stopping)))

        if self.answer("whether to prune", ask) == "1":
            raise TrialPruned

    def _check_evaluation(self, names: list[str]) -> None:
        """Checks that the evaluation that should provide the metric returns it the first time.

        The decision is the same on every rank.

        Raises:
            JobError: The evaluation has returned something else. This ends the whole sweep unless
                some trial has logged the metric.
        """
        evaluation = self.metric.partition("/")[0]
        returned = {name.partition("/")[0] for name in names} == {evaluation}
        earlier = self._has_metric or any(
            self.metric in dict(flatten_metrics(values)) for _, values in self.job.history
        )
        if returned and not earlier and self._engine.evaluations.provide(self.metric):
            error = JobError(
                f"Trial `{self.job.name}` is to be compared by `{self.metric}`, but its evaluation "
                f"`{evaluation}` after step {self.job.step} has not returned that metric. It "
                f"returned: {quoted(names) or 'nothing'}. Return `{self.metric}`, or compare the "
                "trials by another `metric`."
            )
            self._trials.give_up(self, error)
            raise error

    def _check_order(self, step: int) -> None:
        """Checks that the metric of a step is logged before the state of that step is saved.

        If it's the other way round, and the process is killed in between, the restarted trial
        carries on after that step and never logs the metric, so the kill would change the outcome
        of the sweep. After a trial's last step, the order doesn't matter. Since we can't know which
        step is the last, we don't raise the error until the trial logs the metric again, at a later
        step. The decision is the same on every rank.

        Raises:
            JobError: At an earlier step, the metric was logged after the state had been saved.
        """
        if self._late is not None and step > self._late:
            raise JobError(
                f"Trial `{self.job.name}` logged `{self.metric}` of step {self._late} after it had "
                "saved the state of that step, so a restart between the two would lose the value. "
                "Call `job.log` before `job.save`."
            )
        if step == self._saved:
            self._late = step

    def saving(self, step: int) -> None:
        """Called before a checkpoint begins, after all logged metrics have been read back."""
        self._saved = step
        self._write_values()
        if self._coordinator is not None:
            self._coordinator.sync()

    def _write_values(self) -> None:
        """Adds values of the metric that have been read back since the last call to the log."""
        new = self.job.history[self._seen :]
        self._seen += len(new)
        if self._coordinator is None:
            return
        for step, metrics in new:
            value = unspelt(dict(flatten_metrics(metrics)).get(self.metric))
            if value is None:
                continue
            if not isinstance(value, bool | int | float):
                raise JobError(
                    f"Trial `{self.job.name}` logged {value!r} as `{self.metric}`, which must be a "
                    "number."
                )
            self._coordinator.value(self.number, step, self._times[step], float(value))
            self._times[step] += 1

    def finish(self, state: PyTree) -> PyTree:
        """Records that the function has returned. Waits for all ranks and for the state."""
        job = self.job
        coordinator = self._coordinator
        self._engine.read_back()
        self._write_values()
        value = None if coordinator is None else coordinator.last_value(self.number)
        mine = (value, _digest(job.state))
        everyone = job.run_on_all_ranks("end of the trial", lambda control: gather(control, mine))
        value = everyone[0][0]
        if value is None:
            names = sorted(
                {name for _, metrics in job.history for name, _ in flatten_metrics(metrics)}
            )
            error = JobError(
                f"Trial `{job.name}` has ended but never logged `{self.metric}`, by which trials "
                f"are compared. It logged: {quoted(names) or 'nothing'}. Call "
                f"`job.log({{{self.metric!r}: ...}})`, on rank 0 at least."
            )
            self._trials.give_up(self, error)
            raise error
        digests = [each for _, each in everyone]
        digest = (
            digests[0]
            if len(set(digests)) == 1
            else hashlib.sha256("".join(digests).encode()).hexdigest()
        )
        self.finished = Finished(name=job.name, value=value, digest=digest)
        if coordinator is not None:
            coordinator.trial_ended(self.number, job.step, value)
        return state

    def ended(self, *, asked: bool) -> bool:
        """Called once the job has ended on all ranks and its results are final.

        Args:
            asked: Whether the user has stopped this particular job.

        Returns:
            Whether the run should save the job's state, because the trial will continue after a
            restart.
        """
        stopped = self.job.status == JobStatus.STOPPED
        # The run was stopped, and is about to save this job's state. A restart will resume from
        # there without repeating the steps since the last `job.save`, so any values logged in these
        # steps have to go into the sweep's log now.
        if stopped:
            try:
                self._write_values()
            except JobError as error:  # don't raise, because saving is collective
                _log.warning(
                    "Values of trial `%s` are missing from the sweep: %s", self.job.name, error
                )
        self._trials.over(self, asked=asked)
        return stopped and not asked


def _digest(state: PyTree) -> str:
    """Returns a digest of a state, or "" if there's no state or a leaf isn't numeric."""
    try:
        leaves = snapshot(state)
    except TypeError:
        return ""
    content = hashlib.sha256()
    for path, leaf in sorted(leaves.items()):
        content.update(f"{path} {leaf.digest}\n".encode())
    return content.hexdigest() if leaves else ""
