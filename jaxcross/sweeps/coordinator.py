"""`Coordinator`: rank 0's side of a sweep.

Only rank 0 asks the search for trials, tells it their results, prunes trials, and writes down
everything that must survive a restart. The other ranks receive its decisions through the jobs that
it submits and through collective calls of these jobs.

**Restarts.** The state of a search isn't saved. Instead, a restart makes a fresh search and replays
into it everything that the log holds, in the order of the schedule. If the search repeats its
answers, it ends up in the state that it had before the restart. If it proposes other parameters
than before, we warn and replay again with the parameters from the log. If the pruner would now let
a trial continue that it pruned before, the sweep ends with an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import final

from jaxcross.errors import JobError
from jaxcross.sweeps.log import TrialLog, TrialRecord
from jaxcross.sweeps.schedule import Decision, Parameters, Schedule, Search, Started, Status
from jaxcross.sweeps.search import name_of

_log = logging.getLogger("jaxcross")
_LOOK_S = 0.1  # how often a waiting trial checks whether the run was stopped
Make = Callable[[Mapping[int, Parameters]], Search]
Submit = Callable[[Started, str], None]


class _DiffersError(Exception):
    """A search doesn't repeat what it proposed before a restart."""


@final
class Coordinator:
    """Called by the threads of all trials on rank 0.

    The constructor replays everything that earlier starts wrote down, which brings the search into
    the state that it had then.

    Args:
        make: Makes a fresh search that hasn't been asked anything. The search must give the trials
            with the numbers in the mapping the parameters in the mapping.
        log: The log of the trials.
        concurrent: Number of trials at a time.

    Attributes:
        search: The search in use.
        submit: Starts a trial's job on all ranks; each run replaces it. May raise JobError if the
            run has ended.

    Raises:
        Exception: Whatever the search raises for its first trials.
        JobError: The pruner doesn't repeat what it decided before a restart.
    """

    def __init__(self, make: Make, log: TrialLog, *, concurrent: int) -> None:
        self._log, self._concurrent = log, concurrent
        self._changed = threading.Condition(threading.RLock())
        self.submit: Submit = lambda *_: None
        self.search = make({})
        try:
            self._schedule = self._repeated(strict=True)
        except _DiffersError as error:
            _log.warning(
                "The sweep goes on, but not as if it had never stopped: %s. Give the sampler a "
                "seed, as `optuna.samplers.TPESampler(seed=0)`, and keep the version of Optuna.",
                error,
            )
            self.search = make({number: trial.parameters for number, trial in log.trials.items()})
            self._schedule = self._repeated(strict=False)
        self._check_pruned()

    def _repeated(self, *, strict: bool) -> Schedule:
        """Returns a schedule into which everything in the log has been replayed."""
        schedule = Schedule(
            self.search, concurrent=self._concurrent, known_until=self._log.known_until
        )
        new = self._taken(schedule, schedule.begin(), strict=strict)
        while (decisions := schedule.repeat()) is not None:
            new += self._taken(schedule, decisions, strict=strict)
        while decisions := schedule.settle():
            new += self._taken(schedule, decisions, strict=strict)
        if schedule.error is not None:
            raise schedule.error
        for decision in new:  # only now: nothing may be written before the replay has succeeded
            self._write(decision)
        return schedule

    def _taken(
        self, schedule: Schedule, decisions: list[Decision], *, strict: bool
    ) -> list[Decision]:
        """Reports everything that the log holds of the trials that begin. Returns the decisions
        that aren't in the log yet.
        """
        new: list[Decision] = []
        for decision in decisions:
            known = self._log.trials.get(decision.number)
            if known is None or not isinstance(decision, Started):
                new.append(decision)
                continue
            if strict and known.parameters != decision.parameters:
                was = f"trial {known.number} was asked for with {known.parameters}"
                raise _DiffersError(f"{was}, and is now with {decision.parameters}")
            for step, values in sorted(known.values.items()) if self.search.prunes else ():
                new += schedule.report(known.number, step, values[0])
            if known.returned or known.status in ("finished", "failed", "stopped"):
                status = "finished" if known.returned else known.status or "finished"
                new += schedule.end(known.number, known.step, status, known.value)
        return new

    def _check_pruned(self) -> None:
        """Checks that the pruner repeats what it decided before a restart; otherwise JobError."""
        for trial in self._log.trials.values():
            if (
                trial.status == "pruned"
                and self._schedule.decided(trial.number, trial.step) is not True
            ):
                raise JobError(
                    f"Trial `{trial.name}` was pruned at step {trial.step} before the restart, and "
                    "the pruner would let it go on now. Start with the pruner and the version of "
                    "Optuna that were in use, or in another folder."
                )

    @property
    def error(self) -> Exception | None:
        """The error of the search or the disk, if any. No trial begins after an error."""
        return self._schedule.error or self._log.error

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials that have begun, by number."""
        with self._changed:
            return [trial for _, trial in sorted(self._log.trials.items())]

    @property
    def running(self) -> list[TrialRecord]:
        """The trials to run: those that have begun and have no final status in the log. That
        includes trials whose function has returned, but whose last state isn't saved yet.
        """
        with self._changed:
            return [
                trial
                for trial in self.trials
                if trial.status is None and self._schedule.has_begun(trial.number)
            ]

    def is_due(self, number: int) -> bool:
        """Whether a trial's fate is known: it may run, or it is over.

        After a restart it may be unknown for two reasons. The replay may not have asked for the
        trial yet. Or the trial logged a value before a stop, and the search hasn't decided yet
        whether to prune the trial by it. In the second case we must wait for that decision, because
        the state that was saved at the stop covers the value, so the trial won't log it again.
        """
        with self._changed:
            return self._schedule.has_begun(number) and not self._schedule.waits(number)

    def may_begin(self, number: int, stopping: Callable[[], bool]) -> bool:
        """Returns whether a trial is to run. Waits until it is due or the run is stopping."""
        with self._changed:
            while not self.is_due(number) and self._schedule.running and not stopping():
                self._changed.wait(_LOOK_S)
            return number in [trial.number for trial in self.running]

    def is_pruned(self, number: int) -> bool:
        """Whether the search has pruned the trial."""
        with self._changed:
            return self._log.trials[number].status == "pruned"

    def advanced(self, number: int, step: int) -> None:
        """Notes how many steps a trial has made. Calls the search with reports of other trials that
        were only waiting for this one.
        """
        with self._changed:
            self._follow(lambda: self._schedule.advance(number, step))

    def value(self, number: int, step: int, nth: int, value: float) -> None:
        """Writes down the `nth` value that a trial logged at a step. Warns if that was another
        value before a restart.

        Raises:
            JobError: The disk failed.
        """
        with self._changed:
            known = self._log.trials[number].values.get(step, [])[nth : nth + 1]
            if known and known[0] != value and not (known[0] != known[0] and value != value):
                text = (
                    "Trial `%s` logged %r after step %d, and %r before a restart, which counts: it "
                    "does not repeat."
                )
                _log.warning(text, self._log.trials[number].name, value, step, known[0])
            self._log.value(number, step, nth, value)
            self._check_disk()

    def sync(self) -> None:
        """Waits until all values are on disk, so that a checkpoint may cover them.

        Raises:
            JobError: The disk failed.
        """
        with self._changed:
            self._log.sync()
            self._check_disk()

    def _check_disk(self) -> None:
        if self._log.error is not None:  # a checkpoint must not cover values that aren't on disk
            raise JobError(f"What trials logged cannot be written: {self._log.error}.")

    def give_up(self, error: Exception) -> bool:
        """Ends the sweep with this error and returns True, unless a trial has logged the metric."""
        with self._changed:
            if any(trial.values for trial in self._log.trials.values()):
                return False
            self._schedule.error = self._schedule.error or error
            self._changed.notify_all()
            return True

    def last_value(self, number: int) -> float | None:
        """Returns the metric that a trial logged last, if any."""
        with self._changed:
            return self._log.trials[number].value

    def prunes(self, number: int, step: int, stopping: Callable[[], bool]) -> bool:
        """Returns whether a trial is pruned at this step, whose value must be written down.

        If a step was logged several times, the pruner gets the first value.
        Waits until the other trials have come as far, or the run is stopping.
        """
        with self._changed:
            value = self._log.trials[number].values[step][0]
            self._follow(lambda: self._schedule.report(number, step, value))
            while self._schedule.waits(number) and not stopping():
                self._changed.wait(_LOOK_S)
            return bool(self._schedule.decided(number, step))

    def came_to_end(self, number: int, step: int, value: float | None) -> None:
        """Notes that a trial's function has returned on all ranks, which frees its place.

        Its state isn't saved yet.
        """
        with self._changed:
            self._log.returned(number, step)
            self._follow(lambda: self._schedule.end(number, step, "finished", value))

    def over(
        self, number: int, step: int, status: Status, *, digest: str = "", error: str = ""
    ) -> None:
        """Notes that a trial's job has ended on all ranks and that its results are saved."""
        with self._changed:
            value = self._log.trials[number].value
            self._log.end(number, status, step, value, digest=digest, error=error)
            if status in ("failed", "stopped"):
                self._follow(lambda: self._schedule.end(number, step, status, value))

    def _follow(self, change: Callable[[], list[Decision]]) -> None:
        """Carries out the decisions that a change leads to. Call with the lock held."""
        decisions = change()
        for decision in decisions:
            self._write(decision)
        for decision in decisions:
            if isinstance(decision, Started) and self._log.error is None:
                try:
                    self.submit(decision, self._log.trials[decision.number].name)
                except JobError:
                    _log.debug("trial %d begins in the next run", decision.number)
        self._changed.notify_all()

    def _write(self, decision: Decision) -> None:
        if isinstance(decision, Started):
            if decision.number not in self._log.trials:
                name = name_of(decision.number, decision.parameters)
                self._log.begin(name, decision)
        else:
            self._log.pruned(decision)

    def close(self) -> None:
        """Releases the folder. What trials do after this is not written."""
        with self._changed:
            self._log.close()
