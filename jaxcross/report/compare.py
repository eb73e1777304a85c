"""Compares two ways of running the same jobs. States the speed-up, or why there's none to state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross.errors import quoted
from jaxcross.report.html_table import as_html
from jaxcross.report.summary import LOST_TIME, JobTiming, TimeBreakdown
from jaxcross.report.table import WIDTH, a_round, cells, printed_text, totals, unit
from jaxcross.report.units import seconds, share

if TYPE_CHECKING:
    from jaxcross.report.report import Report

_LARGEST_RATIO = 1.2
"""Largest acceptable ratio between the compute times of the two ways, and between their exchange
times. Both do the same work, so a larger ratio means that something else was different; perhaps the
machine was busy during one of the runs.
"""
_LARGEST_EXCESS = 1.05
"""How far a speed-up may exceed what overlap alone can gain. Crossover also fills the short gaps
that jobs leave between their steps when they run one after the other, and measured times differ by
a few percent from round to round.
"""
NEGLIGIBLE = 0.01
"""Differences below this share of a round's work are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of two ways to run the same jobs. `print` shows both in one table.

    Attributes:
        first: The first way (usually the jobs one after the other), averaged over its runs.
        second: The second way, averaged over its runs.
        names: Names of the two ways.
        where: The device on which they ran, and the link between the ranks.
    """

    first: TimeBreakdown = field(repr=False)
    second: TimeBreakdown = field(repr=False)
    names: tuple[str, str]
    where: str = ""

    @classmethod
    def of(cls, first: Sequence[Report], second: Sequence[Report]) -> Comparison:
        """Compares two ways of running the jobs, each averaged over several runs.

        Interleave the runs (A, B, A, B, ...) instead of finishing all of A before starting B. That
        way, background load on the machine affects both about equally and the comparison stays
        fair.

        Raises:
            ValueError: One of the ways has no runs, or the runs don't all have the same jobs.
        """
        if not first or not second:
            raise ValueError(
                "a comparison needs at least one report in `first` and one in `second`, got "
                f"{len(first)} and {len(second)}"
            )
        jobs = {tuple(job.name for job in report.jobs) for report in (*first, *second)}
        if len(jobs) > 1:
            different = " and ".join(quoted(names) or "none" for names in sorted(jobs))
            raise ValueError(
                "all reports of a comparison must be of the same jobs, in the same order, got "
                f"{different}"
            )
        return cls(
            first=_pooled([report.rounds for report in first]),
            second=_pooled([report.rounds for report in second]),
            names=(first[0].policy or "first", second[0].policy or "second"),
            where=", ".join(filter(None, [second[0].placement, second[0].link])),
        )

    @property
    def ratio(self) -> float | None:
        """The measured speed-up: how many times shorter a job-step is in the second way."""
        one = self.first.s_per_step
        other = self.second.s_per_step
        return one / other if one is not None and other else None

    @property
    def most(self) -> float | None:
        """The largest speed-up that overlap could achieve, based on measurements of the first way.

        When jobs run one after the other, nothing overlaps, and a round (one step of each job)
        takes at least its compute time plus its exchange time. Perfect overlap would bring that
        down to the bound, e.g. to the compute time alone if that's the larger of the two. This
        property is the sum divided by the bound.

        None unless the first way runs the jobs one after the other.
        """
        bound = self.first.bound_s
        work = self.first.compute_s + self.first.exchange_s
        return work / bound if self.first.in_turn and bound else None

    @property
    def reason(self) -> str:
        """Why the ratio isn't a valid comparison of the two ways; "" if it is valid."""
        for name, breakdown in zip(self.names, (self.first, self.second), strict=True):
            if breakdown.period_s is None:
                return f"{name}: the jobs were never in steady state together"
        if self._other_work:
            rounds = " and ".join(
                f"{a_round(breakdown)} ({name})"
                for name, breakdown in zip(self.names, (self.first, self.second), strict=True)
            )
            return f"a round is {rounds}, which is not the same work"
        work = self.first.compute_s + self.first.exchange_s
        for what, one, other in (
            ("compute", self.first.compute_s, self.second.compute_s),
            ("exchange", self.first.exchange_s, self.second.exchange_s),
        ):
            if (
                max(one, other) > _LARGEST_RATIO * min(one, other)
                and abs(one - other) > NEGLIGIBLE * work
            ):
                return (
                    f"a round's {what} took {seconds(one)} ({self.names[0]}) and {seconds(other)} "
                    f"({self.names[1]}), over a fifth apart: the machine was busy, or jobs slow "
                    "each other down"
                )
        if self._excess > _LARGEST_EXCESS:
            return (
                f"{self.ratio:.2f} times as fast is more than the {self.most:.2f} times that "
                f"overlap can gain here: the rest is what {self.names[0]} lost between its steps, "
                "or a busy machine"
            )
        return ""

    @property
    def _excess(self) -> float:
        """The measured speed-up, relative to the largest one that overlap could achieve."""
        return self.ratio / self.most if self.ratio and self.most else 1.0

    @property
    def _other_work(self) -> bool:
        """Whether a round in one way is a different amount of work than in the other.

        A round consists of as many steps as there are jobs. When some jobs run faster than others,
        that can mean several steps of a fast job and only a fraction of a step of a slow one. Such
        a round can't be compared with one that has a step of every job.
        """
        pairs = zip(self.first.jobs, self.second.jobs, strict=True)
        more = sum(
            (a.compute_s + a.exchange_s) * (b.steps_per_round - a.steps_per_round) for a, b in pairs
        )
        return abs(more) > NEGLIGIBLE * (self.first.compute_s + self.first.exchange_s)

    @property
    def speedup(self) -> float | None:
        """The ratio, or None if there is a reason not to state it."""
        return None if self.reason else self.ratio

    @property
    def efficiency_alone(self) -> float | None:
        """The second way's efficiency, relative to the bound for undisturbed work.

        Compute and exchange slow each other down when they overlap. This inflates the bound that a
        run derives from its own timings, making its efficiency look better than it is. Here we take
        the bound from the first way, where nothing overlaps, and divide it by the duration of a
        round in the second.

        None if a round isn't the same amount of work in both ways, or if either number is missing.
        """
        if self._other_work or not self.first.bound_s or not self.second.period_s:
            return None
        return self.first.bound_s / self.second.period_s

    @property
    def headline(self) -> str:
        """One line that states the speed-up, or why there's none to state."""
        if self.speedup is None:
            return f"No speed-up stated: {self.reason}"
        one, other = (
            f"{seconds(breakdown.s_per_step)}{text} ({name})"
            for breakdown, text, name in zip(
                (self.first, self.second), (" per job-step", ""), self.names, strict=True
            )
        )
        return f"{self.speedup:.2f}x: {one}, {other}"

    def __rich__(self) -> Group:
        """One table with both runs, for `rich.print`."""
        title = Text(", ".join(filter(None, ["both runs", self.where])))
        table = Table()
        for name in ("run", "job"):
            table.add_column(name, no_wrap=True)
        rate = f"{unit(self.second.jobs)}/s"
        for name in ("steps", rate, "compute", "exchange", "hidden", "round", "bound", "speed-up"):
            table.add_column(name, justify="right")
        factors = (
            "" if self.speedup is None else "1.00x",
            "-" if self.speedup is None else f"{self.speedup:.2f}x",
        )
        for name, breakdown, factor in zip(
            self.names, (self.first, self.second), factors, strict=True
        ):
            for i, job in enumerate(breakdown.jobs):
                steps, _, *rest = cells(breakdown, job)
                table.add_row(
                    Text(name) if i == 0 else "", Text(job.facts.name), steps, *rest, "", "", ""
                )
            steps, _, *rest = totals(breakdown)
            row = [steps, *rest, seconds(breakdown.period_s), seconds(breakdown.bound_s), factor]
            table.add_row("", f"all {len(breakdown.jobs)}", *row, style="bold", end_section=True)
        return Group(title, table, Text("\n".join(self._notes())))

    def __str__(self) -> str:
        return printed_text(self.__rich__(), WIDTH + 20)

    def _repr_html_(self) -> str:
        return as_html(self.__rich__())

    def _notes(self) -> list[str]:
        what = "as below" if self._other_work else a_round(self.first)
        lines = [
            f"A round is {what}; bound: the shortest round that any order of this work allows."
        ]
        if self.first.in_turn:
            lines.append(
                f"Rates of a row of {self.names[0]} are while that job ran, those of its last row "
                "over all."
            )
        if self.first.in_turn and self.efficiency_alone is not None:
            one = self.first
            other = self.second
            lines += [
                (
                    f"A round's compute takes {seconds(one.compute_s)} alone, "
                    f"{seconds(other.compute_s)} alongside exchange; exchange "
                    f"{seconds(one.exchange_s)} alone, {seconds(other.exchange_s)} alongside "
                    "compute."
                ),
                (
                    f"Efficiency of {self.names[1]}: {share(other.efficiency)} of the bound of "
                    f"compute and exchange as they were in it, {share(self.efficiency_alone)} of "
                    f"their bound alone, {seconds(one.bound_s)}."
                ),
            ]
        if self.speedup is not None and self._excess > 1 + NEGLIGIBLE:
            lines.append(
                f"Overlap alone can gain {self.most:.2f}x here: the rest is time that "
                f"{self.names[0]} lost between its steps, or measurement noise."
            )
        return [*lines, self.headline]


def _pooled(breakdowns: Sequence[TimeBreakdown]) -> TimeBreakdown:
    """Averages several runs.

    Normally a round is one step of every job. Jobs that were hardly ever in steady state together
    with the others are left out, though, and rounds that cover different numbers of jobs can't be
    averaged. So we only use the runs whose rounds cover the most jobs.
    """
    most = max(len(breakdown.crossed) for breakdown in breakdowns)
    breakdowns = [breakdown for breakdown in breakdowns if len(breakdown.crossed) == most]

    def mean(value: Callable[[TimeBreakdown], float | None]) -> float | None:
        return _mean(value(breakdown) for breakdown in breakdowns)

    lost = {
        cause: _mean(a.lost_s[cause] for a in breakdowns) or 0.0
        for cause in LOST_TIME
        if breakdowns[0].lost_s
    }
    return replace(
        breakdowns[0],
        jobs=tuple(
            _pooled_job(jobs)
            for jobs in zip(*(breakdown.jobs for breakdown in breakdowns), strict=True)
        ),
        period_s=mean(lambda a: a.period_s),
        bound_s=mean(lambda a: a.bound_s),
        lost_s=lost,
        hidden_share=_mean(a.hidden_share for a in breakdowns) or 0.0,
        rounds=sum(a.rounds for a in breakdowns),
        steady_share=_mean(a.steady_share for a in breakdowns) or 0.0,
        shared_share=_mean(a.shared_share for a in breakdowns) or 0.0,
        start_up_s=sum(a.start_up_s for a in breakdowns),
        wall_s=sum(a.wall_s for a in breakdowns),
    )


def _pooled_job(jobs: Sequence[JobTiming]) -> JobTiming:
    names = (
        "period_s",
        "compute_s",
        "exchange_s",
        "hidden_share",
        "bytes_per_step",
        "steps_per_round",
    )
    steps = sum(job.facts.steps for job in jobs)
    facts = replace(jobs[-1].facts, steps=steps, first_step=jobs[0].facts.first_step)
    return replace(
        jobs[-1],
        facts=facts,
        **{name: _mean(getattr(job, name) for job in jobs) or 0.0 for name in names},
    )


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None
