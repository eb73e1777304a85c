"""`Profile`: how long each segment of a job's step takes when the job runs alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, Self

from jaxcross import _schema
from jaxcross._arguments import check_type
from jaxcross.interleave import Span, StepGraph
from jaxcross.jobs import JobMemory
from jaxcross.report import Report, in_lane_order, plural, seconds, shortest_exchanges

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
        seconds: Seconds per segment: device time for computation, and link time for exchanges,
            excluding the time spent waiting for slower ranks.
        host_s: Seconds between steps, during which the job's thread does something else, e.g. loads
            data or writes logs.
        ranks: Number of ranks in the measurement.
        link: Description of the link between the ranks.
        mbps: Bandwidth of the link in Mbit/s; None if unknown.
        memory: The job's memory use per rank; None if unknown.
        platform: JAX's name for the devices, such as `cpu`; "" if unknown.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: The numbers don't match the graph, or are negative or non-finite.
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

        Segment times are averaged over all of the job's steps except the first. For a computation,
        we take the mean of the slowest rank. For an exchange, the clock starts when the last rank
        arrives, so the time that the others spend waiting for it isn't included.

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
        seconds, host_s = segment_times(report.spans, name, graph)
        return cls(
            name=name,
            graph=graph,
            seconds=seconds,
            host_s=host_s,
            ranks=len(report.ranks),
            link=report.link,
            mbps=mbps,
            memory=JobMemory.from_data(facts.program["memory"]),
            platform=report.placement.partition(",")[0],
        )

    def __repr__(self) -> str:
        return (
            f"<Profile of `{self.name}` on {plural(self.ranks, 'rank')}: {seconds(self.compute_s)} "
            f"of computation and {seconds(self.exchange_s)} of exchange in "
            f"{plural(len(self.seconds), 'segment')}>"
        )

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
        before = math.fsum(
            s for s, kind in zip(self.seconds[:exchange], kinds, strict=False) if kind == "compute"
        )
        after = self.compute_s - before
        backward = before * 2 / 3 / pieces
        seconds = [before / 3 + backward, *(backward for _ in range(pieces - 1))]
        last = 2 * pieces
        piece: tuple[Literal["compute", "collective"], ...] = ("compute", "collective")
        needs = [need for i in range(pieces) for need in (((2 * i - 2,) if i else ()), (2 * i,))]
        graph = StepGraph(
            kinds=(*piece * pieces, "compute"),
            needs=(*needs, tuple(range(1, last, 2))),
            after_commit=frozenset({last}),
            nbytes=(*(n for _ in range(pieces) for n in (0, nbytes[exchange] // pieces)), 0),
        )
        part = self.seconds[exchange] / pieces
        return replace(
            self, graph=graph, seconds=(*(s for own in seconds for s in (own, part)), after)
        )

    @property
    def compute_s(self) -> float:
        """Device time per step in seconds; c in the formulas."""
        return self._sum("compute")

    @property
    def exchange_s(self) -> float:
        """Link time per step in seconds; m in the formulas."""
        return self._sum("collective")

    def _sum(self, kind: str) -> float:
        return math.fsum(
            s for s, own in zip(self.seconds, self.graph.kinds, strict=True) if own == kind
        )

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
            if each.name not in data and each.name not in ("memory", "platform"):
                raise ValueError(f"`{each.name}` is missing")
        memory = data.get("memory")
        parts = {
            "graph": StepGraph.from_data(data["graph"]),
            "memory": None if memory is None else JobMemory.from_data(memory),
        }
        return _schema.record({**data, **parts}, cls)


def segment_times(
    spans: Iterable[Span], name: str, graph: StepGraph
) -> tuple[tuple[float, ...], float]:
    """Returns the mean duration of each segment and the median time between steps, in seconds.

    For each segment, the slowest rank's mean counts. The time between steps runs from a step's
    return to the job's next call, during which the job might load data or write logs. Each rank's
    first step is left out of both, because it takes longer than the others.

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
    seconds = []
    for index, kind in enumerate(graph.kinds):
        of_ranks = []
        for found in on_rank.values():
            # The first step takes longer, because it has to be compiled and touches every page of
            # memory for the first time.
            of_steps = [step[index] for step in found[1:]]
            if kind == "compute":
                of_ranks.append(fmean(span.end_ns - span.start_ns for span in of_steps))
            else:
                of_ranks.append(
                    fmean(arrived[span.job, span.number, span.segment] for span in of_steps)
                )
        seconds.append(max(of_ranks) / 1e9)
    gaps = [
        max(
            0,
            min(span.ready_ns for span in after.values()) - max(map(_returned_ns, before.values())),
        )
        for found in on_rank.values()
        for before, after in pairwise(found[1:])
    ]
    return tuple(seconds), median(gaps) / 1e9


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
