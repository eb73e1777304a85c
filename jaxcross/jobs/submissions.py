"""Jobs that rank 0 submits to all ranks.

A submission consists of a function's name and its arguments. There's no need to send any code,
because every rank has registered a function under that name. The arguments are sent as JSON. A rank
that failed to parse them would bring down the run for everyone, so rank 0 checks submissions before
sending them: the arguments have to survive a round trip through JSON unchanged, and mustn't be too
long or too deeply nested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxcross.errors import JobError, clause, quoted

MOST_BYTES = 64 * 1024  # of one submission, because all ranks gather it as text
_DEEPEST = 50  # levels, so that every rank can parse it, however deep its stack is


def _depth(value: Any) -> int:
    """Returns how deeply lists and dicts are nested.

    This avoids recursion, because the nesting may be too deep for the stack.
    """
    levels = [(value, 0)]
    deepest = 0
    while levels:
        value, depth = levels.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            levels += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list | tuple):
            levels += [(each, depth + 1) for each in value]
    return deepest


class RegisteredFunctions:
    """The functions registered on one rank, by name."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Registers `function`, so that submitted jobs can run it.

        Raises:
            ValueError: The name is empty or already taken.
            TypeError: `function` can't be called.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"the name of a function must be a text that is not empty, got {name!r}"
            )
        if name in self._functions:
            raise ValueError(
                f"A function is already registered as `{name}`. Register each function under a "
                "different name."
            )
        if not callable(function):
            raise TypeError(
                f"`{name}` must be a function `fn(job, **kwargs)`, got a "
                f"`{type(function).__name__}`"
            )
        self._functions[name] = function

    def request(self, name: str, job: str, arguments: Mapping[str, Any]) -> str:
        """Returns a submission as text.

        Raises:
            ValueError: No function is registered under that name, or the arguments are too long or
                too deeply nested.
            TypeError: JSON can't represent the arguments.
        """
        if name not in self._functions:
            names = list(self._functions)  # a copy, because another thread may register a function
            known = quoted(names) or "nothing"
            raise ValueError(
                f"Job `{job}`: no function is registered as `{name}`. Registered are {known}. Call "
                "`runner.register` on every rank before the run."
            )
        try:
            text = json.dumps({"function": name, "job": job, "arguments": arguments})
            same = json.loads(text)["arguments"] == arguments
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"Job `{job}`: its arguments cannot be sent as JSON: {clause(str(error))}. Use "
                "texts, finite numbers, booleans, None, lists, and dicts whose keys are texts."
            ) from None
        if not same:
            raise TypeError(
                f"Job `{job}`: its arguments would change when they are sent as JSON: "
                f"{arguments!r}. Use texts, finite numbers, booleans, None, lists, and dicts whose "
                "keys are texts."
            )
        if _depth(arguments) > _DEEPEST:
            raise ValueError(
                f"Job `{job}`: its arguments are nested deeper than {_DEEPEST} levels. Submit "
                "flatter arguments."
            )
        size = len(text.encode())
        if size > MOST_BYTES:
            raise ValueError(
                f"Job `{job}`: its submission has {size} bytes, more than {MOST_BYTES}. Submit the "
                "path of a file that every rank can read instead."
            )
        return text

    def resolve(self, text: str, rank: int) -> tuple[str, Callable[..., Any], dict[str, Any]]:
        """Returns the name, the function and the arguments of a submitted job.

        If this rank hasn't registered the function, we can't just raise an error: the other ranks
        will add the job anyway, and would wait for this rank. We return a function that raises the
        error when the job runs it instead, which makes the job fail on all ranks.
        """
        asked = json.loads(text)
        name = asked["function"]
        job = asked["job"]

        def lacking(_: Any, **__: Any) -> None:
            raise JobError(
                f"rank {rank} has not registered a function `{name}`. Register the same functions "
                "with `runner.register` on every rank."
            )

        return job, self._functions.get(name, lacking), asked["arguments"]
