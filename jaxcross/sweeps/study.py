"""Trials by Optuna: its samplers and pruners, asked and told in the order of the schedule, on rank
0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from jaxcross.errors import require_extra
from jaxcross.sweeps.schedule import Parameters, Status
from jaxcross.sweeps.search import checked, name_of

MARK = (
    "jaxcross_sweep"  # the attribute of the trials that a sweep has added to a study of the user's
)
# Hyperband shares out trials by the study's name, which Optuna makes up for each process
_NAME = "sweep"


def check_pruner(prune: Any) -> None:
    """Makes sure that `prune` is a pruner of Optuna's, or None.

    Raises:
        MissingExtraError: Optuna is not installed.
        TypeError: It is something else.
    """
    if prune is None:
        return
    require_extra("sweep", "pruning", "optuna")
    import optuna

    if not isinstance(prune, optuna.pruners.BasePruner):
        raise TypeError(
            "`prune` must be a pruner of Optuna's, as `optuna.pruners.MedianPruner()`, got "
            f"{prune!r}."
        )


def mode_of(study: Any) -> str:
    """Returns `max` or `min`, as the study says.

    Raises:
        ValueError: It has several objectives.
    """
    if len(study.directions) != 1:
        raise ValueError(
            f"The study has {len(study.directions)} objectives; a sweep has one metric."
        )
    return "max" if study.direction.name == "MAXIMIZE" else "min"


@final
class StudySearch:
    """Asks a study in memory that has the sampler and the pruner of the user's. Implements
    `Search`.

    Args:
        study: The user's study, left as it is: earlier trials of it count as known. None for a list
            of trials.
        listed: The trials, if a list has them.
        pruner: Ends trials early; None for the study's.
        mode: Whether the metric is to become large or small.
        space: Distributions, or a function of an Optuna trial that suggests parameters.
        trials: How many.
        sweep: Identifies the sweep: trials that it has added to the study are not earlier ones.
        fixed: Parameters that trials of these numbers had before a restart.
        check: Called with name and parameters of each trial; raises if the trial cannot run.
    """

    ordered = True

    def __init__(
        self,
        *,
        study: Any = None,
        listed: Sequence[Parameters] = (),
        pruner: Any = None,
        mode: str,
        space: Any = None,
        trials: int,
        sweep: str,
        fixed: Mapping[int, Parameters] | None = None,
        check: Callable[[str, Parameters], None] = lambda *_: None,
    ) -> None:
        import optuna

        self._listed, self._space, self._trials, self._sweep = listed, space, trials, sweep
        self._check = check
        self._fixed: Mapping[int, Parameters] = fixed or {}
        sampler = (
            optuna.samplers.RandomSampler(seed=0) if study is None else copy.deepcopy(study.sampler)
        )
        pruner = pruner or (None if study is None else study.pruner) or optuna.pruners.NopPruner()
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
        given = self._listed[number] if self._listed else self._fixed.get(number)
        if given is not None:
            self._study.enqueue_trial(dict(given))
        if self._listed or callable(self._space):
            trial = self._study.ask()
        else:
            trial = self._study.ask(distributions(self._space))
        found = (
            given if self._listed else self._space(trial) if callable(self._space) else trial.params
        )
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
        """Adds the trials of this sweep to the user's study, once."""
        own = [trial for trial in self._study.trials if trial.user_attrs.get(MARK) == self._sweep]
        there = sum(trial.user_attrs.get(MARK) == self._sweep for trial in study.trials)
        study.add_trials(own[there:])


def earlier_trials(study: Any, sweep: str) -> list[Any]:
    """Returns the trials of a study that this sweep has not added."""
    return [trial for trial in study.trials if trial.user_attrs.get(MARK) != sweep]


def check_space(space: Any) -> None:
    """Makes sure that a study can be asked for parameters.

    Raises:
        TypeError: `space` is neither a function nor a dict of distributions or lists.
    """
    if callable(space):
        return
    if not isinstance(space, Mapping) or not space:
        raise TypeError(
            "An Optuna study needs `space`: a dict as `{'lr': "
            "optuna.distributions.FloatDistribution(1e-3, 1)}`, or a function of a trial that "
            f"suggests parameters and returns them as a dict. Got {space!r}."
        )
    distributions(space)


def distributions(space: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the distributions of a space, in which a list stands for a choice.

    Raises:
        TypeError: A value is something else.
    """
    from optuna.distributions import BaseDistribution, CategoricalDistribution

    found = {}
    for name, values in space.items():
        if isinstance(values, list | tuple) and values:
            found[name] = CategoricalDistribution(list(values))
        elif isinstance(values, BaseDistribution):
            found[name] = values
        else:
            raise TypeError(
                f"`space[{name!r}]` must be a distribution of Optuna's or a list, got {values!r}."
            )
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna from announcing a study in memory, which the user did not make."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
