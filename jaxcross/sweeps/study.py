"""The `StudySearch` class: asks Optuna for trials on rank 0, in the order of the schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from jaxcross.sweeps.schedule import Parameters, Status
from jaxcross.sweeps.search import AnySearch, Optuna, checked, name_of, pruner_of

MARK = "jaxcross_sweep"  # an attribute marking trials that a sweep has added to the user's study
# The name of our Optuna study. It has to survive a restart, because the Hyperband pruner hashes
# this name and the trial's number to decide which bracket the trial belongs to. Without a name,
# Optuna would make one up at random, and a restart would prune different trials.
_NAME = "sweep"


@final
class StudySearch:
    """Asks an in-memory study that uses the user's sampler and pruner. Implements `Search`.

    The user's study isn't touched during the sweep. At the end, `add_to` adds the trials to it.

    Args:
        search: The user's search. If it has a study, the sampler takes that study's trials into
            account.
        known: The parameters of all trials, or empty to let the study propose them.
        mode: Whether larger (`max`) or smaller (`min`) values of the metric are better.
        trials: The number of trials.
        sweep: Identifies the sweep. This lets us recognise trials in the user's study that were
            added by this very sweep, e.g. before a restart.
        fixed: The parameters that trials had before a restart, by the trial's number.
        check: Called with the name and parameters of each trial. Must raise an error if the trial
            can't run.
    """

    ordered = True

    def __init__(
        self,
        search: AnySearch,
        known: Sequence[Parameters],
        *,
        mode: str,
        trials: int,
        sweep: str,
        fixed: Mapping[int, Parameters] | None = None,
        check: Callable[[str, Parameters], None] = lambda *_: None,
    ) -> None:
        import optuna

        study = search.study if isinstance(search, Optuna) else None
        # If the user's space contains lists, `Optuna.__post_init__` has replaced them with
        # distributions.
        space: Any = search.space if isinstance(search, Optuna) else None
        self._space: Callable[[Any], Mapping[str, Any]] | dict[str, Any] | None = space
        self._known = known
        self._trials = trials
        self._sweep = sweep
        self._check = check
        self._fixed: Mapping[int, Parameters] = fixed or {}
        sampler = (
            optuna.samplers.RandomSampler(seed=0) if study is None else copy.deepcopy(study.sampler)
        )
        pruner = pruner_of(search)
        name = (
            _NAME if study is None or study.study_name.startswith("no-name-") else study.study_name
        )
        direction: Any = f"{mode}imize"
        with quiet():
            self._study = optuna.create_study(
                study_name=name, sampler=sampler, pruner=pruner, direction=direction
            )
        self.prunes = not isinstance(pruner, optuna.pruners.NopPruner)
        earlier = [] if study is None else earlier_trials(study, sweep)
        self._study.add_trials(earlier)
        self._running: dict[int, Any] = {}
        self._states = optuna.trial.TrialState

    def ask(self, number: int) -> Parameters | None:
        if number >= self._trials:
            return None
        given = self._known[number] if self._known else self._fixed.get(number)
        if given is not None:
            self._study.enqueue_trial(dict(given))
        found: Mapping[str, Any] | None
        if self._known:
            trial = self._study.ask()
            found = given
        elif callable(self._space):
            trial = self._study.ask()
            found = self._space(trial)
        else:
            trial = self._study.ask(self._space)
            found = trial.params
        parameters = checked(trial.params if found is None else found, number)
        self._check(name_of(number, parameters), parameters)
        trial.set_user_attr(MARK, self._sweep)
        self._running[number] = trial
        return parameters

    def report(self, number: int, step: int, value: float) -> bool:
        trial = self._running[number]
        trial.report(value, step)
        return self.prunes and trial.should_prune()

    def tell(self, number: int, status: Status, value: float | None) -> None:
        trial = self._running.pop(number)
        if status == "pruned":
            self._study.tell(trial, state=self._states.PRUNED)
        elif status == "finished" and value is not None and not math.isnan(value):
            self._study.tell(trial, value)
        else:
            self._study.tell(trial, state=self._states.FAIL)

    def add_to(self, study: Any) -> None:
        """Adds this sweep's trials to the user's study, except for those that are already there."""
        own = [trial for trial in self._study.trials if trial.user_attrs.get(MARK) == self._sweep]
        there = sum(trial.user_attrs.get(MARK) == self._sweep for trial in study.trials)
        study.add_trials(own[there:])


def earlier_trials(study: Any, sweep: str) -> list[Any]:
    """Returns a study's trials, except for those added by this sweep."""
    return [trial for trial in study.trials if trial.user_attrs.get(MARK) != sweep]


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna from logging the creation of a study that the user knows nothing about."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
