"""Tests where trials come from: what each search offers, and which arguments it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import jaxcross.errors
from jaxcross.errors import MissingExtraError
from jaxcross.sweeps import Choices, Draws, Grid, Optuna
from jaxcross.sweeps.search import known_trials, pruner_of


def untyped(value: Any) -> Any:
    """Hides an argument from the type checker, which would refuse it."""
    return value


def test_import_loads_neither_optuna_nor_jax() -> None:
    code = (
        "import sys, jaxcross.sweeps\n"
        "print([name for name in ('optuna', 'jax', 'mpi4py') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_grid_has_all_combinations() -> None:
    grid = Grid({"lr": np.array([0.5, 0.25]), "width": range(1, 3), "layers": [(3, 4)]})
    assert known_trials(grid, None) == [
        {"lr": lr, "width": width, "layers": [3, 4]} for lr in (0.5, 0.25) for width in (1, 2)
    ]


def test_grid_may_be_given_values_that_come_once() -> None:
    grid = Grid({"lr": (n for n in (1, 2))})
    assert known_trials(grid, None) == known_trials(grid, None) == [{"lr": 1}, {"lr": 2}]


def test_later_changes_of_the_argument_change_no_search() -> None:
    values = {"lr": [1, 2]}
    searches = Grid(values), Choices([values])
    values["lr"].append(3)
    assert known_trials(searches[0], None) == [{"lr": 1}, {"lr": 2}]
    assert known_trials(searches[1], None) == [{"lr": [1, 2]}]


def test_draws_are_a_prefix_of_one_order() -> None:
    """A draw depends only on the seed and its own number. No combination is drawn twice."""
    of_values = Draws({"a": range(4), "b": [True, False]}, seed=3)
    of_function = Draws(lambda rng: {"lr": rng.uniform()}, seed=3)
    for search in (of_values, of_function):
        assert known_trials(search, 8)[:3] == known_trials(search, 3)
    drawn = [tuple(each.values()) for each in known_trials(of_values, 8)]
    assert sorted(drawn) == [(a, b) for a in range(4) for b in (False, True)]
    assert known_trials(Draws({"a": range(50)}, seed=4), 9) != known_trials(
        Draws({"a": range(50)}), 9
    )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Grid({}), ValueError, "`values` of `Grid` has no values"),
        (lambda: Grid({"lr": []}), ValueError, "has no values for `lr`"),
        (lambda: Grid(untyped([1])), TypeError, "`values` of `Grid` must be a dict of names"),
        (lambda: Grid(untyped({1: [2]})), TypeError, "`values` of `Grid` must be a dict of names"),
        (lambda: Grid(untyped({"lr": 0.1})), TypeError, "must have a list of values for `lr`"),
        (lambda: Grid({"lr": "ab"}), TypeError, "must have a list of values for `lr`"),
        (lambda: Grid({"lr": [1, 2, 1]}), ValueError, "has the value 1 of `lr` twice"),
        (lambda: Grid({"lr": [object()]}), TypeError, "A value of `lr` in `values` of `Grid` is <"),
        (lambda: Grid({"lr": [float("nan")]}), TypeError, "finite numbers"),
        (lambda: Choices([]), ValueError, "`choices` of `Choices` is empty"),
        (lambda: Choices(untyped({"lr": 1})), TypeError, "must be a list of dicts"),
        (lambda: Choices(untyped([1])), TypeError, "The parameters of trial 0 must be a dict"),
        (lambda: Choices([{"lr": object()}]), TypeError, "`lr` of trial 0 is <object"),
        (
            lambda: Choices([{"a": 1, "b": 2}, {"b": 2, "a": 1}]),
            ValueError,
            'has the trial {"a": 1, "b": 2} twice',
        ),
        (lambda: Draws(untyped(7)), TypeError, "`space` of `Draws` must be a dict of names"),
        (lambda: Draws({"lr": [1]}, seed=-1), ValueError, "`seed` of `Draws` must be at least 0"),
        (
            lambda: Draws({"lr": [1]}, seed=untyped(1.5)),
            TypeError,
            "`seed` of `Draws` must be a whole number",
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)


@pytest.mark.parametrize(
    "make", [Grid, Draws, lambda values, pruner: Choices([values], pruner=pruner)]
)
def test_pruning_without_optuna_names_the_extra(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxcross.errors, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"jaxcross\[sweep\]"):
        make({"lr": [1]}, pruner=object())


def test_a_study_without_optuna_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxcross.errors, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"^`jaxcross.Optuna` needs .*jaxcross\[sweep\]"):
        Optuna(untyped(object()), {"lr": [1]})


def test_a_studys_direction_and_pruner_count() -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.HyperbandPruner())
    own = optuna.pruners.ThresholdPruner(lower=0.0)
    assert Optuna(study, {"lr": [1, 2]}).mode == "max"
    assert Optuna(optuna.create_study(), {"lr": [1, 2]}).mode == "min"
    assert pruner_of(Optuna(study, {"lr": [1, 2]})) is study.pruner
    assert pruner_of(Optuna(study, {"lr": [1, 2]}, pruner=own)) is own
    assert pruner_of(Grid({"lr": [1, 2]}, pruner=own)) is own
    assert pruner_of(Grid({"lr": [1, 2]})) is None


@pytest.mark.parametrize(
    ("study", "arguments", "error", "text"),
    [
        (
            {"directions": ["maximize", "minimize"]},
            {},
            ValueError,
            "because a sweep has one metric, got 2 objectives",
        ),
        (None, {}, TypeError, "`study` of `Optuna` must be a study"),
        ({}, {"space": None}, TypeError, "`space` of `Optuna` must be a dict"),
        ({}, {"space": {}}, TypeError, "`space` of `Optuna` must be a dict"),
        ({}, {"space": {"lr": 1.0}}, TypeError, "must have an Optuna distribution or a list"),
        ({}, {"space": {"lr": []}}, TypeError, "must have an Optuna distribution or a list"),
        ({}, {"pruner": "median"}, TypeError, "`pruner` of `Optuna` must be an Optuna pruner"),
    ],
)
def test_wrong_arguments_of_a_study_are_refused(
    study: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    optuna = pytest.importorskip("optuna")
    asked = "study" if study is None else optuna.create_study(**study)
    with pytest.raises(error) as raised:
        Optuna(asked, **{"space": {"lr": [1, 2]}, **arguments})
    assert text in str(raised.value)


def test_a_set_of_values_is_refused():
    """A set of texts has a different order in each process, so ranks would disagree."""
    with pytest.raises(TypeError, match="must have a list of values for `lr`, got {'a'}"):
        Grid({"lr": {"a"}})
