"""Explains why a run was slower than predicted: attributes the longer round to causes.

The twin predicts a run from profiles, so when the real run is slower, one of the inputs was wrong
or the run lost time that the twin doesn't model. To find out which, `difference` replaces one input
of the prediction after the other by what the run measured, and predicts the same steps again each
time:

1. the seconds of computation,
2. the seconds of exchange,
3. the contention between the two lanes,
4. the time between a step's return and the job's next call.

Each replacement moves the predicted period, and the increase is that input's part of the
difference. What remains is attributed to the time that the run lost to votes, peers, dispatch and
input beyond the last prediction, and whatever is left after that is `unexplained`.

**Contention or slower work.** Steps 1 to 3 need the run's pace: how much work a lane gets done per
second while the other lane is busy. A segment that took longer than its profile says may have been
slowed down by the other lane, or may have had more work to do. Its span alone doesn't tell which.
If a job's segments differ in how much of them ran alongside the other lane, a least-squares fit
separates the two effects. In a run that repeats itself exactly in every round they don't differ,
and the fit leaves the pace open; then we take the simplest explanation that fits all jobs
(`_Paces.of`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross.interleave import Contention, Span
from jaxcross.report import (
    Interval,
    Report,
    TimeBreakdown,
    Timeline,
    as_html,
    in_lane_order,
    merge_intervals,
    printed_text,
    seconds,
    share,
    shortest_exchanges,
)
from jaxcross.step import Profile, segment_times

if TYPE_CHECKING:
    from jaxcross.plan.twin import Prediction

PARTS = MappingProxyType({
    "computation": "longer than by the profiles, contention apart",
    "exchange": "longer than by the profiles, contention apart",
    "contention": "the lanes slowed each other down more than predicted",
    "host": "jobs spent more time between two steps",
    "votes": "agreeing on the next steps",
    "peers": "exchanges and votes waited for another rank",
    "dispatch": "work was ready, its lane idle",
    "input": "a job waited for its next batch",
    "unexplained": "the rest; below zero: faster than all of this would be",
})  # fmt: skip
"""The parts of the achieved minus the predicted period, in the order in which they are shown."""

_CAUSES = {
    "votes": ("votes",),
    "peers": ("peer", "imbalance"),
    "dispatch": ("dispatch",),
    "input": ("input",),
}
_DOUBT = 0.03
"""Largest standard error of the fitted pace. Above it, spans can't separate contention from slower
work.
"""
_TOLERANCE = 0.01
"""Share of a job's work that an explanation common to all jobs may leave unexplained."""
_CLEARLY = 0.003
"""How much better contention must explain the jobs than slower work does, as a share of a job's
work.
"""
_LEAST_S = 1e-6  # more time between steps counts only above this
_DIGITS = 6  # decimals of a measured factor: finer ones are noise, as spans are whole nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A run compared with its prediction. `print` shows it as a table.

    All times are per round, in whole nanoseconds: `predicted_ns` plus all of `parts_ns` is
    `achieved_ns`.

    Attributes:
        predicted_ns: The predicted period.
        achieved_ns: The period of the run.
        parts_ns: The parts of the difference, by the keys of `PARTS`. Only `unexplained` can be
            negative.
        ideal_ns: The predicted bound: no order of the predicted work is faster.
    """

    predicted_ns: int
    achieved_ns: int
    parts_ns: Mapping[str, int]
    ideal_ns: int

    def __rich__(self) -> Group:
        table = Table()
        table.add_column("a round")
        for name in ("time", "share"):
            table.add_column(name, justify="right")
        table.add_column("what it is")
        rows = [("predicted", self.predicted_ns, f"its bound is {seconds(self.ideal_ns / 1e9)}")]
        rows += [(name, length, PARTS[name]) for name, length in self.parts_ns.items() if length]
        rows.append(("achieved", self.achieved_ns, ""))
        for name, length, text in rows:
            end = name in ("predicted", "achieved") or name == rows[-2][0]
            style = "bold" if name in ("predicted", "achieved") else None
            table.add_row(
                name,
                seconds(length / 1e9),
                share(length / self.achieved_ns),
                text,
                style=style,
                end_section=end,
            )
        title = Text(f"Achieved {self.predicted_ns / self.achieved_ns:.0%} of the predicted speed")
        return Group(title, table)

    def __str__(self) -> str:
        return printed_text(self.__rich__())

    def _repr_html_(self) -> str:
        return as_html(self.__rich__())


def difference(prediction: Prediction, run: Report) -> Difference:
    """Explains a run by its prediction.

    Repeats the prediction with the run's own seconds of computation, then also with its seconds of
    exchange, its contention, and its time between steps. Each part is the increase of the period
    that its replacement causes. The rest of the difference is divided among votes, peers, dispatch
    and input, by what the run lost to each of them beyond the last prediction.

    Args:
        prediction: A prediction of the same jobs under the same policy.
        run: The run.

    Raises:
        ValueError: Jobs, policy or segments differ, or the run or its prediction has no steady
            state.
    """
    _check(prediction, run)
    compute, exchange = _rows(run.spans, prediction.profiles)
    computed = _Paces.of(compute, 1 / prediction.contention.compute)
    exchanged = _Paces.of(exchange, 1 / prediction.contention.exchange)
    contention = Contention(
        compute=max(1.0, 1 / computed.together), exchange=max(1.0, 1 / exchanged.together)
    )
    stages = [prediction]
    names = ["computation", "exchange", "contention", "host"]
    stages.append(_scaled(stages[-1], "compute", computed.factors))
    stages.append(_scaled(stages[-1], "collective", exchanged.factors))
    stages.append(_again(stages[-1], stages[-1].profiles, contention))
    stages.append(_with_host_time(stages[-1], run))
    ends = [_period_ns(stage.rounds) for stage in stages]
    parts = dict.fromkeys(PARTS, 0)
    for name, before, after in zip(names, ends, ends[1:], strict=False):
        parts[name] = max(0, after - before)
    achieved = _period_ns(run.rounds)
    parts |= _lost(run.rounds.lost_s, stages[-1].rounds.lost_s, at_most_ns=achieved - ends[-1])
    parts["unexplained"] = achieved - ends[0] - sum(parts.values())
    ideal = round(1e9 * (prediction.rounds.bound_s or 0.0))
    return Difference(predicted_ns=ends[0], achieved_ns=achieved, parts_ns=parts, ideal_ns=ideal)


def _check(prediction: Prediction, run: Report) -> None:
    predicted = [profile.name for profile in prediction.profiles]
    there = [job.name for job in run.jobs]
    if sorted(predicted) != sorted(there):
        raise ValueError(
            f"the prediction is of the jobs {', '.join(predicted)}, the run of {', '.join(there)}"
        )
    if run.policy and run.policy != prediction.policy.name:
        raise ValueError(
            f"the prediction is for the policy {prediction.policy.name}, the run had {run.policy}"
        )
    for profile in prediction.profiles:
        program = next(job.program for job in run.jobs if job.name == profile.name)
        if program is not None and program["graph"] != profile.graph.as_data():
            raise ValueError(
                f"`{profile.name}` ran in other segments than those of its profile: it was cut "
                "otherwise"
            )
    for what, rounds in (("prediction", prediction.rounds), ("run", run.rounds)):
        if rounds.period_s is None:
            raise ValueError(
                f"the {what} has no round: its jobs were never in steady state together"
            )


def _period_ns(rounds: TimeBreakdown) -> int:
    return round(1e9 * (rounds.period_s or 0.0))


class _Row(NamedTuple):
    """One segment that ran: its seconds by the profile, and its actual seconds while the other lane
    was idle (`apart_s`) and while it was busy (`together_s`).
    """

    solo_s: float
    apart_s: float
    together_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paces:
    """How fast one lane worked.

    Attributes:
        factors: For each job, the seconds of its segments while the other lane is idle, relative to
            its profile.
        together: Work that the lane gets done per second while the other lane is busy. It gets 1
            done per second otherwise.
    """

    factors: Mapping[str, float]
    together: float

    @classmethod
    def of(cls, rows: Mapping[str, Sequence[_Row]], predicted: float) -> Self:
        """Measures the paces: `factor * solo = apart + pace * together` for each segment.

        Fits by least squares if the segments of a job differ in how much of them ran alongside the
        other lane. In a run that repeats itself in every round they don't differ. We then take the
        first of three explanations that fits all jobs: only the pace differed from the prediction,
        all segments were slower by the same factor, or each job has its own factor. The pace
        must fit clearly better than the common factor does.

        Args:
            rows: The segments of each job.
            predicted: The predicted pace.
        """
        pace = _fitted_pace(rows)
        if pace is not None:
            pace = predicted if abs(pace - predicted) < 10**-4 else pace
            return cls(
                factors={name: _factor(job, pace) for name, job in rows.items()}, together=pace
            )
        alike = _factor([row for job in rows.values() for row in job], predicted)
        sums = [_Row(*map(sum, zip(*job, strict=True))) for job in rows.values()]
        next_to = sum(row.together_s**2 for row in sums)
        pace = predicted
        if next_to:
            pace = sum((row.solo_s - row.apart_s) * row.together_s for row in sums) / next_to
        one_factor = _misfit(sums, alike, predicted)
        one_pace = _misfit(sums, 1.0, pace)
        if one_pace < min(one_factor - _CLEARLY, _TOLERANCE) and 0 < pace <= 1:
            return cls(factors=dict.fromkeys(rows, 1.0), together=pace)
        if one_factor < _TOLERANCE:
            return cls(factors=dict.fromkeys(rows, alike), together=predicted)
        return cls(
            factors={name: _factor(job, predicted) for name, job in rows.items()},
            together=predicted,
        )


def _fitted_pace(rows: Mapping[str, Sequence[_Row]]) -> float | None:
    """Returns the pace alongside the other lane by least squares, if the segments determine it."""
    # Each job's factor follows from the pace. So we remove from both columns what a factor can
    # explain, and fit the pace to the remainder.
    apart = [np.zeros(0)]
    together = [np.zeros(0)]
    for job in rows.values():
        solo, *columns = np.array(job).T
        for column, free in zip(columns, (apart, together), strict=True):
            free.append(column - solo * (solo @ column) / (solo @ solo))
    a = np.concatenate(apart)
    b = np.concatenate(together)
    known = len(a) - len(rows) - 1
    if known < 1 or b @ b <= _DOUBT**2 * sum(
        row.together_s**2 for job in rows.values() for row in job
    ):
        return None
    pace = -(a @ b) / (b @ b)
    spread = a + pace * b
    doubt = np.sqrt((spread @ spread) / known / (b @ b))
    return float(np.clip(pace, 0.05, 1.0)) if doubt <= _DOUBT else None


def _misfit(sums: Sequence[_Row], factor: float, pace: float) -> float:
    """Returns the largest share of a job's work that a factor and a pace leave unexplained."""
    return max(
        (abs(factor - (r.apart_s + pace * r.together_s) / r.solo_s) for r in sums), default=0.0
    )


def _factor(rows: Sequence[_Row], pace: float) -> float:
    """Returns the work of these segments, relative to what their profile says."""
    return round(
        sum(row.apart_s + pace * row.together_s for row in rows) / sum(row.solo_s for row in rows),
        _DIGITS,
    )


def _rows(
    spans: Iterable[Span], profiles: Sequence[Profile]
) -> tuple[dict[str, list[_Row]], dict[str, list[_Row]]]:
    """Returns each job's computations and exchanges, without its first step, which may compile."""
    spans = in_lane_order(spans)
    solo = {profile.name: profile.seconds for profile in profiles}
    shortest = shortest_exchanges(spans)
    found: tuple[dict[str, list[_Row]], dict[str, list[_Row]]] = (
        defaultdict(list),
        defaultdict(list),
    )
    for rank in sorted({span.rank for span in spans}):
        timeline = Timeline.of(rank, spans, shortest)
        exchanging = _Cumulated(
            merge_intervals(piece for pieces in timeline.transfer.values() for piece in pieces)
        )
        computing = _Cumulated(timeline.computing)
        for span in spans:
            if (
                span.rank != rank
                or span.kind not in ("compute", "collective")
                or not span.in_step
                or span.step < 2
            ):
                continue
            seconds_alone = solo[span.job][span.segment]
            if seconds_alone <= 0:
                continue
            is_compute = span.kind == "compute"
            length = min(
                shortest.get((span.job, span.number, span.segment), span.end_ns),
                span.end_ns - span.start_ns,
            )
            start = span.start_ns if is_compute else span.end_ns - length
            other = (exchanging if is_compute else computing).within(start, span.end_ns)
            row = _Row(seconds_alone, (span.end_ns - start - other) / 1e9, other / 1e9)
            found[0 if is_compute else 1][span.job].append(row)
    return found


class _Cumulated:
    """Disjoint intervals whose total length within a window is found by bisection."""

    def __init__(self, pieces: Sequence[Interval]) -> None:
        self._starts = [start for start, _ in pieces]
        self._pieces = pieces
        self._before = [0, *accumulate(end - start for start, end in pieces)]

    def within(self, start: int, end: int) -> int:
        """Returns the total length of the intervals from `start` to `end`."""
        return self._until(end) - self._until(start)

    def _until(self, moment: int) -> int:
        index = bisect_right(self._starts, moment)
        if not index:
            return 0
        start, end = self._pieces[index - 1]
        return self._before[index - 1] + min(moment, end) - start


def _scaled(prediction: Prediction, kind: str, factors: Mapping[str, float]) -> Prediction:
    """Returns the prediction with the segments of one kind scaled by each job's factor."""
    profiles = []
    for profile in prediction.profiles:
        factor = factors.get(profile.name, 1.0)
        pairs = zip(profile.seconds, profile.graph.kinds, strict=True)
        profiles.append(
            replace(profile, seconds=tuple(s * factor if own == kind else s for s, own in pairs))
        )
    return _again(prediction, profiles, prediction.contention)


def _with_host_time(prediction: Prediction, run: Report) -> Prediction:
    """Returns the prediction with the run's time between steps, where that is longer."""
    profiles = []
    for profile in prediction.profiles:
        _, there_s = segment_times(run.spans, profile.name, profile.graph)
        _, predicted_s = segment_times(prediction.spans, profile.name, profile.graph)
        more_s = round(max(0.0, there_s - predicted_s), 9)
        profiles.append(
            replace(profile, host_s=profile.host_s + more_s) if more_s > _LEAST_S else profile
        )
    return _again(prediction, profiles, prediction.contention)


def _again(
    prediction: Prediction, profiles: Sequence[Profile], contention: Contention
) -> Prediction:
    if tuple(profiles) == prediction.profiles and contention == prediction.contention:
        return prediction
    return prediction.again(profiles=profiles, contention=contention)


def _lost(
    there: Mapping[str, float], predicted: Mapping[str, float], *, at_most_ns: int
) -> dict[str, int]:
    """Returns the time lost beyond the prediction, by part. Scales the parts down if they add up to
    more than `at_most_ns`, which is all there is to explain.
    """
    more = {
        part: max(0.0, sum(there.get(cause, 0.0) - predicted.get(cause, 0.0) for cause in causes))
        for part, causes in _CAUSES.items()
    }
    whole = sum(more.values())
    scale = min(1.0, max(0, at_most_ns) / (1e9 * whole)) if whole else 0.0
    return {part: int(1e9 * scale * lost) for part, lost in more.items()}
