"""What a run achieved, what it could have, and where the difference went: pure functions over spans.

A **round** is one step of every job. Jobs that run side by side share a round; jobs that run one after the other add
theirs, so `Sequential` and crossover are measured by the same rule. Only the steady state counts: a job's first
step (compiling, first touch of every page) and the tail in which other jobs have already ended are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxcross.report.facts import LOSSES, Account, JobAccount, JobFacts
from jaxcross.report.intervals import Interval, intersect, measure, subtract, union
from jaxcross.report.timeline import ExchangeKey, Timeline, in_lane_order, shortest_exchanges
from jaxcross.runtime.events import Span


@dataclass(frozen=True, slots=True)
class _Cost:
    """One job on one rank, nanoseconds a step."""

    compute: float
    exchange: float
    chain: float


def account(spans: Sequence[Span], jobs: Sequence[JobFacts], wall_ns: Mapping[int, int]) -> Account:
    """Accounts for a run.

    Args:
        spans: Those of all ranks; clocks need not agree.
        jobs: The jobs, in the order to show.
        wall_ns: Per rank, how long the run took.
    """
    spans = in_lane_order(spans)
    shortest = shortest_exchanges(spans)
    ranks = sorted(wall_ns) or [0]
    of_rank: dict[int, list[Span]] = defaultdict(list)
    of_job: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        of_rank[span.rank].append(span)
        of_job[span.rank, span.job].append(span)
    timelines = {rank: Timeline.of(rank, of_rank[rank], shortest) for rank in ranks}
    names = [job.name for job in jobs]
    windows = {rank: [window for window, _ in _groups(timelines[rank], names)] for rank in ranks}
    cost = {
        rank: {name: _cost(timelines[rank], name, windows[rank], of_job[rank, name], shortest) for name in names}
        for rank in ranks
    }
    mean = {name: _mean([cost[rank][name] for rank in ranks]) for name in names}
    bound, limit, _ = _bound(mean)
    decisive = max(ranks, key=lambda rank: _bound(cost[rank])[0])
    own_bound, own_limit, own_chain = _bound(cost[decisive])
    timeline = timelines[decisive]

    groups = _groups(timeline, names)
    lost = dict.fromkeys(LOSSES, 0.0)
    period = 0.0
    for window, rounds in groups:
        period += (window[1] - window[0]) / rounds
        for cause, length in _gaps(timeline, window, own_limit, own_chain).items():
            lost[cause] += length / rounds
    lost["imbalance"] = own_bound - bound
    lost["other"] = period - bound - sum(lost.values())

    steady = union(w for w in (_window(timeline, name) for name in names) if w is not None)
    return Account(
        jobs=tuple(_job_account(job, mean[job.name], timelines, decisive, of_job[decisive, job.name]) for job in jobs),
        period_s=period / 1e9,
        bound_s=bound / 1e9,
        limit=limit,
        lost_s={cause: length / 1e9 for cause, length in lost.items()},
        start_up_s=max(0, wall_ns.get(decisive, 0) - measure(steady)) / 1e9,
        wall_s=max(wall_ns.values(), default=0) / 1e9,
    )


def _cost(
    timeline: Timeline,
    job: str,
    windows: Sequence[Interval],
    spans: Sequence[Span],
    shortest: Mapping[ExchangeKey, int],
) -> _Cost:
    """Means over the steps that the period is measured on, so that bound and period speak of the same work."""
    ends = timeline.step_ends.get(job, ())
    if not ends:
        return _Cost(0.0, 0.0, 0.0)
    steps = [step for step, _ in ends]
    inside = {step for step, end in ends if any(low < end <= high for low, high in windows)}
    steady = inside or set(steps[1:] or steps)
    own = [s for s in spans if s.step in steady]
    compute = sum(s.end_ns - s.start_ns for s in own if s.kind == "compute")
    keys = {(s.job, s.step, s.segment) for s in own if s.kind == "collective"}
    exchange = sum(shortest[key] for key in keys)
    itself = measure(intersect(timeline.compute.get(job, []), timeline.transfer.get(job, []))) / len(steps)
    n = len(steady)
    return _Cost(compute / n, exchange / n, max((compute + exchange) / n - itself, 0.0))


def _mean(costs: Sequence[_Cost]) -> _Cost:
    n = len(costs)
    return _Cost(sum(c.compute for c in costs) / n, sum(c.exchange for c in costs) / n, sum(c.chain for c in costs) / n)


def _bound(costs: Mapping[str, _Cost]) -> tuple[float, str, str]:
    """The bound, the term that sets it, and the job with the longest chain."""
    chain_job = max(costs, key=lambda name: costs[name].chain, default="")
    terms = {
        "compute": sum(c.compute for c in costs.values()),
        "exchange": sum(c.exchange for c in costs.values()),
        "chain": costs[chain_job].chain if chain_job else 0.0,
    }
    limit = max(terms, key=lambda term: terms[term])
    return terms[limit], limit, chain_job


def _window(timeline: Timeline, job: str) -> Interval | None:
    """A job's steady state: from the end of its first step to the end of its last."""
    ends = timeline.step_ends.get(job, ())
    if len(ends) > 1:
        return ends[0][1], ends[-1][1]
    if not ends:
        return None
    busy = [*timeline.compute.get(job, []), *timeline.exchange.get(job, [])]
    return min(start for start, _ in busy), ends[0][1]


def _groups(timeline: Timeline, jobs: Sequence[str]) -> list[tuple[Interval, int]]:
    """Jobs that ran side by side, each group as a window of whole rounds and their number."""
    windows = sorted((w, job) for job in jobs if (w := _window(timeline, job)) is not None)
    clusters: list[list[tuple[Interval, str]]] = []
    reach = -1
    for window, job in windows:
        if not clusters or window[0] >= reach:
            clusters.append([])
        clusters[-1].append((window, job))
        reach = max(reach, window[1])
    groups: list[tuple[Interval, int]] = []
    for cluster in clusters:
        low, high = max(w[0] for w, _ in cluster), min(w[1] for w, _ in cluster)
        together = [[end for _, end in timeline.step_ends[job] if low <= end <= high] for _, job in cluster]
        whole = [[w[0], *(end for _, end in timeline.step_ends[job] if end > w[0])] for w, job in cluster]
        ends = max(together, key=len) if len(max(together, key=len)) > 1 else max(whole, key=len)
        if len(ends) > 1 and ends[-1] > ends[0]:
            groups.append(((ends[0], ends[-1]), len(ends) - 1))
    return groups


def _gaps(timeline: Timeline, window: Interval, limit: str, chain_job: str) -> dict[str, int]:
    """Nanoseconds in the window in which the lane that sets the bound did not work, each under one cause."""
    compute = union(piece for pieces in timeline.compute.values() for piece in pieces)
    transfer = union(piece for pieces in timeline.transfer.values() for piece in pieces)
    late = {
        "compute": timeline.late_compute,
        "exchange": timeline.late_exchange,
        "chain": union([*timeline.late_compute, *timeline.late_exchange]),
    }[limit]
    busy = {
        "compute": compute,
        "exchange": transfer,
        "chain": union([*timeline.compute.get(chain_job, []), *timeline.transfer.get(chain_job, [])]),
    }[limit]
    left = subtract([window], busy)
    if limit == "chain":
        late = subtract(late, union([*compute, *transfer]))
    causes = [
        ("votes", intersect(timeline.vote, late) if limit != "compute" else []),
        ("dispatch", late),
        ("peer", timeline.peer),
        ("order", union([*compute, *transfer])),
        # last: a vote or the preparation of a batch costs nothing while something else holds the lane up
        ("votes", timeline.vote),
        ("input", timeline.input),
    ]
    lengths = dict.fromkeys(LOSSES, 0)
    for cause, when in causes:
        lengths[cause] += measure(intersect(left, when))
        left = subtract(left, when)
    return lengths


def _job_account(
    facts: JobFacts, mean: _Cost, timelines: Mapping[int, Timeline], decisive: int, spans: Sequence[Span]
) -> JobAccount:
    timeline = timelines[decisive]
    window = _window(timeline, facts.name)
    rounds = max(len(timeline.step_ends.get(facts.name, ())) - 1, 1)
    exchange = sum(measure(t.exchange.get(facts.name, [])) for t in timelines.values())
    hidden = sum(t.hidden_ns(facts.name) for t in timelines.values())
    nbytes = sum(s.nbytes for s in spans if s.kind == "collective")
    return JobAccount(
        facts=facts,
        period_s=(window[1] - window[0]) / rounds / 1e9 if window else 0.0,
        compute_s=mean.compute / 1e9,
        exchange_s=mean.exchange / 1e9,
        hidden_share=_ratio(hidden, exchange),
        bytes_per_step=_ratio(nbytes, len(timeline.step_ends.get(facts.name, ()))),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
