"""`Plan`: which jobs share ranks, how their steps are cut, their shares, and their speeds."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross import _schema
from jaxcross.errors import quoted, shortened
from jaxcross.interleave import Policy, RoundRobin, Weighted
from jaxcross.report import LOST_TIME, SlowRank, as_html, plural, printed_text, seconds

FORMAT = 1
MAX_FILE_BYTES = 100_000_000
MAX_NAME = 200
"""Maximum length of a job's name, in characters."""
_MOST_GROUPS = 50
"""Maximum number of groups that the table shows. The file contains all of them."""

Turns = Literal["round-robin", "weighted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One job of a plan.

    Attributes:
        name: Name of the job.
        pieces: Number of pieces into which its step is cut, to be passed to `crossover` as `cut=`.
            1 means that the step isn't cut.
        share: The job's share under the `Weighted` policy; 1 if the group runs round-robin.
        alone_s: Seconds per step when the job runs alone, with the cut that's fastest alone.
        step_s: Predicted seconds per step in its group.
        compute_s: Seconds of device time per step, measured alone.
        exchange_s: Seconds of link time per step, measured alone.
        estimated: Whether the times of the pieces are estimates, because there was only a profile
            of the whole step, not of this cut.
        rank_compute_s: Seconds of device time per step on each rank, measured alone. Empty if the
            profile doesn't have them, or if there's just one rank.

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
    rank_compute_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable():
            raise ValueError(
                f"the name of a job must be 1 to {MAX_NAME} printable characters, got "
                f"{self.name!r:.60}"
            )
        positive = (self.pieces, self.share, self.alone_s, self.step_s)
        if not all(0 < number < math.inf for number in positive) or self.pieces > _schema.MOST:
            raise ValueError(
                f"`pieces`, `share`, `alone_s` and `step_s` of job `{self.name}` must be positive, "
                f"finite and below 2**63, got {', '.join(f'{each!r:.30}' for each in positive)}"
            )
        if not all(0 <= number < math.inf for number in self.rank_compute_s):
            raise ValueError(
                f"`rank_compute_s` of job `{self.name}` must be finite and not negative, got "
                f"{self.rank_compute_s!r:.60}"
            )
        if not all(0 <= number < math.inf for number in (self.compute_s, self.exchange_s)):
            raise ValueError(
                f"`compute_s` and `exchange_s` of job `{self.name}` must be finite and not "
                f"negative, got {self.compute_s!r:.30} and {self.exchange_s!r:.30}"
            )

    @property
    def speed(self) -> float:
        """The predicted speed in the group, relative to the job's speed alone."""
        return self.alone_s / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """Jobs that share ranks, in the order in which you must add them to a `Runner`.

    Attributes:
        jobs: The jobs.
        ranks: Number of ranks that they share.
        turns: How the jobs take turns: `round-robin` or `weighted`.
        period_s: Predicted seconds of a round, as in a report; None if the jobs have no round.
        bound_s: Lower bound of that round, as in a report.
        lost_s: The predicted difference between period and bound, by cause, as in a report.
        memory_bytes: Device memory that a rank needs; None if a job's profile doesn't say.
        why: If the group is a single job, a sentence about why it runs alone. May be empty.
        slow_rank: The ranks that compute the longest, and what that costs. None if they aren't
            clearly slower than the median rank, or cost less than a twentieth of the time. Ranks
            have the numbers that they had when the profiles were measured.

    Raises:
        ValueError: There are no jobs or ranks, or a number is out of range.
    """

    jobs: tuple[PlannedJob, ...]
    ranks: int
    turns: Turns = "round-robin"
    period_s: float | None = None
    bound_s: float | None = None
    lost_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    why: str = ""
    slow_rank: SlowRank | None = None

    def __post_init__(self) -> None:
        turns = get_args(Turns)
        if not self.jobs or not 1 <= self.ranks <= _schema.MOST or self.turns not in turns:
            raise ValueError(
                "a group must have at least 1 job, at least 1 rank, and `turns` "
                f"{' or '.join(turns)}, got {len(self.jobs)} jobs, {self.ranks!r:.30} ranks and "
                f"`turns` {self.turns!r:.30}"
            )
        numbers = (
            self.period_s or 0,
            self.bound_s or 0,
            self.memory_bytes or 0,
            *self.lost_s.values(),
        )
        if (
            not all(0 <= number < math.inf for number in numbers)
            or not (self.memory_bytes or 0) <= _schema.MOST
            or not self.lost_s.keys() <= LOST_TIME.keys()
        ):
            raise ValueError(
                "`period_s`, `bound_s`, `memory_bytes` and `lost_s` of the group of "
                f"`{self.jobs[0].name}` must be finite and not negative, and the causes in "
                f"`lost_s` must be among {', '.join(LOST_TIME)}, got {self.period_s!r:.30}, "
                f"{self.bound_s!r:.30}, {self.memory_bytes!r:.30} and {dict(self.lost_s)!r:.200}"
            )

    @property
    def policy(self) -> Policy:
        """The policy for the `Runner`, if you add the jobs in this order."""
        if self.turns == "round-robin":
            return RoundRobin()
        return Weighted(tuple(job.share for job in self.jobs))

    @property
    def progress(self) -> float:
        """The sum of the jobs' speeds, each relative to the job's speed alone.

        At 1, sharing ranks gains nothing over running the jobs one after the other.
        """
        return math.fsum(job.speed for job in self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which jobs share ranks, and how they take turns. `print` shows it as a table.

    Attributes:
        groups: The groups of jobs. Each group needs its own ranks.
        memory_bytes: The limit on device memory per rank that the plan respects; None if there is
            no limit.
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
            raise ValueError(
                f"two jobs of the plan have the name `{twice[0]}`. Give each job a different name"
            )
        if self.memory_bytes is not None and not 0 <= self.memory_bytes <= _schema.MOST:
            raise ValueError(
                "`memory_bytes` of the plan must be from 0 to 2**63 - 1, got "
                f"{self.memory_bytes!r:.30}"
            )

    @property
    def ranks(self) -> int:
        """The total number of ranks of all groups."""
        return sum(group.ranks for group in self.groups)

    @property
    def progress(self) -> float:
        """How many times more steps the jobs make than if each group ran one job at a time."""
        if not self.groups:
            return 1.0
        return math.fsum(group.ranks * group.progress for group in self.groups) / self.ranks

    def group_of(self, job: str) -> PlannedGroup:
        """Returns the group that contains a job.

        Raises:
            ValueError: The plan has no such job.
        """
        for group in self.groups:
            if any(each.name == job for each in group.jobs):
                return group
        names = quoted(each.name for group in self.groups for each in group.jobs)
        raise ValueError(f"the plan has no job `{job}`. Its jobs are {shortened(names, 300)}.")

    def as_data(self) -> dict[str, Any]:
        """Returns the plan as plain data, in the format of its file."""
        return {"format": FORMAT, **json.loads(json.dumps(asdict(self)))}

    def to_json(self, path: str | Path) -> Path:
        """Writes the plan to a file. `load` reads it back without loss."""
        return _schema.save(path, self.as_data())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan from JSON, or from TOML with the same keys if the path ends in `.toml`.

        Raises:
            ValueError: The file doesn't contain a plan, or is larger than a plan can be.
            OSError: The file can't be read.
        """
        path = Path(path)
        parse = tomllib.loads if path.suffix == ".toml" else json.loads
        what = "a plan of jaxcross"
        return _schema.load(path, what, cls.from_data, most=MAX_FILE_BYTES, parse=parse)

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Reads what `as_data` returned. Fields that have a default may be missing.

        Raises:
            ValueError: `data` isn't a plan.
        """
        _schema.check_format(data, FORMAT, "plans")
        return _schema.record(data, cls)

    def __rich__(self) -> Group:
        """The table, for `rich.print`."""
        return _table(self)

    def __repr__(self) -> str:
        jobs = sum(len(group.jobs) for group in self.groups)
        return (
            f"<Plan of {plural(jobs, 'job')} in {plural(len(self.groups), 'group')} on "
            f"{plural(self.ranks, 'rank')}; print() shows the table>"
        )

    def __str__(self) -> str:
        return printed_text(_table(self))

    def _repr_html_(self) -> str:
        return as_html(_table(self))


def _table(plan: Plan) -> Group:
    """Returns a title, a table, and remarks about the numbers.

    The table has one row per job. Facts about the whole group, such as its memory, only appear in
    the row of the group's first job.

    If the table is too wide for the terminal, it's split into several tables, each of which repeats
    the first columns of the whole table. That's why the columns that identify a row (group and job)
    come first.
    """
    table = Table()
    table.add_column("group")
    table.add_column("job", overflow="fold")
    for name in ("ranks", "memory", "turns", "pieces", "speed", "gain", "step alone", "here"):
        table.add_column(name, justify="right")
    for number, group in enumerate(plan.groups[:_MOST_GROUPS]):
        for row in _rows(number, group):
            table.add_row(*row)
        table.add_section()
    return Group(Text(_title(plan), style="bold"), table, Text("\n".join(_footnotes(plan))))


def _rows(number: int, group: PlannedGroup) -> list[list[Text]]:
    from jaxcross.program import human_bytes  # loads JAX, which making a plan doesn't need

    several = len(group.jobs) > 1
    memory = "-" if group.memory_bytes is None else human_bytes(group.memory_bytes)
    facts = [str(group.ranks), memory]
    gain = f"{group.progress:.2f}" if several else "-"
    rows = []
    for job in group.jobs:
        pieces = "whole" if job.pieces == 1 else f"{'~' * job.estimated}{job.pieces}"
        turns = "in turn" if several else "alone"
        if group.turns == "weighted":
            turns = f"share {job.share:.2f}"
        times = [seconds(job.alone_s), seconds(job.step_s)]
        row = [str(number), job.name, *facts, turns, pieces, f"{job.speed:.2f}", gain, *times]
        rows.append([Text(cell) for cell in row])
        facts = [""] * len(facts)
        gain = ""
    return rows


def _title(plan: Plan) -> str:
    from jaxcross.program import human_bytes

    jobs = sum(len(group.jobs) for group in plan.groups)
    limit = (
        "" if plan.memory_bytes is None else f", {human_bytes(plan.memory_bytes)} of memory on each"
    )
    return (
        f"{plural(jobs, 'job')} in {plural(len(plan.groups), 'group')} on "
        f"{plural(plan.ranks, 'rank')}{limit}"
    )


def _footnotes(plan: Plan) -> list[str]:
    lines = [
        (
            f"On the same ranks the groups make {plan.progress:.2f} times as many steps as one job "
            "after the other."
        ),
        (
            "Step alone, here: time of a step alone, and as predicted in the group. Speed: that "
            "alone over that here."
        ),
        (
            "Gain: the group's steps over those of its jobs one after the other. Memory: of a "
            "rank, at its fullest."
        ),
    ]
    if any(job.estimated for group in plan.groups for job in group.jobs):
        lines.append(
            "~: pieces estimated from the whole step; a profile of the cut step makes the "
            "prediction better."
        )
    if len(plan.groups) > _MOST_GROUPS:
        lines.append(f"And {len(plan.groups) - _MOST_GROUPS} more groups, which the file has.")
    shown = enumerate(plan.groups[:_MOST_GROUPS])
    lines += [f"Group {n}: {group.why}." for n, group in shown if group.why]
    lines += [
        f"Group {n}: {group.slow_rank.text('the predicted time')}"
        for n, group in enumerate(plan.groups[:_MOST_GROUPS])
        if group.slow_rank is not None
    ]
    return [*lines, *plan.notes]
