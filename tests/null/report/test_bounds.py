"""Tests that no simulated run is faster than its bound, and that no part of its lost time is
negative.
"""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxcross.interleave.instrument import PARAMETER_SERVER, Span
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.interleave.simulator import Call, Fail, Simulation, Think
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest
from jaxcross.report.chrome import trace_events
from jaxcross.report.report import IN_TURN, Report
from jaxcross.report.summary import LOST_TIME, JobSummary
from jaxcross.report.time_breakdown import break_down
from tests.support.examples import scaled
from tests.support.parts import in_parts

S = 1_000_000_000
SEEDS = st.integers(0, 2**32 - 1)
PARTS = in_parts(4)
POLICIES = ("round-robin", "weighted", "sequential")


def random_graph(rng):
    """Returns a backward pass in pieces, each with its exchange, and an update.

    Some exchanges overlap with the next piece.
    """
    kinds, needs, pieces = [], [], rng.randint(1, 4)
    exchanges = []
    # All compute pieces have lower numbers than all exchanges, so an exchange runs while later
    # pieces compute.
    if rng.random() < 0.5:
        kinds = ["compute"] * pieces + ["collective"] * pieces
        needs = [(n - 1,) if n else () for n in range(pieces)] + [(n,) for n in range(pieces)]
        exchanges = list(range(pieces, 2 * pieces))
    for _ in range(0 if exchanges else pieces):
        computed = [n for n, kind in enumerate(kinds) if kind == "compute"]
        behind = rng.random() < 0.3 and exchanges
        needs.append((exchanges[-1],) if behind else tuple(computed[-1:]))
        kinds.append("compute")
        needs.append((len(kinds) - 1,))
        kinds.append("collective")
        exchanges.append(len(kinds) - 1)
    last = len(kinds)
    return StepGraph(
        kinds=(*kinds, "compute"),
        needs=(*needs, tuple(exchanges)),
        after_commit=frozenset({last}),
        signature=rng.randrange(9),
        text="x",
    )


def loop(rng, graph, seconds, steps, *, jitter, think, fails_at=-1):
    yield Think(think)
    for n in range(steps):
        if n == fails_at:
            yield Fail("the job failed")
        yield Call(graph, tuple(length * (1 + jitter * rng.random()) for length in seconds))


def simulated(seed, kind):
    """Returns a random run's spans on each rank's own clock, its jobs, and each rank's end."""
    rng = random.Random(seed)
    ranks, jobs, pending = rng.randint(1, 3), rng.randint(1, 4), rng.randint(0, 2)
    scale, jitter = rng.choice((1e-5, 1e-2, 1.0)), rng.choice((0.0, 0.0, 0.1, 2.0))
    plans = []
    for _ in range(jobs + pending):
        graph = random_graph(rng)
        seconds = tuple(scale * rng.choice((0.0, 0.1, rng.random(), 1.0)) for _ in graph.kinds)
        plans.append(
            (
                graph,
                seconds,
                rng.choice((0, 1, 2, 3, 6, 20)),
                scale * rng.choice((0, 0, 5)) * rng.random(),
            )
        )
    fault = (
        (rng.randrange(ranks), rng.randrange(jobs), rng.randrange(4))
        if rng.random() < 0.3
        else (-1, -1, -1)
    )

    def script(rank, job):
        graph, seconds, steps, think = plans[job]
        fails_at = fault[2] if fault[:2] == (rank, job) else -1
        own = random.Random(f"{seed} {rank} {job}")
        return loop(own, graph, seconds, steps, jitter=jitter, think=think, fails_at=fails_at)

    lengths = {job: scale * rng.choice((0.01, rng.random(), 2.0)) for job in range(jobs + pending)}
    weights = Weighted(tuple(rng.choice((0.2, 1.0, 3.0)) for _ in range(jobs)))
    results = Simulation(
        [[script(rank, job) for job in range(jobs)] for rank in range(ranks)],
        policy={"round-robin": RoundRobin(), "weighted": weights, "sequential": Sequential()}[kind],
        depth=rng.randint(1, 3),
        vote_s=scale * rng.choice((0.0, 0.05)),
        backoff_s=lambda level: scale * 2.0**level,
        exchange_s=lambda job, *_: lengths[job],
        adds=[
            (scale * 10 * rng.random(), rank, f"j{n}", script(rank, jobs + n))
            for n in range(pending)
            for rank in range(ranks)
        ],
        requests=[(scale * 10 * rng.random(), 0, rng.randrange(jobs), JobRequest.STOP)]
        if rng.random() < 0.2
        else (),
        check=False,
    ).run()
    spans, wall_ns = [], {}
    for rank, result in enumerate(results):
        clock, free = rng.randrange(100 * S), 0
        for span in sorted(result.spans, key=lambda span: span.start_ns):
            # A simulated exchange starts when the last rank arrives. On a real rank, it starts when
            # the rank itself arrives.
            if span.kind == "collective":
                arrived = max(span.ready_ns, free)
                span, free = replace(span, start_ns=min(arrived, span.start_ns)), span.end_ns
            times = {
                name: getattr(span, name) + clock for name in ("start_ns", "end_ns", "ready_ns")
            }
            spans.append(replace(span, **times))
        # The exchange lane finishes at `end_s`, when the device may still be running a segment of a
        # job that has left.
        wall_ns[rank] = max([round(result.end_s * 1e9), *(span.end_ns for span in result.spans)])
    names = sorted({span.job for span in spans} | {str(job) for job in range(jobs)})
    facts = [
        JobSummary(name=n, steps=max((s.step for s in spans if s.job == n), default=0))
        for n in names
    ]
    return spans, facts, wall_ns


def check_bound(result, rounding):
    assert result.bound_s <= result.period_s + rounding
    assert set(result.lost_s) == set(LOST_TIME)
    assert min(result.lost_s.values()) >= -rounding
    assert result.bound_s + sum(result.lost_s.values()) == pytest.approx(
        result.period_s, abs=rounding
    )


def check_sums(result, *, served=False):
    """Checks what must hold for every breakdown."""
    assert 0 <= result.shared_share <= 1 + 1e-9
    if result.period_s is None:
        assert result.bound_s is result.efficiency is result.s_per_step is None
        assert result.lost_s == {}
        assert not any(job.steps_per_round for job in result.jobs)
        return
    rounding = 1e-9 * max(result.period_s, 1e-6)
    if served:
        assert result.bound_s is result.efficiency is None and not result.lost_s
    else:
        check_bound(result, rounding)
    # a round has as many steps as there are jobs, and the rows are consistent with the last row
    assert sum(job.steps_per_round for job in result.jobs) == pytest.approx(len(result.crossed))
    assert 0 <= result.hidden_share <= 1
    if not result.in_turn:
        rates = [job.steps_per_s for job in result.crossed if job.period_s]
        assert sum(rates) * result.period_s == pytest.approx(len(result.crossed)) or not all(rates)


@PARTS
@settings(max_examples=scaled(100), deadline=None)
@given(seed=SEEDS, kind=st.sampled_from(POLICIES))
@example(seed=5495493, kind="round-robin")  # still computing after its last exchange
def test_no_round_is_shorter_than_its_bound(part, seed, kind):
    spans, facts, wall_ns = simulated(seed, kind)
    check_sums(break_down(spans, facts, wall_ns, in_turn=kind == "sequential"))


@PARTS
@settings(max_examples=scaled(50), deadline=None)
@given(seed=SEEDS, kind=st.sampled_from(POLICIES))
def test_exchanges_on_lanes_of_their_own_may_overlap(part, seed, kind):
    """With parameter servers, each job has its own lane, and the n-th steps of two ranks are
    unrelated.
    """
    rng = random.Random(seed)
    spans, facts, wall_ns = simulated(seed, kind)
    moved = []
    for span in spans:
        late = round(rng.random() * 0.5 * S) if rng.random() < 0.3 else 0
        own = {"lane": 1 + int(span.job) if span.job.isdecimal() else 9, "label": PARAMETER_SERVER}
        moved.append(replace(span, end_ns=span.end_ns + late, **own))
    longer = {rank: end + S for rank, end in wall_ns.items()}
    check_sums(break_down(moved, facts, longer, in_turn=kind == "sequential"), served=True)


@pytest.mark.parametrize("jobs", [2, 3, 4])
@pytest.mark.parametrize("steps", [3, 4, 5, 8])
def test_short_runs_are_measured_over_whole_rounds(jobs, steps):
    """Equal jobs take turns, and exchanges are the bottleneck. Every round takes `jobs` seconds,
    and even the shortest run reports that.
    """
    graph = StepGraph(kinds=("compute", "collective"), needs=((), (0,)), signature=1)
    scripts = [
        [loop(random.Random(0), graph, (0.5, 0.0), steps, jitter=0, think=0) for _ in range(jobs)]
    ]
    spans = Simulation(scripts, policy=RoundRobin(), exchange_s=lambda *_: 1.0).run()[0].spans
    facts = [JobSummary(name=str(job), steps=steps) for job in range(jobs)]
    result = break_down(spans, facts, {0: 100 * S})
    assert (result.period_s, result.bound_s) == (pytest.approx(jobs), pytest.approx(jobs))
    assert result.rounds >= steps - 2


def test_unequal_rates_share_a_round_of_as_many_steps():
    """A round has as many job-steps as there are jobs, so a job may have a fraction of a step in
    it.

    Here one job makes three steps of 1 s while the other job makes a single step of 3 s, i.e. four
    job-steps in 6 s. So a round of two job-steps takes 3 s.
    """

    def step(job, number, start, length):
        return Span(
            rank=0,
            job=job,
            step=number,
            segment=0,
            kind="compute",
            lane=0,
            start_ns=round(start * S),
            end_ns=round((start + length) * S),
            ready_ns=round(start * S),
        )

    spans = []
    for n in range(6):
        spans += [step("small", 3 * n + i + 1, 6 * n + i, 1) for i in range(3)]
        spans.append(step("large", n + 1, 6 * n + 3, 3))
    facts = [
        JobSummary(name="small", steps=18, examples_per_step=1),
        JobSummary(name="large", steps=6, examples_per_step=2),
    ]
    result = break_down(spans, facts, {0: 36 * S})
    assert (result.period_s, result.bound_s, result.s_per_step) == (3.0, 3.0, 1.5)
    assert [job.steps_per_round for job in result.jobs] == [1.5, 0.5]
    assert [job.steps_per_s for job in result.jobs] == [0.5, pytest.approx(1 / 6)]
    assert result.compute_s == 3.0
    assert result.examples_per_s == pytest.approx(sum(job.examples_per_s for job in result.jobs))


def as_report(seed, kind):
    spans, facts, wall_ns = simulated(seed, kind)
    wall = {rank: (0, end) for rank, end in wall_ns.items()}
    return Report(
        spans=tuple(spans),
        jobs=tuple(facts),
        wall_ns=wall,
        policy=IN_TURN if kind == "sequential" else kind,
    )


def test_in_turn_policy_is_recognised_by_its_name():
    assert Sequential().name == IN_TURN
    assert RoundRobin().name != IN_TURN != Weighted((1.0,)).name


@PARTS
@settings(max_examples=scaled(30), deadline=None)
@given(seed=SEEDS, kind=st.sampled_from(POLICIES))
def test_every_table_can_be_printed(part, seed, kind):
    report = as_report(seed, kind)
    text = str(report)
    if report.rounds.period_s is None and len(report.jobs) > 1:
        assert "efficiency" not in text and "Lost" not in text and "bound" not in text


def slices_of(events):
    """Returns each track's slices in whole nanoseconds."""
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (start, start + round(event["dur"] * 1000))
            )
    return tracks


def check_trace(events):
    """Checks what viewers require: arrows go forward from slice to slice, and a track's slices
    nest.
    """
    tracks = slices_of(events)
    for track in tracks.values():
        around = []
        for start, end in sorted(track, key=lambda s: (s[0], -s[1])):
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        for flow in (start, ends[number]):
            at = round(flow["ts"] * 1000)
            assert any(low <= at <= high for low, high in tracks[flow["pid"], flow["tid"]])


@PARTS
@settings(max_examples=scaled(40), deadline=None)
@given(seed=SEEDS, kind=st.sampled_from(POLICIES))
def test_traces_of_all_runs_are_well_formed(tmp_path_factory, part, seed, kind):
    report, rng = as_report(seed, kind), random.Random(seed)
    waits = []
    for span in report.spans:  # the activities of the jobs' threads begin and end anywhere
        if rng.random() < 0.3:
            start = span.start_ns + rng.randrange(-(10**6), 10**6)
            end = start + rng.randrange(1 + 2 * (span.end_ns - span.start_ns))
            kind_of_wait = rng.choice(("input", "host", "compile"))
            waits.append(
                replace(
                    span, kind=kind_of_wait, segment=-1, start_ns=start, end_ns=end, ready_ns=start
                )
            )
    report = replace(report, spans=(*report.spans, *waits))
    path = report.to_chrome_trace(tmp_path_factory.mktemp("trace") / "trace.json")
    check_trace(json.loads(path.read_text())["traceEvents"])


def test_exchange_beside_backward_has_its_makers_arrow():
    """In the trace, an arrow leads to an exchange from the segment that computed its operands.

    Segment 2 computes while the exchange (segment 1) is in flight. It's short and ends before the
    exchange does, but none of its results are exchanged, so the arrow must not come from there.
    """

    def span(kind, segment, start, end, ready):
        return Span(
            rank=0,
            job="a",
            step=1,
            segment=segment,
            kind=kind,
            lane=0,
            start_ns=start,
            end_ns=end,
            ready_ns=ready,
        )

    spans = (
        span("compute", 0, 0, 1000, 0),
        span("compute", 2, 1000, 1500, 1000),
        span("collective", 3, 1010, 9000, 1000),
        span("compute", 4, 1500, 2000, 1500),
        span("collective", 5, 9000, 9500, 2000),
    )
    report = Report(spans=spans, jobs=(JobSummary(name="a", steps=1),), wall_ns={0: (0, 10_000)})
    flows = [
        (e["ph"], e["ts"]) for e in trace_events(report)["traceEvents"] if e.get("cat") == "flow"
    ]
    assert flows == [("s", 0.9), ("f", 1.01), ("s", 1.95), ("f", 9.0)]
