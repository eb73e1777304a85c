"""`Plan`: which jobs run together, in how many pieces, at which shares, and how fast."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from jaxcross.interleave.policy import Policy, RoundRobin, Weighted
from jaxcross.plan import bounded
from jaxcross.report.summary import LOST_TIME
from jaxcross.report.units import plural

if TYPE_CHECKING:
    from rich.console import Group

FORMAT = 1
MAX_FILE_BYTES = 100_000_000
MAX_NAME = 200
"""Longest name of a job, in characters."""
MAX_NUMBER = 2**63
_TURNS = ("round-robin", "weighted")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One job of a plan.

    Attributes:
        name: The job.
        pieces: Number of pieces into which its step is cut, for `cut=` of `crossover`; 1 is an
            uncut step.
        share: Its share under `Weighted`; 1 if the group takes turns round-robin.
        alone_s: Seconds of its step alone, with the cut that is fastest alone.
        step_s: Predicted seconds of its step in its group.
        compute_s: Seconds of device time per step, measured alone.
        exchange_s: Seconds of link time per step, measured alone.
        estimated: Whether the times of its pieces are estimates, because there was a profile of the
            whole step but none of this cut.

    Raises:
        ValueError: The name is empty, too long or not printable, or a number is out of range.
    """

    name: str
    pieces: int
    share: float
    alone_s: float
    step_s: float
    compute_s: float
    exchange_s: float
    estimated: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise ValueError(
                f"the name of a job has 1 to {MAX_NAME} printable characters, got {self.name!r:.60}"
            )
        positive = (self.pieces, self.share, self.alone_s, self.step_s)
        if not all(0 < number < math.inf for number in positive):
            raise ValueError(
                f"`pieces`, `share` and the seconds of a step of `{self.name}` must be positive"
            )
        if not all(0 <= number < math.inf for number in (self.compute_s, self.exchange_s)):
            raise ValueError(f"the seconds of `{self.name}` must be finite and not negative")

    @property
    def speed(self) -> float:
        """Predicted speed in the group, relative to the job's speed alone."""
        return self.alone_s / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """Jobs that share the same ranks, in the order in which a `Runner` must add them.

    Attributes:
        jobs: The jobs.
        ranks: Number of ranks that they share.
        turns: `round-robin` or `weighted`.
        period_s: Predicted seconds of a round, as in a report; None if the jobs have no round.
        bound_s: Lower bound of that round, as in a report.
        lost_s: Predicted time between the bound and the period, by cause, as in a report.
        memory_bytes: Device memory that a rank needs; None if a profile doesn't say.
        why: One sentence about why a job runs alone; may be empty.

    Raises:
        ValueError: There are no jobs or ranks, or a number is out of range.
    """

    jobs: tuple[PlannedJob, ...]
    ranks: int
    turns: Literal["round-robin", "weighted"] = "round-robin"
    period_s: float | None = None
    bound_s: float | None = None
    lost_s: Mapping[str, float]
    memory_bytes: int | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if not self.jobs or self.ranks < 1 or self.turns not in _TURNS:
            raise ValueError(
                f"a group has jobs, at least 1 rank, and turns of {' or '.join(_TURNS)}"
            )
        numbers = (
            self.period_s or 0,
            self.bound_s or 0,
            self.memory_bytes or 0,
            *self.lost_s.values(),
        )
        if (
            not all(0 <= number < math.inf for number in numbers)
            or not self.lost_s.keys() <= LOST_TIME.keys()
        ):
            raise ValueError(
                f"the times and bytes of the group of `{self.jobs[0].name}` are out of range"
            )

    @property
    def policy(self) -> Policy:
        """The policy for a `Runner` that adds the jobs in this order."""
        if self.turns == "round-robin":
            return RoundRobin()
        return Weighted(tuple(job.share for job in self.jobs))

    @property
    def progress(self) -> float:
        """Steps of all jobs in the time in which one of them makes one step alone. 1 means no gain
        over running one job after the other.
        """
        return math.fsum(job.speed for job in self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which jobs share ranks, and how they take turns there; `print` shows it as a table.

    Attributes:
        groups: The groups. Each needs its own ranks.
        memory_bytes: Device memory per rank that the plan stays within; None if there is no limit.
        notes: Remarks about the numbers.

    Raises:
        ValueError: Two jobs have the same name.

    Example:
        >>> plan = jaxcross.plan.make(profiles, memory="80GB")  # doctest: +SKIP
        >>> runner = jaxcross.Runner(world, plan.group_of("small").policy)  # doctest: +SKIP
    """

    groups: tuple[PlannedGroup, ...]
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = Counter(job.name for group in self.groups for job in group.jobs)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(f"two jobs of the plan have the name `{twice[0]}`")

    @property
    def ranks(self) -> int:
        """Number of ranks of all groups together."""
        return sum(group.ranks for group in self.groups)

    @property
    def progress(self) -> float:
        """Steps relative to running one job at a time on the same ranks, averaged over ranks."""
        if not self.groups:
            return 1.0
        return math.fsum(group.ranks * group.progress for group in self.groups) / self.ranks

    def group_of(self, job: str) -> PlannedGroup:
        """Returns the group of a job.

        Raises:
            ValueError: The plan has no such job.
        """
        for group in self.groups:
            if any(each.name == job for each in group.jobs):
                return group
        raise ValueError(f"the plan has no job `{job}`")

    def as_data(self) -> dict[str, Any]:
        """Returns the plan as plain data, as in its file."""
        return {"format": FORMAT, **json.loads(json.dumps(asdict(self)))}

    def to_json(self, path: str | Path) -> Path:
        """Writes the plan; `load` reads it back without loss."""
        path = Path(path)
        path.write_text(json.dumps(self.as_data(), allow_nan=False, indent=1))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan from JSON, or from TOML with the same keys if the name ends in `.toml`.

        Raises:
            ValueError: The file holds something else, or is larger than a plan can be.
            OSError: The file can't be read.
        """
        path = Path(path)
        data = tomllib.loads if path.suffix == ".toml" else json.loads
        return bounded.load(
            path, "a plan of jaxcross", lambda text: cls.from_data(data(text)), most=MAX_FILE_BYTES
        )

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Reads what `as_data` returned. Fields that may be None may be missing.

        Raises:
            ValueError: `data` is something else.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ValueError(f"this version reads plans of format {FORMAT}")
        return cls(
            groups=tuple(map(_group, _read(data, "groups", list))),
            memory_bytes=_read(data, "memory_bytes", int, default=None),
            notes=tuple(_texts(_read(data, "notes", list, default=[]))),
        )

    def __rich__(self) -> Group:
        """The table, for `rich.print`."""
        from jaxcross.plan.table import render

        return render(self)

    def __repr__(self) -> str:
        jobs = sum(len(group.jobs) for group in self.groups)
        return (
            f"<Plan of {plural(jobs, 'job')} in {plural(len(self.groups), 'group')} on "
            f"{plural(self.ranks, 'rank')}; print() shows the table>"
        )

    def __str__(self) -> str:
        from jaxcross.plan.table import render
        from jaxcross.report.table import printed

        return printed(render(self))

    def _repr_html_(self) -> str:
        from jaxcross.report.table import as_html

        return as_html(self.__rich__())


def _group(data: Any) -> PlannedGroup:
    lost = _read(data, "lost_s", Mapping, default={})
    return PlannedGroup(
        jobs=tuple(map(_job, _read(data, "jobs", list))),
        ranks=_read(data, "ranks", int),
        turns=_read(data, "turns", str, default="round-robin"),
        period_s=_read(data, "period_s", float, default=None),
        bound_s=_read(data, "bound_s", float, default=None),
        lost_s={cause: _read(lost, cause, float) for cause in lost},
        memory_bytes=_read(data, "memory_bytes", int, default=None),
        why=_read(data, "why", str, default=""),
    )


def _job(data: Any) -> PlannedJob:
    return PlannedJob(
        name=_read(data, "name", str),
        pieces=_read(data, "pieces", int),
        share=_read(data, "share", float),
        alone_s=_read(data, "alone_s", float),
        step_s=_read(data, "step_s", float),
        compute_s=_read(data, "compute_s", float),
        exchange_s=_read(data, "exchange_s", float),
        estimated=_read(data, "estimated", bool, default=False),
    )


def _texts(several: list[Any]) -> list[str]:
    if not all(isinstance(text, str) for text in several):
        raise ValueError("`notes` holds texts")
    return several


_MISSING = object()


def _read(table: Any, key: str, kind: type, *, default: Any = _MISSING) -> Any:
    """Returns an entry of this type. Whole numbers count as floats, but booleans don't."""
    if not isinstance(table, Mapping):
        raise ValueError(f"where `{key}` is looked for there is {table!r:.60}")
    value = table.get(key)
    if value is None and default is not _MISSING:
        return default
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise ValueError(f"`{key}` is larger than any number of a plan")
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"`{key}` is {'missing' if value is None else format(repr(value), '.60')}")
    return value
