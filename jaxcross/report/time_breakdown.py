"""Compares the length of a run's rounds with the bound, and explains the difference.

**Round.** A round is one step of every job. We measure whole rounds while all jobs are in steady
state at the same time: after every job has completed its first step (which includes compiling, and
touching each memory page for the first time), and before any job completes its last.

If the jobs were never all in steady state at once, or only very briefly, the round just covers the
largest set of jobs that were together for long enough.

The `Sequential` policy runs the jobs one after the other, so they're never in steady state at the
same time. For these runs, we define the round as the sum of one step of each job, which makes it
comparable with the rounds of a run in which the jobs overlap. With any other policy, a run in which
no jobs were together has no round, and we don't report any.

**Bound.** The bound is the shortest time that a round could take. A lane does one thing at a time,
so a round can't be shorter than the work of the busiest lane. Nor can it be shorter than the
compute and exchange of any single job, since a job's steps follow one another.

We measure the amount of work per round over the same time window as the duration of a round. Jobs
don't work at the same rate throughout a run, so otherwise the bound could come out longer than the
round.

**Losses.** If the bottleneck (the busiest lane, or the job with the longest critical path) never
paused, the round would be as short as the bound. So we take the rank with the highest bound, look
at each gap in which its bottleneck was idle, and attribute the gap to a cause. That way, the losses
add up to the difference between round and bound.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from jaxcross.interleave import PARAMETER_SERVER, Span
from jaxcross.report.intervals import (
    Cumulated,
    Interval,
    intersect,
    measure,
    merge_intervals,
    subtract,
)
from jaxcross.report.slow_rank import SlowRank, slowest, waits_by_cause
from jaxcross.report.steady_state import Stretch, at_work_together, sets_together
from jaxcross.report.summary import BRIEF, LOST_TIME, JobSummary, JobTiming, TimeBreakdown
from jaxcross.report.timeline import (
    ExchangeKey,
    Timeline,
    in_lane_order,
    numbered_votes,
    shortest_exchanges,
)

_MOSTLY = 2 / 3
"""If a rank computes no longer than the others, we only name it if they spend this share of their
waiting time on this rank. If equally fast ranks vary randomly, two ranks wait equally long for each
other.
"""


@dataclass(frozen=True, slots=True)
class _Terms:
    """The three lower bounds on a round, in nanoseconds. `critical_path` has one for each job."""

    compute: float
    exchange: float
    critical_path: Mapping[str, float]

    @property
    def longest(self) -> str:
        """The job with the longest critical path."""
        return max(self.critical_path, key=lambda job: self.critical_path[job])

    @property
    def bottleneck(self) -> tuple[float, str]:
        """The largest term, which is the bound, and its name."""
        terms = {
            "compute": self.compute,
            "exchange": self.exchange,
            "chain": self.critical_path[self.longest],
        }
        name = max(terms, key=lambda term: terms[term])
        return terms[name], name

    @classmethod
    def mean(cls, several: Sequence[_Terms]) -> _Terms:
        jobs = dict.fromkeys(job for terms in several for job in terms.critical_path)
        return cls(
            _mean(t.compute for t in several),
            _mean(t.exchange for t in several),
            {
                job: _mean(t.critical_path[job] for t in several if job in t.critical_path)
                for job in jobs
            },
        )


@dataclass(frozen=True, slots=True)
class _MeasuredRank:
    """One rank's timeline, and which part of it we measure.

    For each job, `own` is the part of the run in which that job was in steady state. `stretches`
    are the parts over which we measure the round (one step of every job): usually a single part in
    which all jobs ran together, or one part per job if they ran one after the other.
    """

    timeline: Timeline
    own: Mapping[str, Stretch]
    stretches: tuple[Stretch, ...]

    @classmethod
    def of_all(
        cls, timelines: Mapping[int, Timeline], jobs: Sequence[str], *, in_turn: bool
    ) -> dict[int, _MeasuredRank]:
        """Chooses the part of the run over which to measure the round.

        Normally, we measure the round (one step of every job) while all jobs are in steady state
        together. If that never happens, we fall back to the largest set of two or more jobs for
        which it does. If this set was together for less than a tenth of the time of a smaller set,
        we use the smaller set instead.

        The set is the same on every rank.
        """
        own = {
            rank: {
                job: stretch for job in jobs if (stretch := Stretch.own(timeline, job)) is not None
            }
            for rank, timeline in timelines.items()
        }
        # Jobs that run one after the other are never in steady state at the same time, so no part
        # of the run contains a step of every job. Instead, measure each job while it runs, and add
        # up the jobs' times per step.
        if in_turn or not any(len(stretches) > 1 for stretches in own.values()):
            return {
                rank: cls(timeline, own[rank], tuple(own[rank].values()))
                for rank, timeline in timelines.items()
            }
        found: list[tuple[int, dict[int, Stretch]]] = []
        for members in dict.fromkeys(
            s for timeline in timelines.values() for s in sets_together(timeline, jobs)
        ):
            there = {rank: t for rank, t in timelines.items() if own[rank].keys() >= set(members)}
            shared = {
                r: stretch
                for r, t in there.items()
                if (stretch := Stretch.shared(t, members)) is not None
            }
            if shared:
                found.append((max(s.window[1] - s.window[0] for s in shared.values()), shared))
        # A round should cover as many jobs as possible, even if they weren't together for as long.
        # But over a very short time, the measured rates depend on which steps happen to end just
        # within it. So only consider sets of jobs that were together for at least a tenth as long
        # as the set that was together the longest.
        longest = max((length for length, _ in found), default=0)
        enough = [shared for length, shared in found if length >= BRIEF * longest]
        shared = max(enough, key=lambda shared: len(next(iter(shared.values())).steps), default={})
        return {
            r: cls(t, own[r], (shared[r],) if r in shared else ()) for r, t in timelines.items()
        }

    @property
    def period(self) -> float:
        return sum((s.window[1] - s.window[0]) / s.rounds for s in self.stretches)

    @property
    def terms(self) -> _Terms:
        critical_path: dict[str, float] = {}
        for stretch in self.stretches:
            for job in stretch.steps:
                critical_path[job] = (
                    _inside(_critical_path(self.timeline, job), stretch) / stretch.rounds
                )
        return _Terms(
            sum(
                _inside(_busiest(self.timeline.compute_lanes, s), s) / s.rounds
                for s in self.stretches
            ),
            sum(
                _inside(_busiest(self.timeline.exchange_lanes, s), s) / s.rounds
                for s in self.stretches
            ),
            critical_path,
        )

    def lost(self) -> dict[str, float]:
        """Returns how many nanoseconds per round this rank's bottleneck was idle, by cause.

        The values add up to the length of the rank's round minus the rank's own bound.
        """
        lost = dict.fromkeys(LOST_TIME, 0.0)
        terms = self.terms
        _, bottleneck = terms.bottleneck
        for stretch in self.stretches:
            for cause, length in _gaps(self.timeline, stretch, bottleneck, terms.longest).items():
                lost[cause] += length / stretch.rounds
        return lost

    def measured(self, job: str) -> Stretch | None:
        """Returns the part of the run over which we measure this job's own numbers.

        If the job takes part in the round (one step of every job), we use the same time as for the
        round, which makes the jobs' times add up to the round's. Otherwise we use the job's own
        steady state, or return None if it made too few steps to have one.
        """
        with_others = (stretch for stretch in self.stretches if job in stretch.steps)
        return next(with_others, self.own.get(job))


def break_down(
    spans: Sequence[Span],
    jobs: Sequence[JobSummary],
    wall_ns: Mapping[int, int],
    *,
    in_turn: bool = False,
) -> TimeBreakdown:
    """Breaks down where the time of a run went.

    Args:
        spans: The spans of all ranks. The ranks' clocks needn't be aligned.
        jobs: The jobs, in the order in which they are shown.
        wall_ns: The length of the run, by rank.
        in_turn: Whether the policy ran the jobs one after the other.
    """
    spans = numbered_votes(in_lane_order(spans))
    shortest = shortest_exchanges(spans)
    of_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        of_rank[span.rank].append(span)
    names = [job.name for job in jobs]
    made = {job.name: job.steps for job in jobs}
    timelines = {
        r: Timeline.of(r, of_rank[r], shortest).without_undone(made) for r in sorted(wall_ns) or [0]
    }
    ranks = _MeasuredRank.of_all(timelines, names, in_turn=in_turn)
    measured = {rank: part.terms for rank, part in ranks.items() if part.stretches}
    # In every exchange, the other ranks end up waiting for the rank with the most work (i.e. the
    # highest bound), so it's this rank that determines how long a round takes.
    decisive = max(measured, key=lambda rank: measured[rank].bottleneck[0], default=min(ranks))
    part = ranks[decisive]
    wall = max(wall_ns.values(), default=0)
    crossed = [job for stretch in part.stretches for job in stretch.steps]
    steady = merge_intervals(own.window for own in part.own.values())
    bound = None
    bottleneck = ""
    lost = {}
    # When a job trains with a parameter server, each of its steps is recorded as a single span, so
    # we can't tell its compute from its exchange. A bound computed from such spans would always
    # equal the measured round, which is no use to anyone, so we don't report any.
    served = {span.job for span in spans if span.label == PARAMETER_SERVER}
    slow_rank = None
    if measured and not any(served & stretch.steps.keys() for stretch in part.stretches):
        # Some ranks may have more work than others. Report the bound for the mean work per rank,
        # since that's how short a round could be if the work were spread evenly. The slowest rank
        # has a higher bound; the difference between the two is the time lost to imbalance.
        bound, bottleneck = _Terms.mean(list(measured.values())).bottleneck
        lost = part.lost()
        lost["imbalance"] = measured[decisive].bottleneck[0] - bound
        slow_rank = _slow_rank(ranks, measured, spans, shortest)
    return TimeBreakdown(
        jobs=tuple(_job_timing(job, ranks, decisive, of_rank[decisive]) for job in jobs),
        period_s=part.period / 1e9 if measured else None,
        bound_s=bound / 1e9 if bound is not None else None,
        bottleneck=bottleneck,
        lost_s={cause: max(length, 0.0) / 1e9 for cause, length in lost.items()},
        input_share=_input_share(part, of_rank[decisive]),
        hidden_share=_hidden(ranks.values(), crossed or names),
        rounds=min((stretch.rounds for stretch in part.stretches), default=0.0),
        in_turn=in_turn,
        steady_share=_ratio(sum(s.window[1] - s.window[0] for s in part.stretches), wall),
        shared_share=_ratio(at_work_together(_at_work(of_rank[decisive])), wall),
        start_up_s=max(0, wall - measure(steady)) / 1e9,
        wall_s=wall / 1e9,
        slow_rank=slow_rank,
    )


def _slow_rank(
    ranks: Mapping[int, _MeasuredRank],
    terms: Mapping[int, _Terms],
    spans: Sequence[Span],
    shortest: Mapping[ExchangeKey, int],
) -> SlowRank | None:
    """Returns the rank that holds up the others, if there is one.

    If a rank computes longer than the others, we can't read its cost off the others' waits: they
    may compute for another job in the meantime, and still get less done than they could. So we
    compare the rank's bound with the median rank's. Otherwise, a rank may be late because of its
    data or other work on the host. We then only count the time in which the others do nothing but
    wait for it.
    """
    if len(terms) < 2:
        return None
    order = list(terms)
    found = slowest([terms[rank].compute for rank in order])
    if found is not None:
        slow_ranks = [order[n] for n in found[0]]
        middle = median_low(each.bottleneck[0] for each in terms.values())
        cost = _ratio(terms[slow_ranks[0]].bottleneck[0] - middle, ranks[slow_ranks[0]].period)
        named = SlowRank.if_costly(slow_ranks, found[1], cost)
        if named is not None:
            return named
    # With P ranks, there are about P² pairs, so each of them may only look at its own waits.
    working = {rank: Cumulated(_working(ranks[rank].timeline)) for rank in order}
    idle: dict[int, float] = defaultdict(float)  # nanoseconds per round, summed over waiting ranks
    for (rank, cause), when in waits_by_cause(spans, shortest).items():
        if rank in terms and cause in terms:
            for s in ranks[rank].stretches:
                during = intersect(when, [s.window])
                busy = sum(itertools.starmap(working[rank].within, during))
                idle[cause] += (measure(during) - busy) / s.rounds
    slow = max(idle, key=lambda cause: idle[cause], default=0)
    if not idle or idle[slow] < _MOSTLY * sum(idle.values()):
        return None
    cost = _ratio(idle[slow] / (len(terms) - 1), ranks[slow].period)
    factor = _ratio(terms[slow].compute, median_low(each.compute for each in terms.values()))
    return SlowRank.if_costly([slow], factor, cost, is_late=True)


def _critical_path(timeline: Timeline, job: str) -> list[Interval]:
    """Returns the time in which the job computed or exchanged.

    A job's steps follow one another, so a round (one step of every job) can't take less time than
    the compute and exchange of a single step of this job.
    """
    return merge_intervals([*timeline.compute.get(job, []), *timeline.transfer.get(job, [])])


def _busiest(lanes: Mapping[int, list[Interval]], stretch: Stretch) -> list[Interval]:
    """Returns the work of the busiest lane.

    A lane does one thing at a time, so a round can't be shorter than the work of its busiest lane.
    Adding up the work of several lanes would be wrong, since they can work at the same time.
    """
    return max(lanes.values(), key=lambda lane: _inside(lane, stretch), default=[])


def _working(timeline: Timeline) -> list[Interval]:
    """Returns when the rank computed or exchanged for any job."""
    return merge_intervals(itertools.chain(timeline.computing, *timeline.transfer.values()))


def _inside(intervals: list[Interval], stretch: Stretch) -> int:
    return measure(intersect(intervals, [stretch.window]))


def _gaps(timeline: Timeline, stretch: Stretch, bottleneck: str, longest: str) -> dict[str, int]:
    """Returns how many nanoseconds the bottleneck was idle, by cause.

    `longest` is the job with the longest critical path, which is the bottleneck if its name is
    `chain`.
    """
    working = _working(timeline)
    late = {
        "compute": timeline.late_compute,
        "exchange": timeline.late_exchange,
        "chain": merge_intervals([*timeline.late_compute, *timeline.late_exchange]),
    }[bottleneck]
    busy = {
        "compute": _busiest(timeline.compute_lanes, stretch),
        "exchange": _busiest(timeline.exchange_lanes, stretch),
        "chain": _critical_path(timeline, longest) if longest in stretch.steps else [],
    }[bottleneck]
    left = subtract([stretch.window], busy)
    if bottleneck == "chain":
        # Here the bottleneck is a job (the job with the longest critical path), and a gap is time
        # in which it does nothing. If a lane works for other jobs during the gap, our job may have
        # to wait for that work, so this time doesn't count as lost to dispatch, even if some other
        # segment was ready to start.
        late = subtract(late, working)
        # `late` includes any time in which an exchange was ready but hadn't begun. If the exchange
        # lane was busy voting at that time, it's the vote that held up the exchange, so we blame
        # the vote instead of dispatch. Compute segments are different: they run on other lanes,
        # where a vote can't hold them up.
    voting = late if bottleneck != "compute" else []
    # Several causes may explain the same gap. We attribute it to the first match in this list, so
    # specific causes must come before general ones.
    causes = [
        ("host", intersect(timeline.together, voting)),
        ("votes", intersect(timeline.vote, voting)),
        ("peer", intersect(timeline.vote_peer, voting)),
        ("dispatch", late),
        ("peer", timeline.peer),
        ("order", working),
        # Votes and the preparation of batches don't cost any extra time while the lane can't work
        # anyway. That's why they come this late in the list, where they only get the time that's
        # still unexplained.
        ("host", timeline.host),
        ("votes", timeline.vote),
        ("peer", timeline.vote_peer),
        ("input", timeline.input),
        ("other", [stretch.window]),
    ]
    lengths = dict.fromkeys(LOST_TIME, 0)
    for cause, when in causes:
        lengths[cause] += measure(intersect(left, when))
        left = subtract(left, when)
    return lengths


def _job_timing(
    facts: JobSummary, ranks: Mapping[int, _MeasuredRank], decisive: int, spans: Sequence[Span]
) -> JobTiming:
    name = facts.name
    part = ranks[decisive]
    stretch = part.measured(name)
    costs = [cost for rank in ranks.values() if (cost := _cost(rank, name)) is not None]
    in_round = next((s for s in part.stretches if name in s.steps), None)
    made = {step for step, _ in part.timeline.step_ends.get(name, ())}
    exchanges = [s for s in spans if s.kind == "collective" and s.job == name]
    others = [s for s in exchanges if not s.in_step]
    calls = len({s.number for s in others})
    period_s = 0.0
    if stretch:
        period_s = (stretch.window[1] - stretch.window[0]) / stretch.steps[name] / 1e9
    return JobTiming(
        facts=facts,
        period_s=period_s,
        compute_s=_mean(compute for compute, _ in costs) / 1e9,
        exchange_s=_mean(exchange for _, exchange in costs) / 1e9,
        hidden_share=_hidden(ranks.values(), [name]),
        bytes_per_step=_ratio(
            sum(s.nbytes for s in exchanges if s.in_step and s.step in made), len(made)
        ),
        other_calls=calls,
        bytes_per_other_call=_ratio(sum(s.nbytes for s in others), calls),
        steps_per_round=in_round.steps[name] / in_round.rounds if in_round else 0.0,
    )


def _cost(rank: _MeasuredRank, job: str) -> tuple[float, float] | None:
    """Returns the nanoseconds of compute and of exchange per step on one rank.

    Falls back to the mean over all steps if the job was never in steady state.
    """
    timeline = rank.timeline
    stretch = rank.measured(job)
    compute = timeline.compute.get(job, [])
    transfer = timeline.transfer.get(job, [])
    if stretch is not None:
        return _inside(compute, stretch) / stretch.steps[job], _inside(
            transfer, stretch
        ) / stretch.steps[job]
    steps = len(timeline.step_ends.get(job, ()))
    return (measure(compute) / steps, measure(transfer) / steps) if steps else None


def _input_share(rank: _MeasuredRank, spans: Sequence[Span]) -> dict[str, float]:
    """Returns each storage level's share of the measured time spent waiting for batches."""
    windows = merge_intervals(stretch.window for stretch in rank.stretches)
    lengths: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.kind == "input":
            lengths[span.label] += measure(intersect([(span.start_ns, span.end_ns)], windows))
    return {
        level: length / sum(lengths.values())
        for level, length in lengths.items()
        if level and length
    }


def _hidden(ranks: Iterable[_MeasuredRank], jobs: Sequence[str]) -> float:
    """Returns the share of these jobs' exchange time in which any job computed on the same rank."""
    hidden = 0
    whole = 0
    for rank in ranks:
        for job in jobs:
            stretch = rank.measured(job)
            exchange = rank.timeline.exchange.get(job, [])
            if stretch is not None:
                whole += _inside(exchange, stretch)
                hidden += _inside(rank.timeline.covered(job), stretch)
    return _ratio(hidden, whole)


def _at_work(spans: Sequence[Span]) -> list[Interval]:
    """Returns the time from the first to the last span of each job."""
    reach: dict[str, Interval] = {}
    for span in spans:
        if span.job:
            low, high = reach.get(span.job, (span.start_ns, span.end_ns))
            reach[span.job] = min(low, span.start_ns), max(high, span.end_ns)
    return list(reach.values())


def _mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
