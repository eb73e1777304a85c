"""The settings of a sweep, which must be the same on all ranks and, mostly, after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxcross.errors import JobError
from jaxcross.jobs import check_count
from jaxcross.world import World, gather

T = TypeVar("T")
_KINDS: tuple[type[Exception], ...] = (TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """The settings of a sweep. Identical on all ranks, except for the folder.

    Attributes:
        metric: The name of the metric that trials are compared by.
        mode: Whether larger (`max`) or smaller (`min`) values are better.
        concurrent: How many trials run at the same time.
        trials: The number of trials.
        seed: The seed of `Draws`; 0 for other searches.
        kind: `study` if an Optuna study proposes the parameters, `list` otherwise.
        pruner: The name of the pruner's class; empty if there's no pruner.
        keep: How many trials keep their checkpoints; None for all of them.
        folder: The sweep's folder; None to keep nothing on disk.
    """

    metric: str
    mode: Literal["max", "min"]
    concurrent: int
    trials: int
    seed: int
    kind: str
    pruner: str
    keep: int | None
    folder: Path | None

    @property
    def checkpoint_folder(self) -> Path | None:
        """The folder with the trials' checkpoints; None if nothing is kept."""
        return None if self.folder is None else self.folder / "checkpoints"

    def facts(self) -> dict[str, Any]:
        """Returns the settings that ranks compare and that are written to disk."""
        return {
            name: getattr(self, name)
            for name in ("metric", "mode", "concurrent", "trials", "seed", "kind", "pruner", "keep")
        }

    def check_restart(self, earlier: Mapping[str, Any], *, ordered: bool) -> None:
        """Checks that a sweep begun with the settings `earlier` can be continued with these.

        The only settings that may change are `keep`, the number of trials and, unless the search is
        `ordered`, `concurrent`.

        Raises:
            ValueError: Another setting differs, or the number of trials was reduced.
        """
        free = {"keep", "trials"} | (set() if ordered else {"concurrent"})
        mine = self.facts()
        differing = [name for name in mine if name not in free and earlier.get(name) != mine[name]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"The sweep in `{self.folder}` began with `{name}` {earlier.get(name)!r}, not "
                f"{mine[name]!r}. Start the sweep with the same `{name}` as before, or name "
                "another folder."
            )
        if self.trials < earlier.get("trials", 0):
            raise ValueError(
                f"The sweep in `{self.folder}` began with {earlier['trials']} trials, and a "
                f"restart can have more but not fewer, got {self.trials}. Pass at least as many, "
                "or name another folder."
            )


def check_numbers(*, concurrent: Any, trials: Any, keep: Any) -> None:
    """Checks that these are whole numbers of at least 1. `trials` and `keep` may be None.

    Raises:
        TypeError: One of them isn't a whole number.
        ValueError: One of them is below 1.
    """
    for name, value in (("concurrent", concurrent), ("trials", trials), ("keep", keep)):
        if value is not None or name == "concurrent":
            check_count(f"`{name}`", value, least=1)


def check_metric(metric: Any, mode: Any) -> None:
    """Checks the arguments that determine how trials are compared.

    Raises:
        TypeError: `metric` isn't a string.
        ValueError: `metric` is empty, or `mode` is invalid.
    """
    if not isinstance(metric, str):
        raise TypeError(
            f"`metric` must be the name under which trials log it, such as `accuracy`, got "
            f"{metric!r}."
        )
    if not metric:
        raise ValueError(
            "`metric` is empty. Pass the name under which trials log it, such as `accuracy`."
        )
    if mode not in (None, "max", "min"):
        raise ValueError(f"`mode` must be `max` or `min`, got {mode!r}.")


def on_every_rank(world: World, what: str, work: Callable[[], T]) -> T:
    """Runs `work` on every rank. If it raises on any rank, every rank raises. Waits for all ranks.

    Raises:
        Exception: This rank's own error, if `work` raised here. Otherwise, an error with the text
            of the first rank on which it raised, of the same type if that's TypeError or
            ValueError, or else a JobError.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    mine = None if error is None else [type(error).__name__, str(error)]
    with world.monitor(job="", step=0, segment=-1, what=what):
        everyone = gather(world.control, mine)
    if error is not None:
        raise error
    for rank, each in enumerate(everyone):
        if each is not None:
            kind = next((kind for kind in _KINDS if kind.__name__ == each[0]), JobError)
            raise kind(f"On rank {rank}: {each[1]}")
    return result  # type: ignore[return-value]


def check_same(world: World, facts: Mapping[str, Any]) -> None:
    """Checks that all ranks have the same settings. Waits for all ranks.

    Raises:
        JobError: On every rank: a setting differs.
    """
    with world.monitor(job="", step=0, segment=-1, what="start of the sweep"):
        everyone = gather(world.control, facts)
    for rank, each in enumerate(everyone):
        for name, value in everyone[0].items():
            if each.get(name) != value:
                raise JobError(
                    f"Ranks 0 and {rank} want different sweeps: `{name}` is {json.dumps(value)} and"
                    f" {json.dumps(each.get(name))}. Call `jaxcross.sweep` with the same arguments "
                    "on every rank."
                )
