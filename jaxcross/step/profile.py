"""`Profile`: how long each segment of a job's step takes when the job runs alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any, Literal, NamedTuple, Self

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross import _schema
from jaxcross._arguments import check_type
from jaxcross.interleave import Span, StepGraph
from jaxcross.jobs import JobMemory
from jaxcross.report import (
    Report,
    as_html,
    in_lane_order,
    plural,
    printed_text,
    seconds,
    shortest_exchanges,
)

FORMAT = 1
MAX_FILE_BYTES = 10_000_000
MIN_STEPS = 3
MOST = 0.9
"""At least this share of a job's steps must have run the same program.

Otherwise the mean times would mix several programs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The cost of one step of a job, measured while it ran alone.

    The times are only valid for the ranks and the link they were measured on.

    Attributes:
        name: Name of the job.
        graph: The kind of each segment, its dependencies, and how many bytes it exchanges.
        seconds: Seconds per segment on the slowest rank: device time for computation, and link time
            for exchanges, excluding the time spent waiting for slower ranks.
        host_s: Seconds between steps, during which the job's thread does something else, e.g. loads
            data or writes logs.
        ranks: Number of ranks in the measurement.
        link: Description of the link between the ranks.
        mbps: Bandwidth of the link in Mbit/s; None if unknown.
        memory: The job's memory use per rank; None if unknown.
        platform: JAX's name for the devices, such as `cpu`; "" if unknown.
        rank_seconds: The seconds per segment on each rank. `seconds` is their maximum. An exchange
            takes equally long on all ranks. Empty if the measurement had a single rank, or if we
            only know the slowest rank's times; all ranks are then assumed to be equally fast.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: The numbers don't match the graph or each other, or are negative or non-finite.
    """

    name: str
    graph: StepGraph
    seconds: tuple[float, ...]
    host_s: float = 0.0
    ranks: int = 1
    link: str = ""
    mbps: float | None = None
    memory: JobMemory | None = None
    platform: str = ""
    rank_seconds: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        check_type(self.name, str, "`name` of a profile")
        check_type(self.graph, StepGraph, f"`graph` of `{self.name}`")
        check_type(self.host_s, Real, f"`host_s` of `{self.name}`")
        check_type(self.ranks, Integral, f"`ranks` of `{self.name}`")
        check_type(self.link, str, f"`link` of `{self.name}`")
        check_type(self.mbps, Real | None, f"`mbps` of `{self.name}`")
        check_type(self.memory, JobMemory | None, f"`memory` of `{self.name}`")
        check_type(self.platform, str, f"`platform` of `{self.name}`")
        self._check_numbers("seconds", self.seconds)
        self._check_numbers("host_s", (self.host_s,))
        self._check_numbers("mbps", () if self.mbps is None else (self.mbps,))
        if not 1 <= self.ranks <= _schema.MOST:
            raise ValueError(
                f"`ranks` of `{self.name}` must be from 1 to 2**63 - 1, got {self.ranks!r:.60}"
            )
        if len(self.seconds) != len(self.graph.kinds):
            raise ValueError(
                f"`seconds` of `{self.name}` must have one time per segment, but it has "
                f"{len(self.graph.kinds)} segments and {len(self.seconds)} times"
            )
        if not self.seconds:
            raise ValueError(f"`graph` of `{self.name}` must have at least one segment, got none")
        self._check_ranks()

    def _check_ranks(self) -> None:
        if not self.rank_seconds:
            return
        for own in self.rank_seconds:
            self._check_numbers("rank_seconds", own)
        shape = (len(self.rank_seconds), {len(own) for own in self.rank_seconds})
        if shape != (self.ranks, {len(self.seconds)}):
            raise ValueError(
                f"`rank_seconds` of `{self.name}` must have {len(self.seconds)} times for each of "
                f"its {self.ranks} ranks, one per segment, got rows of "
                f"{', '.join(str(len(own)) for own in self.rank_seconds)} times. If you changed "
                "`ranks`, pass `rank_seconds=()`"
            )
        if tuple(map(max, zip(*self.rank_seconds, strict=True))) != tuple(self.seconds):
            raise ValueError(
                f"`seconds` of `{self.name}` must be the maximum of `rank_seconds` over its ranks. "
                "If you changed `seconds`, change `rank_seconds` as well, or pass `rank_seconds=()`"
            )

    def _check_numbers(self, field: str, numbers: Sequence[float]) -> None:
        what = f"`{field}` of `{self.name}`"
        try:
            valid = all(math.isfinite(number) and number >= 0 for number in numbers)
        except TypeError:
            raise TypeError(f"{what} must be numbers, got {getattr(self, field)!r:.60}") from None
        if not valid:
            raise ValueError(
                f"{what} must be finite and not negative, got {getattr(self, field)!r:.60}"
            )

    @classmethod
    def whole(
        cls, name: str, *, compute_s: float, exchange_s: float, nbytes: int = 0, ranks: int = 1
    ) -> Self:
        """Returns the profile of an uncut step: computation, one exchange, and an instant update.

        Raises:
            ValueError: A time is negative or non-finite.
        """
        graph = StepGraph(
            kinds=("compute", "collective", "compute"),
            needs=((), (0,), (1,)),
            after_commit=frozenset({2}),
            nbytes=(0, nbytes, 0),
        )
        return cls(name=name, graph=graph, seconds=(compute_s, exchange_s, 0.0), ranks=ranks)

    @classmethod
    def of(cls, report: Report, name: str, *, mbps: float | None = None) -> Self:
        """Returns the profile of a job that ran alone, or took turns with other jobs.

        Segment times are averaged over all of the job's steps except the first, for each rank. For
        an exchange, the clock starts when the last rank arrives, so the time that the others spend
        waiting for it isn't included.

        Args:
            report: The run's report, possibly loaded from a file.
            name: Name of the job.
            mbps: Bandwidth of the link in Mbit/s, if known.

        Raises:
            ValueError: There is no such job, it ran alongside other jobs, it took fewer than three
                steps, or its steps ran several programs.
        """
        facts = next((job for job in report.jobs if job.name == name), None)
        if facts is None:
            raise ValueError(
                f"the report has no job `{name}`; its jobs are "
                f"{', '.join(job.name for job in report.jobs)}"
            )
        if len(report.jobs) > 1 and not report.rounds.in_turn:
            raise ValueError(
                f"`{name}` ran alongside other jobs, but a profile must be of a job that runs "
                "alone. Use the report of a run with a single job or with "
                "`policy=jaxcross.Sequential()`."
            )
        if facts.program is None:
            raise ValueError(
                f"the report has no program of job `{name}`, because the job has not made a step "
                "with exchanges. Measure a run in which it has"
            )
        graph = StepGraph.from_data(facts.program.get("graph"))
        if facts.program["steps"] < MOST * facts.steps:
            raise ValueError(
                f"the steps of job `{name}` ran several programs, but a profile describes a single "
                "one. Measure a run in which all arguments of the step keep their shapes and types"
            )
        times = segment_times(report.spans, name, graph)
        return cls(
            name=name,
            graph=graph,
            seconds=times.seconds,
            host_s=times.host_s,
            ranks=len(report.ranks),
            link=report.link,
            mbps=mbps,
            memory=JobMemory.from_data(facts.program["memory"]),
            platform=report.placement.partition(",")[0],
            rank_seconds=times.rank_seconds
            if 1 < len(report.ranks) == len(times.rank_seconds)
            else (),
        )

    def __repr__(self) -> str:
        return (
            f"<Profile of `{self.name}` on {plural(self.ranks, 'rank')}: {seconds(self.compute_s)} "
            f"of computation and {seconds(self.exchange_s)} of exchange in "
            f"{plural(len(self.seconds), 'segment')}; print() shows the table>"
        )

    def __str__(self) -> str:
        return printed_text(_table(self))

    def _repr_html_(self) -> str:
        return as_html(_table(self))

    def cut_evenly(self, pieces: int) -> Self:
        """Estimates what the profile would be with the backward pass cut into equal segments.

        Nothing is measured. We assume that the backward pass takes twice as long as the forward
        pass, i.e. two thirds of the computation before the exchange, and that it can be cut into
        equally long segments. If you can run the cut step, measuring its profile is more accurate.

        Args:
            pieces: Number of collective segments.

        Raises:
            ValueError: `pieces` is below 1, or the step doesn't have exactly one exchange.
        """
        if pieces < 1:
            raise ValueError(f"`pieces` of `cut_evenly` must be at least 1, got {pieces}")
        if pieces == 1:
            return self
        if len(self.graph.collectives) != 1:
            raise ValueError(
                f"`{self.name}` has {len(self.graph.collectives)} exchanges, but only a step with "
                'exactly one can be cut evenly. Measure the step with `cut="whole"`'
            )
        (exchange,) = self.graph.collectives
        kinds = self.graph.kinds
        nbytes = self.graph.nbytes or (0,) * len(self.graph.kinds)
        last = 2 * pieces
        piece: tuple[Literal["compute", "collective"], ...] = ("compute", "collective")
        needs = [need for i in range(pieces) for need in (((2 * i - 2,) if i else ()), (2 * i,))]
        graph = StepGraph(
            kinds=(*piece * pieces, "compute"),
            needs=(*needs, tuple(range(1, last, 2))),
            after_commit=frozenset({last}),
            nbytes=(*(n for _ in range(pieces) for n in (0, nbytes[exchange] // pieces)), 0),
        )

        def cut(seconds: Sequence[float]) -> tuple[float, ...]:
            before = math.fsum(
                s for s, kind in zip(seconds[:exchange], kinds, strict=False) if kind == "compute"
            )
            after = self._sum(seconds, "compute") - before
            backward = before * 2 / 3 / pieces
            part = seconds[exchange] / pieces
            return (before / 3 + backward, *(part, backward) * (pieces - 1), part, after)

        return self._with_seconds(graph, cut)

    def scaled(self, kind: Literal["compute", "collective"], factor: float) -> Self:
        """Returns a copy whose segments of this kind take `factor` times as long, on all ranks."""
        kinds = self.graph.kinds
        return self._with_seconds(
            self.graph,
            lambda seconds: tuple(
                s * factor if own == kind else s for s, own in zip(seconds, kinds, strict=True)
            ),
        )

    def evened(self) -> Self:
        """Returns a copy in which no rank is slower than the median rank in any computation.

        The median of an even number of ranks is the lower of the two middle ones, i.e. the faster
        one if there are two ranks.
        """
        middle = tuple(map(median_low, zip(*self.rank_seconds, strict=True))) or self.seconds
        return self._with_seconds(self.graph, lambda seconds: tuple(map(min, seconds, middle)))

    def _with_seconds(
        self,
        graph: StepGraph,
        change: Callable[[Sequence[float]], tuple[float, ...]],
    ) -> Self:
        """Returns a copy with different times on each rank."""
        ranks = tuple(map(change, self.rank_seconds))
        slowest = tuple(map(max, zip(*ranks, strict=True))) if ranks else change(self.seconds)
        return replace(self, graph=graph, seconds=slowest, rank_seconds=ranks)

    def on_rank(self, rank: int) -> tuple[float, ...]:
        """Returns the seconds per segment on a rank."""
        return self.rank_seconds[rank] if self.rank_seconds else self.seconds

    @property
    def rank_compute_s(self) -> tuple[float, ...]:
        """Device time per step in seconds on each rank; empty like `rank_seconds`."""
        return tuple(self._sum(own, "compute") for own in self.rank_seconds)

    @property
    def compute_s(self) -> float:
        """Device time per step in seconds; c in the formulas."""
        return self._sum(self.seconds, "compute")

    @property
    def exchange_s(self) -> float:
        """Link time per step in seconds; m in the formulas."""
        return self._sum(self.seconds, "collective")

    def _sum(self, seconds: Sequence[float], kind: str) -> float:
        return math.fsum(s for s, own in zip(seconds, self.graph.kinds, strict=True) if own == kind)

    def to_json(self, path: str | Path) -> Path:
        """Writes the profile to a file that `load` can read back losslessly. Returns its path."""
        return _schema.save(path, self.as_data())

    def as_data(self) -> dict[str, Any]:
        """Returns the profile as plain data, just as `to_json` writes it."""
        return {
            "format": FORMAT,
            "name": self.name,
            "graph": self.graph.as_data(),
            "seconds": [*self.seconds],
            "host_s": self.host_s,
            "ranks": self.ranks,
            "link": self.link,
            "mbps": self.mbps,
            "memory": None if self.memory is None else asdict(self.memory),
            "platform": self.platform,
            "rank_seconds": [[*own] for own in self.rank_seconds],
        }

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file written by `to_json`.

        Raises:
            ValueError: The file isn't a profile, or is too large to be one.
            OSError: The file can't be read.
        """
        what = "a profile of jaxcross"
        return _schema.load(Path(path), what, cls.from_data, most=MAX_FILE_BYTES)

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """The inverse of `as_data`.

        Raises:
            ValueError: `data` isn't a profile.
        """
        _schema.check_format(data, FORMAT, "profiles")
        for each in fields(cls):
            if each.name not in data and each.name not in ("memory", "platform", "rank_seconds"):
                raise ValueError(f"`{each.name}` is missing")
        memory = data.get("memory")
        parts = {
            "graph": StepGraph.from_data(data["graph"]),
            "memory": None if memory is None else JobMemory.from_data(memory),
        }
        return _schema.record({**data, **parts}, cls)


def _table(profile: Profile) -> Group:
    """Returns a title, and a table with one row per segment."""
    from jaxcross.program import human_bytes  # loads JAX, which a profile doesn't need

    graph = profile.graph
    title = (
        f"{profile.name} on {plural(profile.ranks, 'rank')}: {seconds(profile.compute_s)} of "
        f"computation and {seconds(profile.exchange_s)} of exchange per step"
    )
    link = f", {profile.link}" if profile.link else ""
    table = Table()
    table.add_column("segment", justify="right")
    table.add_column("kind")
    table.add_column("time", justify="right")
    table.add_column("bytes", justify="right")
    nbytes = graph.nbytes or (0,) * len(graph.kinds)
    for number, kind in enumerate(graph.kinds):
        table.add_row(
            str(number),
            kind,
            seconds(profile.seconds[number]),
            human_bytes(nbytes[number]) if kind == "collective" else "",
        )
    return Group(Text(f"{title}{link}", style="bold"), table)


class SegmentTimes(NamedTuple):
    """How long a job's segments took in a run, in seconds.

    Attributes:
        rank_seconds: The mean duration of each segment, on each rank.
        host_s: The median time between two steps.
    """

    rank_seconds: tuple[tuple[float, ...], ...]
    host_s: float

    @property
    def seconds(self) -> tuple[float, ...]:
        """The durations on the slowest rank of each segment."""
        return tuple(map(max, zip(*self.rank_seconds, strict=True)))


def segment_times(spans: Iterable[Span], name: str, graph: StepGraph) -> SegmentTimes:
    """Returns the mean duration of each segment and the median time between steps.

    The time between steps runs from a step's return to the job's next call, during which the job
    might load data or write logs. Each rank's first step is left out of both, because it takes
    longer than the others.

    Args:
        spans: The spans of a run.
        name: Name of the job.
        graph: The segments of the job's step.

    Raises:
        ValueError: A rank has fewer than three complete steps.
    """
    spans = in_lane_order(span for span in spans if span.job == name and span.in_step)
    arrived = shortest_exchanges(spans)
    steps: dict[tuple[int, int], dict[int, Span]] = defaultdict(dict)
    for span in spans:
        if span.kind in ("compute", "collective"):
            steps[span.rank, span.number][span.segment] = span
    whole = {key: found for key, found in sorted(steps.items()) if len(found) == len(graph.kinds)}
    on_rank: dict[int, list[dict[int, Span]]] = defaultdict(list)
    for (rank, _), found in whole.items():
        on_rank[rank].append(found)
    if min((len(found) for found in on_rank.values()), default=0) < MIN_STEPS:
        raise ValueError(
            f"the run of job `{name}` has fewer than {MIN_STEPS} whole steps on some rank, but a "
            "profile needs that many. Measure a longer run"
        )
    seconds: list[list[float]] = []
    for index, kind in enumerate(graph.kinds):
        of_ranks = []
        for found in on_rank.values():
            # The first step takes longer, because it has to be compiled and touches every page of
            # memory for the first time.
            of_steps = [step[index] for step in found[1:]]
            if kind == "compute":
                of_ranks.append(fmean(span.end_ns - span.start_ns for span in of_steps) / 1e9)
            else:
                of_ranks.append(
                    fmean(arrived[span.job, span.number, span.segment] for span in of_steps) / 1e9
                )
        if kind == "collective":
            # The ranks may have kept different numbers of steps, but an exchange is one event, so
            # it takes equally long on all of them.
            of_ranks = [max(of_ranks)] * len(of_ranks)
        seconds.append(of_ranks)
    gaps = [
        max(
            0,
            min(span.ready_ns for span in after.values()) - max(map(_returned_ns, before.values())),
        )
        for found in on_rank.values()
        for before, after in pairwise(found[1:])
    ]
    return SegmentTimes(tuple(zip(*seconds, strict=True)), median(gaps) / 1e9)


def _returned_ns(span: Span) -> int:
    """Returns the time at which the job's thread could move on after this segment.

    For a computation, that's when it was dispatched, since JAX runs computations asynchronously.
    """
    return span.ready_ns if span.kind == "compute" else span.end_ns


@dataclass(frozen=True, slots=True)
class ProfiledCut:
    """The fastest cut of a step that runs alone. Pass it as `crossover(cut=...)`.

    Returned by `jaxcross.plan.cut`.

    Attributes:
        pieces: Number of collective segments.
        profiles: The profiles the choice is based on. They must belong to the step that you pass to
            `crossover`.
    """

    pieces: int
    profiles: tuple[Profile, ...] = field(repr=False)
