"""The options of a run, shared by `Runner`, `run` and `sweep`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from jaxcross.checkpoint import Checkpoints
from jaxcross.interleave.instrument import Instrument
from jaxcross.interleave.policy import Policy
from jaxcross.jobs import arguments
from jaxcross.plan.memory import memory_limit
from jaxcross.world import World


class SharedOptions(TypedDict, total=False):
    """The options of every run; see `Runner` for their meaning."""

    world: World | None
    policy: Policy | None
    instruments: Iterable[Instrument]
    memory: int | str | None
    events: str | os.PathLike[str] | None
    progress: bool | float | None


class RunOptions(SharedOptions, total=False):
    """The options of a run that chooses its own files. A sweep chooses those itself."""

    checkpoints: Checkpoints | None
    metrics: str | os.PathLike[str] | None


def check_options(function: str, options: Mapping[str, Any], kind: type[SharedOptions]) -> None:
    """Checks the names of a function's options.

    Raises:
        TypeError: `kind` has no option of that name.
    """
    known = sorted(kind.__optional_keys__)
    for name in options:
        if name not in known:
            raise TypeError(
                f"`{function}` has no argument `{name}`; of the options of a run it takes "
                f"{', '.join(known)}."
            )


def check_values(options: SharedOptions) -> None:
    """Checks the options whose values need no world, and lists the instruments.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: `memory`, `events` or `progress` is out of range.
    """
    options["instruments"] = arguments.checked_instruments(options.get("instruments", ()))
    memory_limit(options.get("memory"))
    arguments.check_folder("`events`", options.get("events"))
    arguments.check_progress(options.get("progress"))
