"""Jobs that rank 0 submits to all ranks.

A submission consists of the name of a function that every rank has registered and of arguments as
JSON. It contains no code. Rank 0 checks it thoroughly, because every rank must be able to read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxcross.errors import JobError, clause, quoted

MOST_BYTES = 64 * 1024  # of one submission, which all ranks gather as text
_DEEPEST = 50  # JSON that every rank can parse, whatever the depth of its stack


def _depth(value: Any) -> int:
    """Returns the number of levels of lists and dicts.

    Not recursive, because the nesting may be deeper than the stack.
    """
    levels, deepest = [(value, 0)], 0
    while levels:
        value, depth = levels.pop()
        deepest = max(deepest, depth)
        inside = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else ()
        )
        levels += [(each, depth + 1) for each in inside]
    return deepest


class RegisteredFunctions:
    """One rank's functions of which jobs can be made, by name."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Registers `function`, so that jobs can be made of it.

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
                f"`{name}` is registered already. A submission needs one function for each name."
            )
        if not callable(function):
            raise TypeError(
                f"`{name}` must be a function `fn(job, **kwargs)`, not `{type(function).__name__}`"
            )
        self._functions[name] = function

    def request(self, name: str, job: str, arguments: Mapping[str, Any]) -> str:
        """Returns the text of a submission.

        Raises:
            ValueError: No function is registered under that name, or the text is too long or too
                deeply nested.
            TypeError: JSON can't represent the arguments.
        """
        if name not in self._functions:
            names = list(self._functions)  # a copy, because another thread may register a function
            known = quoted(names) or "nothing"
            raise ValueError(
                f"Job `{job}`: no function is registered as `{name}`; there are: {known}."
            )
        try:
            text = json.dumps({"function": name, "job": job, "arguments": arguments})
            same = json.loads(text)["arguments"] == arguments
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"Job `{job}`: its arguments cannot be sent as JSON: {clause(str(error))}. Only "
                "data may be submitted."
            ) from None
        if not same:
            raise TypeError(
                f"Job `{job}`: its arguments do not survive JSON: {arguments!r}. Use texts, finite "
                "numbers, booleans, None, lists, and dicts whose keys are texts."
            )
        if _depth(arguments) > _DEEPEST:
            raise ValueError(
                f"Job `{job}`: its arguments are nested deeper than {_DEEPEST} levels."
            )
        if (size := len(text.encode())) > MOST_BYTES:
            raise ValueError(
                f"Job `{job}`: its submission has {size} bytes, more than {MOST_BYTES}."
            )
        return text

    def resolve(self, text: str, rank: int) -> tuple[str, Callable[..., Any], dict[str, Any]]:
        """Returns name, function and arguments of a submitted job.

        If this rank hasn't registered the function, the returned one raises an error.
        """
        asked = json.loads(text)
        name, job = asked["function"], asked["job"]

        def lacking(_: Any, **__: Any) -> None:
            raise JobError(
                f"rank {rank} has registered no `{name}`. Call `runner.register` alike on every "
                "rank."
            )

        return job, self._functions.get(name, lacking), asked["arguments"]
