"""Where trials come from: a list, a grid, random draws from a grid, or random draws by a function
of one's own.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np

from jaxcross.errors import shortened
from jaxcross.sweeps.schedule import Parameters, Status


@final
class Listed:
    """Trials that are known before the first one runs. Implements `Search`."""

    ordered = prunes = False

    def __init__(self, trials: Sequence[Parameters]) -> None:
        self.trials = trials

    def ask(self, number: int) -> Parameters | None:
        return self.trials[number] if number < len(self.trials) else None

    def report(self, number: int, step: int, value: float) -> bool:  # noqa: ARG002
        return False

    def tell(self, number: int, status: Status, value: float | None) -> None:
        """Nothing depends on it."""


def is_study(search: object) -> bool:
    """Whether `search` is an Optuna study. Imports nothing: who has a study has imported Optuna."""
    optuna = sys.modules.get("optuna")
    return optuna is not None and isinstance(search, optuna.Study)


def listed(search: Any, trials: int | None, seed: int) -> list[Parameters]:
    """Returns the parameters of all trials of a search that is not a study. The same on every rank.

    Args:
        search: A grid as `{"lr": [0.1, 0.2]}`, a list of parameters, or a function of a NumPy
            generator.
        trials: How many; of a grid or a list, so many that are drawn from it. All if None.
        seed: For drawing.

    Raises:
        TypeError: It is something else, or has values that are no data.
        ValueError: It has no trials, two equal ones, or fewer than `trials`.
    """
    if isinstance(search, Mapping):
        found = _grid(search)
    elif callable(search):
        if trials is None:
            raise ValueError(
                "`search` is a function, so that `trials` must say how often to call it: "
                "`trials=20`."
            )
        # A generator for each trial: its parameters do not depend on how many trials there are.
        return [
            checked(search(np.random.default_rng([seed, number])), number)
            for number in range(trials)
        ]
    elif isinstance(search, Iterable) and not isinstance(search, str):
        found = [checked(each, number) for number, each in enumerate(search)]
    else:
        raise TypeError(
            '`search` must be a grid as `{"lr": [0.1, 0.2]}`, a list of dicts, a function of a '
            f"NumPy generator, or an Optuna study, got {shortened(repr(search), 100)}."
        )
    if not found:
        raise ValueError("`search` is empty: there is no trial to run.")
    texts = [json.dumps(each, sort_keys=True) for each in found]
    twice = next((text for n, text in enumerate(texts) if text in texts[:n]), None)
    if twice is not None:
        raise ValueError(f"`search` has the trial {twice} twice.")
    if trials is None or trials == len(found):
        return found
    if trials > len(found):
        raise ValueError(f"`trials` is {trials}, and `search` has {len(found)}.")
    order = np.random.default_rng(seed).permutation(
        len(found)
    )  # a prefix of one order: more trials go on from there
    return [found[n] for n in order[:trials]]


def _grid(search: Mapping[Any, Any]) -> list[Parameters]:
    for name, values in search.items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise TypeError(
                f"`search[{name!r}]` must be a list of values, got {shortened(repr(values), 100)}."
            )
    axes = [[(name, value) for value in values] for name, values in search.items()]
    return (
        [checked(dict(each), number) for number, each in enumerate(itertools.product(*axes))]
        if axes
        else []
    )


def checked(parameters: Any, number: int) -> Parameters:
    """Returns the parameters of a trial as plain data, which can be sent to other ranks and kept in
    a file.

    Raises:
        TypeError: They are not a dict of names, or a value is no data.
    """
    if not isinstance(parameters, Mapping) or not all(isinstance(name, str) for name in parameters):
        raise TypeError(
            f"The parameters of trial {number} must be a dict of names and values, got"
            f" {shortened(repr(parameters), 100)}."
        )
    plain = {name: _plain(value) for name, value in parameters.items()}
    for name, value in plain.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise TypeError(
                f"`{name}` of trial {number} is {shortened(repr(value), 100)}: parameters are sent "
                "to other ranks, and kept in a file. Use texts, finite numbers, booleans, None, "
                "lists and dicts, and make other objects of them in the training function."
            )
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def name_of(number: int, parameters: Parameters) -> str:
    """Returns the name of a trial's job: its number and its parameters, as `3 lr=0.1 width=32`."""
    words = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in parameters.items()
    ]
    text = "".join(c if c.isprintable() else "?" for c in " ".join([str(number), *words]))
    return shortened(text, 60)
