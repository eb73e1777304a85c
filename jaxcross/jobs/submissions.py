"""Jobs made from afar: rank 0 names a function that every rank offers, and its arguments as JSON. Never code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxcross.errors import JobError, clause

MOST_BYTES = 64 * 1024  # of one submission; a text that all ranks gather
_DEEPEST = 50  # what every rank can read, wherever its stack stands


def _depth(value: Any) -> int:
    """Returns the number of levels of lists and dicts. Does not recurse, since the depth may exceed the stack."""
    levels, deepest = [(value, 0)], 0
    while levels:
        value, depth = levels.pop()
        deepest = max(deepest, depth)
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        levels += [(each, depth + 1) for each in inside]
    return deepest


class Offers:
    """The functions of one rank that jobs may be made of, by name."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """From now on jobs can be made of `function`.

        Raises:
            ValueError: The name is empty or taken.
            TypeError: `function` cannot be called.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of an offer must be a text that is not empty, got {name!r}")
        if name in self._functions:
            raise ValueError(f"`{name}` is offered already. A submission needs one function for each name.")
        if not callable(function):
            raise TypeError(
                f"The offer `{name}` needs a function `fn(job, **arguments)`, not `{type(function).__name__}`"
            )
        self._functions[name] = function

    def request(self, name: str, job: str, arguments: Mapping[str, Any]) -> str:
        """The text of a submission.

        Raises:
            ValueError: Nothing of that name is offered here, or the text is too long.
            TypeError: The arguments are not what JSON can say: texts, numbers, booleans, None, lists, dicts of them.
        """
        if name not in self._functions:
            known = ", ".join(f"`{each}`" for each in self._functions) or "nothing"
            raise ValueError(f"Job `{job}`: no function is offered as `{name}`; offered: {known}.")
        try:
            text = json.dumps({"offer": name, "job": job, "arguments": arguments})
            same = json.loads(text)["arguments"] == arguments
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"Job `{job}`: its arguments cannot be sent as JSON: {clause(str(error))}. Only data may be submitted."
            ) from None
        if not same:
            raise TypeError(
                f"Job `{job}`: its arguments do not survive JSON: {arguments!r}. Use texts, finite numbers, booleans, "
                "None, lists, and dicts whose keys are texts."
            )
        if _depth(arguments) > _DEEPEST:
            raise ValueError(f"Job `{job}`: its arguments are nested deeper than {_DEEPEST} levels.")
        if (size := len(text.encode())) > MOST_BYTES:
            raise ValueError(f"Job `{job}`: its submission has {size} bytes, more than {MOST_BYTES}.")
        return text

    def resolve(self, text: str, rank: int) -> tuple[str, Callable[..., Any], dict[str, Any]]:
        """Job's name, function and arguments of a submission. A function that this rank lacks fails when it is run."""
        asked = json.loads(text)
        name, job = asked["offer"], asked["job"]

        def lacking(_: Any, **__: Any) -> None:
            raise JobError(f"rank {rank} offers no `{name}`. Call `runner.offer` alike on every rank.")

        return job, self._functions.get(name, lacking), asked["arguments"]
