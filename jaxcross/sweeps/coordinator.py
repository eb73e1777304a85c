"""The `Coordinator` class: rank 0's side of a sweep.

**One rank decides.** All ranks must train the same trials with the same parameters. If every rank
had its own search, they'd all have to give the same answers all the time. Instead, there's a single
search on rank 0, which asks it for new trials, reports their results, prunes trials, and logs
whatever a restart needs. The other ranks learn about new trials when rank 0 submits them as jobs,
and about pruning through a collective call in the trial's own job.

**Restarts.** Optuna's samplers and pruners have internal state, which we don't save. Instead, we
log everything that the search has proposed and received, and a restart replays this log, in the
original order, into a new search. If the search is deterministic, this puts it back into the state
it was in. If it isn't, e.g. because the sampler has no seed, there are two ways in which the replay
may diverge. When the search proposes different parameters for a trial, we log a warning and replay
the log into yet another search, this time dictating the parameters. When the pruner would now spare
a trial that it pruned before, the sweep ends with an error.
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
_LOOK_S = 0.1  # how often a waiting trial checks whether the run has been stopped
Make = Callable[[Mapping[int, Parameters]], Search]
Submit = Callable[[Started, str], None]


class _DiffersError(Exception):
    """A search proposes different parameters than before a restart."""


@final
class Coordinator:
    """Makes the decisions about all trials of a sweep. Called by the trials' threads on rank 0.

    The constructor replays the log of earlier starts to restore the search to its previous state.

    Args:
        make: Creates a new search. Takes a dict of parameters by trial number, which the search
            must propose as they are for these trials.
        log: The log of the trials.
        concurrent: How many trials run at the same time.
        group: A name for the sweep, which stays the same in restarts and is unique to this sweep.

    Attributes:
        group: See above.
        search: The search in use.
        submit: A function that starts a trial's job on all ranks. Each of the sweep's runs sets its
            own. It may raise a JobError if the run has ended.

    Raises:
        Exception: Any error that the search raises for the first trials.
        JobError: The pruner decides differently than before a restart.
    """

    def __init__(self, make: Make, log: TrialLog, *, concurrent: int, group: str = "") -> None:
        self._log = log
        self.group = group
        self._concurrent = concurrent
        self._changed = threading.Condition(threading.RLock())
        self.submit: Submit = lambda *_: None
        self.search = make({})
        try:
            self._schedule = self._replayed_schedule(strict=True)
        except _DiffersError as error:
            _log.warning(
                "The sweep continues, but not as it would have without the restart: %s. Give the "
                "sampler a seed, as in `optuna.samplers.TPESampler(seed=0)`, and do not change the "
                "version of Optuna.",
                error,
            )
            self.search = make({number: trial.parameters for number, trial in log.trials.items()})
            self._schedule = self._replayed_schedule(strict=False)
        self._check_pruned()

    def _replayed_schedule(self, *, strict: bool) -> Schedule:
        schedule = Schedule(
            self.search, concurrent=self._concurrent, known_until=self._log.known_until
        )
        # First, go through everything that the search was told before the restart (reports and ends
        # of trials), event by event. Any event may cause another trial to begin; in that case,
        # report what the log contains about that trial before moving on to the next event.
        new = self._replay_trials(schedule, schedule.begin(), strict=strict)
        while (decisions := schedule.repeat()) is not None:
            new += self._replay_trials(schedule, decisions, strict=strict)
        # Then pass on the rest of the log: events that hadn't reached the search by the time the
        # sweep was stopped, because they were waiting for other trials.
        while decisions := schedule.settle():
            new += self._replay_trials(schedule, decisions, strict=strict)
        if schedule.error is not None:
            raise schedule.error
        for decision in new:  # write nothing before the replay has succeeded
            self._write(decision)
        return schedule

    def _replay_trials(
        self, schedule: Schedule, decisions: list[Decision], *, strict: bool
    ) -> list[Decision]:
        """Replays what the log contains about the trials that begin by these decisions.

        Returns:
            The decisions that aren't in the log yet.
        """
        new: list[Decision] = []
        for decision in decisions:
            known = self._log.trials.get(decision.number)
            if known is None or not isinstance(decision, Started):
                new.append(decision)
                continue
            if strict and known.parameters != decision.parameters:
                was = f"trial {known.number} had the parameters {known.parameters}"
                raise _DiffersError(f"{was}, and now it would have {decision.parameters}")
            # Only a pruner needs values before the end of a trial.
            for step, values in sorted(known.values.items()) if self.search.prunes else ():
                new += schedule.report(known.number, step, values[0])
            # Don't replay the end of trials that were pruned. The pruner gets the same values as
            # before the restart, so it should come to the same conclusion, which is what
            # `_check_pruned` checks afterwards.
            if known.returned or known.status in ("finished", "failed", "stopped"):
                status = "finished" if known.returned else known.status or "finished"
                new += schedule.end(known.number, known.step, status, known.value)
        return new

    def _check_pruned(self) -> None:
        """Raises a JobError if the pruner decides differently than before a restart."""
        for trial in self._log.trials.values():
            if (
                trial.status == "pruned"
                and self._schedule.decided(trial.number, trial.step) is not True
            ):
                raise JobError(
                    f"Trial `{trial.name}` was pruned at step {trial.step} before the restart, and "
                    "the pruner would let it continue now. Use the same pruner and the same "
                    "version of Optuna as before, or start a new sweep in another folder."
                )

    @property
    def error(self) -> Exception | None:
        """The error raised by the search or the disk, if any. No trials begin after an error."""
        return self._schedule.error or self._log.error

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials that have begun, by number."""
        with self._changed:
            return [trial for _, trial in sorted(self._log.trials.items())]

    @property
    def running(self) -> list[TrialRecord]:
        """The trials that have to run: those that have begun and have no final status in the log.

        Even if a trial's function has returned, the trial counts as running until its last state
        has been saved. If the sweep is killed before that, the trial runs again after a restart.
        """
        with self._changed:
            return [
                trial
                for trial in self.trials
                if trial.status is None and self._schedule.has_begun(trial.number)
            ]

    def is_due(self, number: int) -> bool:
        """Whether it's already known if the trial should run or has ended.

        After a restart, there are two reasons why it might not be. The search may not have been
        asked for this trial yet, because it's waiting for the results of others. Or the trial may
        have logged a value just before the sweep was stopped, and the pruner hasn't decided on that
        yet. In the latter case, we have to hold the trial until the decision is made: since its
        checkpoint was written after that value, the trial won't log it again, and would never find
        out that it's been pruned.
        """
        with self._changed:
            return self._schedule.has_begun(number) and not self._schedule.waits(number)

    def may_begin(self, number: int, stopping: Callable[[], bool]) -> bool:
        """Returns whether a trial should run. Waits until that's known or the run is stopping."""
        with self._changed:
            while not self.is_due(number) and self._schedule.running and not stopping():
                self._changed.wait(_LOOK_S)
            return number in [trial.number for trial in self.running]

    def is_pruned(self, number: int) -> bool:
        """Whether the search has pruned the trial."""
        with self._changed:
            return self._log.trials[number].status == "pruned"

    def advanced(self, number: int, step: int) -> None:
        """Records how many steps a trial has made.

        This trial's progress may clear the way for other trials' results. We hold back each result
        until no trial can report an earlier one any more, so that the search always receives them
        in the same order, no matter which trial is faster.
        """
        with self._changed:
            self._follow(lambda: self._schedule.advance(number, step))

    def value(self, number: int, step: int, nth: int, value: float) -> None:
        """Writes the `nth` value that a trial has logged at a step to the log.

        After a restart, a trial repeats the steps since its last checkpoint, logging their values
        again. These should be the same as before. If they aren't, we log a warning and stick with
        the earlier values, which decisions may already have been based on.

        Raises:
            JobError: The disk failed.
        """
        with self._changed:
            known = self._log.trials[number].values.get(step, [])[nth : nth + 1]
            # NaN is the only value that isn't equal to itself. Treat NaNs as equal.
            if known and known[0] != value and not (known[0] != known[0] and value != value):
                text = (
                    "Trial `%s` logged %r after step %d, but %r before a restart, so its training "
                    "is not repeatable. The earlier value is used. Look for randomness without a "
                    "fixed seed."
                )
                _log.warning(text, self._log.trials[number].name, value, step, known[0])
            self._log.value(number, step, nth, value)
            self._check_disk()

    def sync(self) -> None:
        """Waits until all values are on disk, so that a later checkpoint may be written.

        Raises:
            JobError: The disk failed.
        """
        with self._changed:
            self._log.sync()
            self._check_disk()

    def _check_disk(self) -> None:
        if self._log.error is not None:  # a checkpoint after these values would lose them
            raise JobError(
                f"The values that trials logged cannot be written to the folder of the sweep: "
                f"{self._log.error}. Start the same command again once the disk works."
            )

    def give_up(self, error: Exception) -> bool:
        """Ends the sweep with an error and returns True, unless a trial has logged the metric."""
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
        """Returns whether to prune the trial at this step. Its value must already be in the log.

        The pruner compares trials at the same step, so this waits until the others have made as
        many steps or the run is stopping. If the trial has logged several values at this step, the
        pruner gets the first.
        """
        with self._changed:
            value = self._log.trials[number].values[step][0]
            self._follow(lambda: self._schedule.report(number, step, value))
            while self._schedule.waits(number) and not stopping():
                self._changed.wait(_LOOK_S)
            return bool(self._schedule.decided(number, step))

    def trial_ended(self, number: int, step: int, value: float | None) -> None:
        """Records that a trial's function has returned on all ranks, so another trial may begin.

        The trial's state hasn't been saved yet.
        """
        with self._changed:
            self._log.returned(number, step)
            self._follow(lambda: self._schedule.end(number, step, "finished", value))

    def over(
        self, number: int, step: int, status: Status, *, digest: str = "", error: str = ""
    ) -> None:
        """Records that a trial's job has ended on all ranks and its results have been saved."""
        with self._changed:
            value = self._log.trials[number].value
            self._log.end(number, status, step, value, digest=digest, error=error)
            # The schedule decides when trials begin, so it also needs to know when they end. Only
            # tell it about trials that failed or were stopped here. Those that finished have been
            # reported by `trial_ended`, and pruning was the schedule's own decision.
            if status in ("failed", "stopped"):
                self._follow(lambda: self._schedule.end(number, step, status, value))

    def _follow(self, change: Callable[[], list[Decision]]) -> None:
        """Makes a change and acts on the resulting decisions. Call this with the lock held."""
        # Write all decisions (which trials begin or are pruned) to the log before acting on any of
        # them. That way, if the process is killed in between, a restart will find them in the log
        # and act on them.
        decisions = change()
        for decision in decisions:
            self._write(decision)
        for decision in decisions:
            if isinstance(decision, Started) and self._log.error is None:
                try:
                    self.submit(decision, self._log.trials[decision.number].name)
                except JobError:
                    # The run has ended in the meantime. The trial is in the log, so the next run
                    # will begin with it.
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
        """Releases the folder. Nothing is written after this."""
        with self._changed:
            self._log.close()
