"""The searches that users can choose from: `Grid`, `Choices`, `Draws` and `Optuna`.

Importing this module doesn't import JAX or Optuna.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import numpy as np

from jaxcross._arguments import is_whole
from jaxcross.errors import require_extra, shortened
from jaxcross.sweeps.schedule import Parameters, Status

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner


@final
@dataclass(frozen=True, slots=True)
class Grid:
    """Tries every combination of the given values, in the order of `itertools.product`.

    Args:
        values: The values of each parameter, e.g. `{"lr": [0.1, 0.2], "width": [32, 64]}`.
        pruner: An Optuna pruner, which ends trials that do worse than others. If None, all trials
            run to the end.

    Raises:
        TypeError: `values` isn't a mapping of names to iterables, a value can't be written as JSON,
            or `pruner` isn't an Optuna pruner.
        ValueError: There are no values, or a value occurs twice.
        MissingExtraError: You passed a `pruner`, but Optuna isn't installed. The extra `sweep`
            installs it.
    """

    values: Mapping[str, Iterable[Any]]
    _: KW_ONLY
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _checked_values("`values` of `Grid`", self.values))
        _check_pruner("Grid", self.pruner)


@final
@dataclass(frozen=True, slots=True)
class Choices:
    """Tries a list of parameters, one trial after the other.

    Args:
        choices: The parameters of each trial, e.g. `[{"lr": 0.1}, {"lr": 0.2, "width": 64}]`.
            Trials begin in this order.
        pruner: An Optuna pruner, which ends trials that do worse than others. If None, all trials
            run to the end.

    Raises:
        TypeError: `choices` isn't an iterable of dicts with string keys, a value can't be written
            as JSON, or `pruner` isn't an Optuna pruner.
        ValueError: `choices` is empty, or contains the same parameters twice.
        MissingExtraError: You passed a `pruner`, but Optuna isn't installed. The extra `sweep`
            installs it.
    """

    choices: Iterable[Mapping[str, Any]]
    _: KW_ONLY
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choices, str | Mapping) or not isinstance(self.choices, Iterable):
            raise TypeError(
                '`choices` of `Choices` must be a list of dicts such as `[{"lr": 0.1}]`, got '
                f"{shortened(repr(self.choices), 100)}."
            )
        found = tuple(checked(each, number) for number, each in enumerate(self.choices))
        if not found:
            raise ValueError(
                "`choices` of `Choices` is empty, so there is no trial to run. Give at least one "
                "dict of parameters."
            )
        twice = _twice(found)
        if twice is not None:
            raise ValueError(
                f"`choices` of `Choices` has the trial {twice} twice. Remove one of the two."
            )
        object.__setattr__(self, "choices", found)
        _check_pruner("Choices", self.pruner)


@final
@dataclass(frozen=True, slots=True)
class Draws:
    """Draws parameters at random. Pass the number of draws to `sweep` as `trials=`.

    A finished sweep can be extended by restarting it with more `trials`: existing trials keep their
    parameters, and new trials are added at the end. This works because a trial's parameters depend
    only on `space`, `seed` and the trial's number.

    Args:
        space: Either a function that takes a NumPy generator and returns a dict of parameters, or
            the values of each parameter, as in `Grid`, in which case no combination is drawn twice.
        seed: The seed for the random numbers, the same on every rank.
        pruner: An Optuna pruner, which ends trials that do worse than others. If None, all trials
            run to the end.

    Raises:
        TypeError: `space` is neither a function nor a mapping of names to iterables, a value can't
            be written as JSON, `seed` isn't a whole number, or `pruner` isn't an Optuna pruner.
        ValueError: There are no values, a value occurs twice, or `seed` is negative.
        MissingExtraError: You passed a `pruner`, but Optuna isn't installed. The extra `sweep`
            installs it.

    Example:
        >>> def space(rng):
        ...     return {"lr": 10 ** rng.uniform(-3, -1)}
        >>> search = jaxcross.Draws(space, seed=1)
    """

    space: Callable[[np.random.Generator], Mapping[str, Any]] | Mapping[str, Iterable[Any]]
    _: KW_ONLY
    seed: int = 0
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        if not callable(self.space):
            object.__setattr__(self, "space", _checked_values("`space` of `Draws`", self.space))
        if not is_whole(self.seed):
            raise TypeError(f"`seed` of `Draws` must be a whole number, got {self.seed!r}.")
        if self.seed < 0:
            raise ValueError(f"`seed` of `Draws` must be at least 0, got {self.seed}.")
        object.__setattr__(self, "seed", int(self.seed))  # ranks exchange it as JSON
        _check_pruner("Draws", self.pruner)


@final
@dataclass(frozen=True, slots=True)
class Optuna:
    """Uses an Optuna study, whose sampler proposes parameters based on the results so far.

    Pass the number of trials to `sweep` as `trials=`. The study's direction decides whether the
    sweep maximizes or minimizes the metric. The study itself isn't touched while the sweep is in
    progress: rank 0 works with copies of its sampler and pruner, and adds all trials to the study
    when the sweep ends. Give the sampler a seed to make the sweep repeatable.

    Args:
        study: The study, which must have a single objective. If it already has trials, the sampler
            takes them into account.
        space: Either a dict that maps names to Optuna distributions or lists of values, or a
            function that takes an Optuna trial, calls its `suggest_...` methods, and returns the
            parameters as a dict.
        pruner: An Optuna pruner, which ends trials that do worse than others. If None, the study's
            pruner is used.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The study has more than one objective.
        MissingExtraError: Optuna isn't installed. The extra `sweep` installs it.
    """

    study: Study
    space: (
        Mapping[str, BaseDistribution | Sequence[Any]] | Callable[[Trial], Mapping[str, Any] | None]
    )
    _: KW_ONLY
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        require_extra("sweep", "`jaxcross.Optuna`", "optuna")
        import optuna

        if not isinstance(self.study, optuna.Study):
            raise TypeError(
                "`study` of `Optuna` must be a study such as `optuna.create_study()`, got "
                f"{shortened(repr(self.study), 100)}."
            )
        if len(self.study.directions) != 1:
            raise ValueError(
                f"`study` of `Optuna` must have one objective, because a sweep has one metric, got "
                f"{len(self.study.directions)} objectives."
            )
        if not callable(self.space):
            object.__setattr__(self, "space", _distributions(self.space))
        _check_pruner("Optuna", self.pruner)

    @property
    def mode(self) -> Literal["max", "min"]:
        """Whether larger (`max`) or smaller (`min`) values are better, as given by the study."""
        return "max" if self.study.direction.name == "MAXIMIZE" else "min"


AnySearch: TypeAlias = Grid | Choices | Draws | Optuna


@final
class Listed:
    """A list of trials that's known up front. Implements `Search`."""

    ordered = prunes = False

    def __init__(self, trials: Sequence[Parameters]) -> None:
        self.trials = trials

    def ask(self, number: int) -> Parameters | None:
        return self.trials[number] if number < len(self.trials) else None

    def report(self, number: int, step: int, value: float) -> bool:  # noqa: ARG002
        return False

    def tell(self, number: int, status: Status, value: float | None) -> None:
        """A no-op, because the trials don't depend on results."""


def known_trials(search: AnySearch, trials: int | None) -> list[Parameters]:
    """Returns the parameters of all trials if they're known up front.

    Returns an empty list for `Optuna`, whose study proposes parameters on the fly. The result is
    identical on all ranks, unless the user's function for `Draws` returns something different on
    each of them.

    Args:
        search: The search.
        trials: The number of trials, required for `Draws` and `Optuna`.

    Raises:
        TypeError: `search` has the wrong type, or the function of a `Draws` returned something
            other than a dict of parameters.
        ValueError: `trials` is missing, was passed for a search that always runs all of its trials,
            or exceeds the number of combinations.
    """
    match search:
        case Grid():
            _check_no_trials("Grid", trials)
            return _combinations(search.values)
        case Choices():
            _check_no_trials("Choices", trials)
            return [*search.choices]
        case Draws():
            return _drawn(search, _needed("Draws", trials))
        case Optuna():
            _needed("Optuna", trials)
            return []
    raise TypeError(
        "`search` must be `jaxcross.Grid(values)` for all combinations of some values, "
        "`jaxcross.Choices(dicts)` for a list of trials, `jaxcross.Draws(space)` for random draws, "
        f"or `jaxcross.Optuna(study, space)`, got {shortened(repr(search), 100)}."
    )


def pruner_of(search: AnySearch) -> BasePruner | None:
    """Returns the search's pruner, or that of its study, if there is one."""
    if search.pruner is None and isinstance(search, Optuna):
        return search.study.pruner
    return search.pruner


def _check_no_trials(kind: str, trials: int | None) -> None:
    if trials is not None:
        raise ValueError(
            f"`trials` is {trials}, but `{kind}` runs all of its trials. Leave `trials` out, or "
            'draw some combinations at random by `jaxcross.Draws({"lr": [0.1, 0.2]})`.'
        )


def _needed(kind: str, trials: int | None) -> int:
    if trials is None:
        raise ValueError(
            f"`{kind}` has no end of its own: `trials` must say how many trials to run, as in "
            "`trials=20`."
        )
    return trials


def _drawn(search: Draws, trials: int) -> list[Parameters]:
    if callable(search.space):
        # Use a separate random generator for each trial. With a shared generator, a trial's
        # parameters would depend on how many random numbers earlier trials have drawn.
        return [
            checked(search.space(np.random.default_rng([search.seed, number])), number)
            for number in range(trials)
        ]
    found = _combinations(search.space)
    if trials > len(found):
        raise ValueError(
            f"`trials` is {trials}, but the number of combinations in `space` of `Draws` is "
            f"{len(found)}, and none is drawn twice. Pass fewer `trials`, or give more values."
        )
    # Shuffle all combinations before taking the first few, so that the order doesn't depend on
    # `trials`. A sweep that's restarted with more trials then begins with the same ones.
    order = np.random.default_rng(search.seed).permutation(len(found))
    return [found[n] for n in order[:trials]]


def _combinations(values: Mapping[str, Iterable[Any]]) -> list[Parameters]:
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def _checked_values(what: str, values: Any) -> dict[str, tuple[Any, ...]]:
    """Returns the values of each parameter as plain data."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TypeError(
            f'{what} must be a dict of names and lists such as `{{"lr": [0.1, 0.2]}}`, got '
            f"{shortened(repr(values), 100)}."
        )
    found: dict[str, tuple[Any, ...]] = {}
    for name, each in values.items():
        # Reject sets. Each Python process iterates over a set of strings in its own order, so ranks
        # would try the values in different orders and train different trials.
        if isinstance(each, str | Mapping | AbstractSet) or not isinstance(each, Iterable):
            raise TypeError(
                f"{what} must have a list of values for `{name}`, got {shortened(repr(each), 100)}."
            )
        found[name] = tuple(_checked_value(f"A value of `{name}` in {what}", one) for one in each)
        twice = _twice(found[name])
        if twice is not None:
            raise ValueError(
                f"{what} has the value {twice} of `{name}` twice. Remove one of the two."
            )
    if not found or not all(found.values()):
        without = next((f" for `{name}`" for name, each in found.items() if not each), "")
        raise ValueError(
            f"{what} has no values{without}, so there is no trial to run. Give at least one value "
            "for each parameter."
        )
    return found


def _twice(values: Iterable[Any]) -> str | None:
    """Returns a value that occurs twice, as JSON, or None if there isn't any."""
    seen: set[str] = set()
    for value in values:
        text = json.dumps(value, sort_keys=True)
        if text in seen:
            return text
        seen.add(text)
    return None


def _check_pruner(kind: str, pruner: Any) -> None:
    if pruner is None:
        return
    require_extra("sweep", "pruning", "optuna")
    import optuna

    if not isinstance(pruner, optuna.pruners.BasePruner):
        raise TypeError(
            f"`pruner` of `{kind}` must be an Optuna pruner such as "
            f"`optuna.pruners.MedianPruner()`, got {shortened(repr(pruner), 100)}."
        )


def _distributions(space: Any) -> dict[str, BaseDistribution]:
    """Returns the distributions of a space, turning lists into categorical distributions."""
    from optuna.distributions import BaseDistribution, CategoricalDistribution

    if not isinstance(space, Mapping) or not space:
        raise TypeError(
            "`space` of `Optuna` must be a dict such as `{'lr': "
            "optuna.distributions.FloatDistribution(1e-3, 1)}`, or a function of a trial that "
            f"suggests parameters and returns them as a dict, got {shortened(repr(space), 100)}."
        )
    found: dict[str, BaseDistribution] = {}
    for name, values in space.items():
        if isinstance(values, list | tuple) and values:
            found[name] = CategoricalDistribution(list(values))
        elif isinstance(values, BaseDistribution):
            found[name] = values
        else:
            raise TypeError(
                f"`space` of `Optuna` must have an Optuna distribution or a list of values for "
                f"`{name}`, got {shortened(repr(values), 100)}."
            )
    return found


def checked(parameters: Any, number: int) -> Parameters:
    """Returns a trial's parameters as plain data that can be sent to other ranks and saved.

    Raises:
        TypeError: The parameters aren't a dict with string keys, or a value isn't plain data.
    """
    if not isinstance(parameters, Mapping) or not all(isinstance(name, str) for name in parameters):
        raise TypeError(
            f"The parameters of trial {number} must be a dict of names and values, got"
            f" {shortened(repr(parameters), 100)}."
        )
    return {
        name: _checked_value(f"`{name}` of trial {number}", value)
        for name, value in parameters.items()
    }


def _checked_value(what: str, value: Any) -> Any:
    plain = _plain(value)
    try:
        same = json.loads(json.dumps(plain, allow_nan=False)) == plain
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise TypeError(
            f"{what} is {shortened(repr(plain), 100)}, but parameters must be plain data, because "
            "they are sent to other ranks and kept in a file. Use texts, finite numbers, booleans, "
            "None, lists and dicts, and create other objects from them in the training function."
        )
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def name_of(number: int, parameters: Parameters) -> str:
    """Returns the name of a trial's job: its number and parameters, e.g. `3 lr=0.1 width=32`."""
    shown = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in parameters.items()
    ]
    text = "".join(c if c.isprintable() else "?" for c in " ".join([str(number), *shown]))
    return shortened(text, 60)
