"""Whole numbers and words among arguments, and the positions of arguments, as `static_argnums` and
`donate_argnums` have them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeGuard, get_args


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether `value` is a whole number, of Python or NumPy; truth values are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_choice(value: object, choices: object, what: str) -> None:
    """Makes sure that `value` is one of the words of a `Literal`.

    Raises:
        ValueError: It is not; names `what` and the words.
    """
    if value not in get_args(choices):
        raise ValueError(
            f"{what} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}."
        )


def as_numbers(value: Any, name: str) -> tuple[int, ...]:
    """One number or a sequence of them, as a tuple.

    Raises:
        TypeError: It is neither; `name` says what it is.
    """
    try:
        numbers = (value,) if isinstance(value, Integral) else tuple(value)
    except TypeError:
        numbers = (value,)
    if not all(map(is_whole, numbers)):
        raise TypeError(
            f"`{name}` is `{value!r}`: it is the number of a positional argument, such as 0, or a "
            "sequence of numbers, such as (0, 1)."
        )
    return tuple(int(n) for n in numbers)


def positions(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """Argument numbers of a call with `count` positional arguments, the negative ones counted from
    its end.
    """
    return tuple(n + count if n < 0 else n for n in numbers)


def by_position(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[int],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call in which arguments of these numbers stand in their places, also if it gives them by
    name, as for `jit`.
    """
    if not kwargs or max(numbers, default=-1) < len(args):
        return args, kwargs
    try:
        call = inspect.signature(function).bind(*args, **kwargs)
    except (
        TypeError,
        ValueError,
    ):  # not a valid call, as making it will show, or a function without a signature
        return args, kwargs
    return call.args, call.kwargs
