"""Checks arguments, and resolves which of a step's arguments are donated or static.

A step's donated and static arguments are selected with the same options as in `jax.jit`:
`donate_argnums`, `donate_argnames`, `static_argnums` and `static_argnames`. They also work the same
way, except that `jax.jit` ignores negative numbers in `donate_argnums`, whereas we count them from
the last positional argument of a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeGuard, get_args

from jaxcross.errors import quoted


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether `value` is a whole number of Python or NumPy. Booleans don't count as numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_type(value: object, kind: type | UnionType, what: str) -> None:
    """Checks that `value` is an instance of `kind`. Booleans don't count as numbers.

    Raises:
        TypeError: It isn't. The message refers to it as `what`.
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = " or ".join(_KINDS.get(each) or f"a `{each.__name__}`" for each in _each(kind))
        raise TypeError(f"{what} must be {expected}, got {value!r:.60}")


_KINDS = {
    str: "a text",
    Integral: "a whole number",
    Real: "a number",
    Iterable: "an iterable",
    Mapping: "a mapping",
    NoneType: "None",
}


def _each(kind: type | UnionType) -> tuple[type, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def check_choice(value: object, choices: object, what: str) -> None:
    """Checks that `value` is one of the values of a `Literal`.

    Raises:
        ValueError: It isn't. The message refers to it as `what`, and lists the allowed values.
    """
    if value not in get_args(choices):
        raise ValueError(
            f"{what} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}."
        )


def as_numbers(value: Any, name: str) -> tuple[int, ...]:
    """Returns one number or a sequence of numbers as a tuple.

    Raises:
        TypeError: It's neither. The message refers to it as `name`.
    """
    numbers = _listed(value, Integral)
    if not all(map(is_whole, numbers)):
        raise TypeError(
            f"`{name}` must be the number of a positional argument, such as 0, or a sequence of "
            f"numbers, such as (0, 1), got {value!r:.60}."
        )
    return tuple(int(n) for n in numbers)


def as_names(value: Any, name: str) -> tuple[str, ...]:
    """Returns one name or several names as a tuple.

    Raises:
        TypeError: It's neither. The message refers to it as `name`.
    """
    names = _listed(value, str)
    if not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"`{name}` must be the name of an argument, such as 'state', or a sequence of names, "
            f"such as ('state', 'batch'), got {value!r:.60}."
        )
    return names


def _listed(value: Any, kind: type) -> tuple[Any, ...]:
    """Returns the items of `value`, or only `value` if it's a `kind` or can't be iterated over."""
    try:
        return (value,) if isinstance(value, kind) else tuple(value)
    except TypeError:
        return (value,)


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of a function's arguments, selected by number and by name; see `select`.

    Attributes:
        numbers: The numbers of positional arguments. Negative numbers count from a call's last
            positional argument.
        names: The names of arguments, for calls that pass them by name.
    """

    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    def places(self, count: int, named: Container[str]) -> tuple[int | str, ...]:
        """Returns which of a call's arguments are selected: their numbers from 0, then names.

        Args:
            count: The number of positional arguments in the call.
            named: The names of the arguments that the call passes by name.
        """
        numbers = (n + count if n < 0 else n for n in self.numbers)
        return (
            *(n for n in numbers if 0 <= n < count),
            *(name for name in self.names if name in named),
        )


def select(
    function: Callable[..., Any],
    name: str,
    option: str,
    *,
    numbers: int | Sequence[int] | None,
    names: str | Iterable[str] | None,
) -> Selection:
    """Returns the arguments that are selected by these numbers and names, as `jax.jit` would.

    A selected argument should be recognized whether a call passes it by position or by name. So if
    you only pass numbers, we look up the corresponding names in the function's signature, and vice
    versa. If you pass both, we use them as they are, just like `jax.jit`.

    Args:
        function: The function.
        name: The function's name, for error messages.
        option: `donate` or `static`. The error messages append `_argnums` or `_argnames`.
        numbers: The numbers of positional arguments; None if they should follow from the names.
        names: The names of arguments; None if they should follow from the numbers.

    Raises:
        TypeError: `numbers` aren't numbers, or `names` aren't strings.
        ValueError: The function has no such argument, or it's selected by name but can be passed
            only by position.
    """
    given = None if numbers is None else as_numbers(numbers, f"{option}_argnums")
    given_names = None if names is None else as_names(names, f"{option}_argnames")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return Selection(given or (), given_names or ())
    _check_numbers(parameters, given or (), name, f"{option}_argnums")
    _check_names(parameters, given_names or (), name, f"{option}_argnames")
    either = {
        n: parameter.name
        for n, parameter in enumerate(parameters)
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    if given_names is None:
        given_names = tuple(either[n] for n in given or () if n in either)
    elif given is None:
        given = tuple(n for n, word in either.items() if word in given_names)
    return Selection(given or (), given_names)


def check_disjoint(name: str, donated: Selection, static: Selection) -> None:
    """Checks that no argument is both donated and static.

    Raises:
        ValueError: An argument is donated and static.
    """
    for place in (*donated.names, *donated.numbers):
        if place in static.names or place in static.numbers:
            raise both_donated_and_static(name, place)


def both_donated_and_static(name: str, place: int | str) -> ValueError:
    """Returns the error for an argument of the step `name` that's both donated and static."""
    return ValueError(
        f"argument {in_words(place)} of `{name}` is both donated and static, but a static argument "
        "has no arrays that the step could overwrite. Remove it from the donated or from the "
        "static arguments."
    )


def in_words(place: int | str) -> str:
    """Returns an argument's number, or its name in backticks."""
    return str(place) if isinstance(place, int) else f"`{place}`"


def _check_numbers(
    parameters: Iterable[inspect.Parameter], numbers: Sequence[int], name: str, option: str
) -> None:
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return
    count = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    count += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for n in numbers:
        if not -count <= n < count:
            remedy = f" Use numbers from 0 to {count - 1}." if count else ""
            raise ValueError(
                f"`{option}` of `{name}` names argument {n}, but `{name}` takes {count} positional "
                f"argument{'s' * (count != 1)}.{remedy}"
            )


def _check_names(
    parameters: Iterable[inspect.Parameter], names: Sequence[str], name: str, option: str
) -> None:
    kinds = {parameter.name: parameter.kind for parameter in parameters}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for word in names:
        kind = kinds.get(word)
        if kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"`{option}` of `{name}` names `{word}`, which `{name}` only takes by position. "
                f"Select it by its number, with `{option.replace('names', 'nums')}`."
            )
        if kind not in by_name and inspect.Parameter.VAR_KEYWORD not in kinds.values():
            takes = quoted(each for each, kind in kinds.items() if kind in by_name)
            raise ValueError(
                f"`{option}` of `{name}` names `{word}`, but `{name}` has no such argument. It "
                f"takes {takes or 'none by name'}."
            )
