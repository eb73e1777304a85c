"""Settings of a sweep that must be the same on all ranks, and whenever the sweep is restarted."""

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
    """The settings of a sweep. Identical across ranks, except for the folder.

    Attributes:
        metric: The name of the metric by which trials are compared.
        mode: Whether larger (`max`) or smaller (`min`) values are better.
        concurrent: Number of trials at a time.
        trials: Number of trials.
        seed: The seed of `Draws`; 0 for other searches.
        kind: `list` or `study`.
        pruner: The name of the pruner's class; empty without a pruner.
        keep: The number of trials whose checkpoints are kept; None for all.
        folder: The folder of the sweep; None to keep nothing.
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
        """The folder of the trials' states."""
        return None if self.folder is None else self.folder / "checkpoints"

    def facts(self) -> dict[str, Any]:
        """Returns the settings that ranks compare and that are written to disk."""
        return {
            name: getattr(self, name)
            for name in ("metric", "mode", "concurrent", "trials", "seed", "kind", "pruner", "keep")
        }

    def check_restart(self, earlier: Mapping[str, Any], *, ordered: bool) -> None:
        """Checks that a sweep that began with other settings can continue with these.

        Raises:
            ValueError: A setting differs that must not, or there are fewer trials than before.
        """
        free = {"keep", "trials"} | (set() if ordered else {"concurrent"})
        mine = self.facts()
        differing = [name for name in mine if name not in free and earlier.get(name) != mine[name]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"The sweep in `{self.folder}` began with `{name}` {earlier.get(name)!r}, not "
                f"{mine[name]!r}. Start it as before, or name another folder."
            )
        if self.trials < earlier.get("trials", 0):
            raise ValueError(
                f"The sweep in `{self.folder}` began with {earlier['trials']} trials, and can have "
                f"more but not fewer, got {self.trials}."
            )


def check_numbers(*, concurrent: Any, trials: Any, keep: Any) -> None:
    """Checks that these are whole numbers of at least 1; `trials` and `keep` may be None.

    Raises:
        TypeError: A number isn't a whole number.
        ValueError: A number is too small.
    """
    for name, value in (("concurrent", concurrent), ("trials", trials), ("keep", keep)):
        if value is not None or name == "concurrent":
            check_count(f"`{name}`", value, least=1)


def check_metric(metric: Any, mode: Any) -> None:
    """Checks the arguments that say how trials are compared.

    Raises:
        TypeError: `metric` isn't a text.
        ValueError: `metric` is empty, or `mode` is invalid.
    """
    if not isinstance(metric, str):
        raise TypeError(
            f"`metric` must be the name under which trials log it, as `accuracy`, got {metric!r}."
        )
    if not metric:
        raise ValueError("`metric` is empty: name what trials log, as `accuracy`.")
    if mode not in (None, "max", "min"):
        raise ValueError(f"`mode` must be `max` or `min`, got {mode!r}.")


def on_every_rank(world: World, what: str, work: Callable[[], T]) -> T:
    """Runs `work` on every rank. If it raises on one rank, raises on all of them. Waits for all.

    Raises:
        Exception: This rank's own error, if there is one. Otherwise an error of the same kind and
            with the text of the first rank that has one.
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
        JobError: On every rank, if a setting differs.
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
