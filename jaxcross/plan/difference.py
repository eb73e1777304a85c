"""Explains why a run was slower than predicted, by attributing the difference to causes.

The twin is a simulation that predicts a run from profiles of its jobs. There are two possible
reasons for the real run being slower: either an input of the simulation was off (e.g. the job
computes for longer than it did in its profile), or the run lost time in a way that the simulation
doesn't model (e.g. waiting for a straggler).

To tell these apart, `difference` replaces the inputs with what was measured in the run, one after
the other, and simulates the same steps again after each replacement:

1. each segment's compute time,
2. each exchange's duration,
3. contention, i.e. how much computation and exchange slow each other down while they overlap,
4. the time a job needs between returning from one step and calling the next.

Whatever a replacement adds to the predicted period (the length of a round) is attributed to that
input. We can't just compare the inputs themselves: an exchange that takes 10 ms longer costs
nothing as long as it stays hidden behind computation, and only a simulation can tell whether it
does.

The remaining difference is attributed to votes, waiting for other ranks, dispatch and input, based
on how much time the run lost to each of them beyond what the last simulation predicted. Anything
that's still left is `unexplained`.

**Contention or slower work.** When a segment takes longer than its profile says, either the other
lane slowed it down, or it had more work to do. We can't tell which from a single segment. But a
job's segments usually overlap with the other lane to different degrees: if those with more overlap
are slower, it's contention; if all of them are equally slower, it's the work.

To separate the two effects, we perform a least-squares fit with two kinds of unknowns: a factor for
each job's work, and a pace for each lane, i.e. how much work it gets done per second while the
other lane is busy.

In a run that repeats itself exactly in every round, all segments of a job overlap with the other
lane to the same degree. The fit then can't distinguish contention from slower work, so `_Paces.of`
falls back to the simplest explanation that's consistent with all jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxcross.interleave import Contention, Span
from jaxcross.report import (
    Cumulated,
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
"""The parts into which we divide the difference between the achieved and the predicted period, in
display order.
"""

_CAUSES = {
    "votes": ("votes",),
    "peers": ("peer", "imbalance"),
    "dispatch": ("dispatch",),
    "input": ("input",),
}
_DOUBT = 0.03
"""Largest acceptable standard error of the fitted pace. If it's larger, the run's spans don't tell
us whether contention or slower work is to blame.
"""
_TOLERANCE = 0.01
"""We reject an explanation for all jobs if it leaves more than this share of any job's work
unexplained.
"""
_CLEARLY = 0.003
"""We only blame contention if it explains the jobs better than slower work does by at least this
share of a job's work.
"""
_LEAST_S = 1e-6  # smaller increases of the time between steps are ignored
_DIGITS = 6  # decimals of a measured factor; any more is noise, since spans are whole nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A run compared with its prediction. `print` shows it as a table.

    All times are per round, in whole nanoseconds. `predicted_ns` and all of `parts_ns` add up to
    `achieved_ns`.

    Attributes:
        predicted_ns: The predicted period.
        achieved_ns: The period of the run.
        parts_ns: The parts of the difference, by the keys of `PARTS`. Only `unexplained` can be
            negative.
        ideal_ns: The predicted bound, i.e. the shortest period that any ordering of the predicted
            work allows.
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
    """Compares a run with its prediction.

    Repeats the prediction with inputs measured in the run: first just the compute times, then also
    the exchange times, the contention, and the time between steps. Each input accounts for however
    much the predicted period increases when we replace it.

    The remaining difference is attributed to votes, waiting for other ranks, dispatch and input.
    Each gets the time the run lost to it beyond what the last prediction says, scaled down if that
    adds up to more than what remains.

    Args:
        prediction: A prediction for the same jobs under the same policy.
        run: The run.

    Raises:
        ValueError: The jobs, the policy or the segments differ, or either the run or its prediction
            has no steady state.
    """
    _check(prediction, run)
    compute, exchange = _rows(run.spans, prediction.profiles)
    computed = _Paces.of(compute, 1 / prediction.contention.compute)
    exchanged = _Paces.of(exchange, 1 / prediction.contention.exchange)
    contention = Contention(
        compute=max(1.0, 1 / computed.together), exchange=max(1.0, 1 / exchanged.together)
    )
    # Predict the run in stages, each of which replaces one more input with what was measured in the
    # run. The increase of the period (the length of a round) from one stage to the next is the
    # effect of that input. The last stage uses everything that was measured.
    stages = [prediction]
    names = ["computation", "exchange", "contention", "host"]
    stages.append(_scaled(stages[-1], "compute", computed.factors))
    stages.append(_scaled(stages[-1], "collective", exchanged.factors))
    stages.append(_again(stages[-1], stages[-1].profiles, contention))
    stages.append(_with_host_time(stages[-1], run))
    ends = [_period_ns(stage.rounds) for stage in stages]
    parts = dict.fromkeys(PARTS, 0)
    # When an input turns out better than predicted, its stage has a shorter period. We count that
    # as 0 instead of a negative part, and subtract the time gained from `unexplained`, which may
    # therefore be negative.
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
            f"the prediction is of the jobs {', '.join(predicted)}, but the run had the jobs "
            f"{', '.join(there)}. Pass `predict` the profiles of the run's jobs."
        )
    if run.policy and run.policy != prediction.policy.name:
        raise ValueError(
            f"the prediction is for the policy {prediction.policy.name}, but the run had "
            f"{run.policy}. Pass `predict` the policy of the run."
        )
    for profile in prediction.profiles:
        if profile.rank_seconds and profile.ranks != len(run.ranks):
            raise ValueError(
                f"the profile of `{profile.name}` has the times of {profile.ranks} ranks, but the "
                f"run had {len(run.ranks)}. Pass `predict` a profile of as many ranks as the run. "
                "Or, if the ranks are about equally fast, drop the times of each rank: "
                "`dataclasses.replace(profile, rank_seconds=())`."
            )
        program = next(job.program for job in run.jobs if job.name == profile.name)
        if program is not None and program["graph"] != profile.graph.as_data():
            raise ValueError(
                f"`{profile.name}` ran in different segments than in its profile, because its step "
                "was cut differently. Pass `predict` a profile with the cut of the run."
            )
    for what, rounds in (("prediction", prediction.rounds), ("run", run.rounds)):
        if rounds.period_s is None:
            raise ValueError(
                f"the {what} has no round, because its jobs were never in steady state together. "
                f"Repeat the {what} with more steps per job."
            )


def _period_ns(rounds: TimeBreakdown) -> int:
    return round(1e9 * (rounds.period_s or 0.0))


class _Row(NamedTuple):
    """One execution of a segment.

    `solo_s` is how long the segment takes alone, according to its profile. The time it actually
    took is split in two, because contention only has an effect while both lanes are working: the
    other lane was idle during `apart_s`, and busy during `together_s`.
    """

    solo_s: float
    apart_s: float
    together_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paces:
    """How fast one lane worked in the run.

    Attributes:
        factors: For each job, how many times longer than in its profile its segments take while the
            other lane is idle.
        together: The pace, i.e. how many seconds of work the lane gets done per second while the
            other lane is busy. While the other lane is idle, the pace is 1.
    """

    factors: Mapping[str, float]
    together: float

    @classmethod
    def of(cls, rows: Mapping[str, Sequence[_Row]], predicted: float) -> Self:
        """Solves `factor * solo = apart + pace * together` for the factors and the pace.

        If a job's segments overlap with the other lane to different degrees, we solve these
        equations by least squares. Otherwise (e.g. in a run that repeats itself exactly in every
        round), many combinations of factors and pace are equally good solutions. In that case, we
        settle for the first of three explanations that's consistent with all jobs:

        1. It's contention: only the pace, i.e. the speed of a lane while the other lane is busy, is
           different from the prediction. This has to explain the jobs clearly better than the next
           explanation does.
        2. The work is slower: the pace is as predicted, but all segments take longer than in their
           profiles, by the same factor.
        3. The same, but with a separate factor for each job.

        Args:
            rows: The executed segments of each job.
            predicted: The predicted pace.
        """
        pace = _fitted_pace(rows)
        # Treat tiny deviations from the predicted pace as rounding. Otherwise a run that matches
        # its prediction exactly would be reported as slightly different.
        if pace is not None:
            pace = predicted if abs(pace - predicted) < 10**-4 else pace
            return cls(
                factors={name: _factor(job, pace) for name, job in rows.items()}, together=pace
            )
        # The segments don't determine the pace, so all that a job gives us is a single equation:
        # the sum over its segments.
        alike = _factor([row for job in rows.values() for row in job], predicted)
        sums = [_Row(*map(sum, zip(*job, strict=True))) for job in rows.values()]
        squares = sum(row.together_s**2 for row in sums)
        pace = predicted
        if squares:
            pace = sum((row.solo_s - row.apart_s) * row.together_s for row in sums) / squares
        one_factor = _misfit(sums, alike, predicted)
        one_pace = _misfit(sums, 1.0, pace)
        # Both explanations have a single free parameter: the slowdown caused by contention, or a
        # common factor by which all work was slower. Noise alone can make contention fit slightly
        # better, so we only blame contention if its fit is clearly better.
        if one_pace < min(one_factor - _CLEARLY, _TOLERANCE) and 0 < pace <= 1:
            return cls(factors=dict.fromkeys(rows, 1.0), together=pace)
        if one_factor < _TOLERANCE:
            return cls(factors=dict.fromkeys(rows, alike), together=predicted)
        return cls(
            factors={name: _factor(job, predicted) for name, job in rows.items()},
            together=predicted,
        )


def _fitted_pace(rows: Mapping[str, Sequence[_Row]]) -> float | None:
    """Returns the least-squares fit of the pace, or None if the segments don't determine it."""
    # We fit `factor * solo = apart + pace * together` with a factor for each job and a common pace.
    # Solving for everything at once would take a matrix with a column for each job. But given the
    # pace, we know each job's best factor, so we can eliminate the factors: project each job's
    # `apart` and `together` columns onto the complement of its `solo` column, which removes
    # whatever a factor can explain. That leaves a fit with a single unknown.
    apart = [np.zeros(0)]
    together = [np.zeros(0)]
    for job in rows.values():
        solo, *columns = np.array(job).T
        for column, free in zip(columns, (apart, together), strict=True):
            free.append(column - solo * (solo @ column) / (solo @ solo))
    a = np.concatenate(apart)
    b = np.concatenate(together)
    # There's an equation for each segment; the unknowns are a factor for each job, and the pace.
    known = len(a) - len(rows) - 1
    # `b` is what the projection leaves of `together`. If that's next to nothing, each job's
    # segments all overlap with the other lane to the same degree. In that case, a job's factor can
    # explain anything that the pace could, which leaves the pace undetermined.
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
    """Returns how much work these segments were, relative to what their profile says."""
    return round(
        sum(row.apart_s + pace * row.together_s for row in rows) / sum(row.solo_s for row in rows),
        _DIGITS,
    )


def _rows(
    spans: Iterable[Span], profiles: Sequence[Profile]
) -> tuple[dict[str, list[_Row]], dict[str, list[_Row]]]:
    """Returns each job's executed compute segments and exchanges.

    The first step is left out, since it may include compilation.
    """
    spans = in_lane_order(spans)
    solo = {profile.name: profile for profile in profiles}
    shortest = shortest_exchanges(spans)
    found: tuple[dict[str, list[_Row]], dict[str, list[_Row]]] = (
        defaultdict(list),
        defaultdict(list),
    )
    for rank in sorted({span.rank for span in spans}):
        timeline = Timeline.of(rank, spans, shortest)
        exchanging = Cumulated(merge_intervals(chain.from_iterable(timeline.transfer.values())))
        computing = Cumulated(timeline.computing)
        for span in spans:
            if (
                span.rank != rank
                or span.kind not in ("compute", "collective")
                or not span.in_step
                or span.step < 2
            ):
                continue
            # If a segment takes no time in its profile, there's nothing to compare with.
            seconds_alone = solo[span.job].on_rank(rank)[span.segment]
            if seconds_alone <= 0:
                continue
            is_compute = span.kind == "compute"
            # A rank's span of an exchange begins with a wait for other ranks, during which nothing
            # is transferred. The actual work comes at the end, and takes as long as the exchange's
            # shortest span on any rank.
            length = min(
                shortest.get((span.job, span.number, span.segment), span.end_ns),
                span.end_ns - span.start_ns,
            )
            start = span.start_ns if is_compute else span.end_ns - length
            other = (exchanging if is_compute else computing).within(start, span.end_ns)
            row = _Row(seconds_alone, (span.end_ns - start - other) / 1e9, other / 1e9)
            found[0 if is_compute else 1][span.job].append(row)
    return found


def _scaled(
    prediction: Prediction, kind: Literal["compute", "collective"], factors: Mapping[str, float]
) -> Prediction:
    """Predicts again, with the segments of one kind scaled by each job's factor."""
    profiles = [
        profile.scaled(kind, factors.get(profile.name, 1.0)) for profile in prediction.profiles
    ]
    return _again(prediction, profiles, prediction.contention)


def _with_host_time(prediction: Prediction, run: Report) -> Prediction:
    """Predicts again, using the run's time between steps wherever it's longer than predicted."""
    profiles = []
    for profile in prediction.profiles:
        there_s = segment_times(run.spans, profile.name, profile.graph).host_s
        predicted_s = segment_times(prediction.spans, profile.name, profile.graph).host_s
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
    """Returns how much more time the run lost than predicted, by part.

    `at_most_ns` is how much longer the run's period is than that of the last simulation, in which
    all inputs are measured. The run's other losses, such as votes, can't account for more than
    this, so if they add up to more, we scale them all down by the same factor.
    """
    more = {
        part: max(0.0, sum(there.get(cause, 0.0) - predicted.get(cause, 0.0) for cause in causes))
        for part, causes in _CAUSES.items()
    }
    whole = sum(more.values())
    scale = min(1.0, max(0, at_most_ns) / (1e9 * whole)) if whole else 0.0
    return {part: int(1e9 * scale * lost) for part, lost in more.items()}
