"""Jobs that join, stop, pause, resume and fail at random times on up to 4 ranks.

All ranks go through the same slots, and nothing hangs. The simulator raises if ranks meet in
different slots or hang, and the interleavers check themselves after every event.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.interleave.simulator import Add, Batch, Call, Fail, Prepare, Simulation, Think
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest
from tests.support.examples import scaled
from tests.support.parts import in_parts

SEEDS = st.integers(0, 2**32 - 1)
PARTS = in_parts(6)
END_S = 60.0  # when every paused job is resumed


def graph(exchanges, signature):
    """Returns alternating compute segments and exchanges, then an update after the commit."""
    kinds, needs = [], []
    for n in range(exchanges):
        kinds += ["compute", "collective"]
        needs += [(2 * n - 1,) if n else (), (2 * n,)]
    last = 2 * exchanges
    return StepGraph(
        kinds=(*kinds, "compute"),
        needs=(*needs, (last - 1,)),
        after_commit=frozenset({last}),
        signature=signature,
        text="x",
    )


def expected(plan):
    return [(n + 1, segment) for n, each in enumerate(plan) for segment in each.collectives]


def exchanges_of(result, job):
    return [slot[2:] for slot in result.slots if slot[0] == "exchange" and slot[1] == job]


def duration(rng):
    return rng.choice((0.0, 0.001, rng.random(), 2 * rng.random()))


def script(rng, plan, *, fails_at=-1, adds=None):
    """Yields the actions of one rank's thread of one job. `adds` maps a step to the jobs added
    there.
    """
    at = 0.0
    for n in range(len(plan)):
        at += duration(rng)
        yield Prepare(at, 0, n + 1, n + 1 == len(plan))
    for n, each in enumerate(plan):
        if not (yield Batch(0, n)):
            return
        yield Think(duration(rng))
        for name, added in (adds or {}).get(n, ()):
            yield Add(name, added)
        if n == fails_at:
            yield Fail("the job failed")
        yield Call(each, tuple(duration(rng) for _ in each.kinds))
    for name, added in (adds or {}).get(len(plan), ()):
        yield Add(name, added)


class Case:
    """A random set of jobs, some of which are added during the run. Ranks differ only in their
    timing.
    """

    def __init__(self, seed):
        self.seed, rng = seed, random.Random(seed)
        self.rng, self.ranks, self.jobs = rng, rng.randint(1, 4), rng.randint(1, 3)
        self.pending = [f"j{n}" for n in range(rng.randint(0, 4))]
        self.plans = {
            name: [graph(rng.randint(1, 3), rng.randrange(9)) for _ in range(rng.randint(1, 5))]
            for name in (*map(str, range(self.jobs)), *self.pending)
        }
        # Added by job 0, before its last step.
        self.by_job = [name for name in self.pending if rng.random() < 0.5]
        self.submitted = [
            name for name in self.pending if name not in self.by_job and rng.random() < 0.3
        ]
        self.faults = {}

    def script(self, rank, name):
        rng, adds = random.Random(f"{self.seed} {rank} {name}"), {}
        if name == "0":
            # The order differs between ranks.
            for joiner in rng.sample(self.by_job, len(self.by_job)):
                step = random.Random(f"{self.seed} {joiner}").randrange(len(self.plans["0"]) + 1)
                adds.setdefault(step, []).append((joiner, self.script(rank, joiner)))
        fault = self.faults.get(name, (-1, -1))
        return script(
            rng, self.plans[name], fails_at=fault[1] if fault[0] == rank else -1, adds=adds
        )

    def run(self, policy, requests=(), **options):
        salt, rng = self.rng.random(), self.rng
        adds = [
            (10 * rng.random(), rank, name, self.script(rank, name))
            for name in self.pending
            if name not in self.by_job and name not in self.submitted
            for rank in range(self.ranks)
        ]
        return Simulation(
            [
                [self.script(rank, str(job)) for job in range(self.jobs)]
                for rank in range(self.ranks)
            ],
            policy=policy,
            depth=rng.randint(1, 3),
            vote_s=rng.choice((0.0, 0.01)),
            requests=requests,
            adds=adds,
            exchange_s=lambda *slot: random.Random(f"{slot}{salt}").random(),
            submits=[(10 * rng.random(), name) for name in self.submitted],
            submitted=self.script,
            backoff_s=lambda level: min(0.02 * 2**level, 1.0),
            **options,
        ).run()

    def policy(self):
        return self.rng.choice((RoundRobin(), Weighted((1.0, 3.0, 2.0)[: self.jobs]), Sequential()))

    def names(self, result):
        return {**{job: str(job) for job in range(self.jobs)}, **result.names}


def check_equal(results):
    for result in results:
        # A step that was committed anywhere was returned everywhere, so every rank has the last
        # committed state.
        assert [result.returned.get(job, 0) for job in range(len(result.steps))] == result.steps
        for what in ("slots", "finished", "steps", "names", "paused"):
            assert getattr(result, what) == getattr(results[0], what)


@PARTS
@settings(max_examples=scaled(50), deadline=None)
@given(seed=SEEDS)
def test_jobs_join_once_every_rank_has_added_them(part, seed):
    case = Case(seed)
    results = case.run(case.policy())
    check_equal(results)
    result, names = results[0], case.names(results[0])
    assert {how for how, _ in result.finished.values()} == {"ended"}
    for job, name in names.items():
        assert exchanges_of(result, job) == expected(case.plans[name])
        assert result.steps[job] == len(case.plans[name])
    # Only jobs added from outside may come too late, and then they do so on every rank.
    assert set(case.by_job) <= set(names.values())
    for each in results:
        assert set(each.left_out) <= set(case.pending) - set(names.values())


@PARTS
@settings(max_examples=scaled(75), deadline=None)
@given(seed=SEEDS)
def test_requests_and_failures_take_effect_uniformly(part, seed):
    """A request or failure takes effect between the same two steps on every rank."""
    case = Case(seed)
    rng = case.rng
    everybody = range(case.jobs + len(case.pending))
    requests = [
        (
            20 * rng.random(),
            rng.randrange(case.ranks),
            rng.choice(everybody),
            rng.choice(list(JobRequest)[:3]),
        )
        for _ in range(rng.randint(0, 6))
    ]
    requests += [(END_S, rng.randrange(case.ranks), job, JobRequest.RESUME) for job in everybody]
    for name in rng.sample(sorted(case.plans), rng.randint(0, min(2, len(case.plans)))):
        case.faults[name] = (rng.randrange(case.ranks), rng.randrange(len(case.plans[name])))
    results = case.run(case.policy(), requests)
    check_equal(results)
    result, names = results[0], case.names(results[0])
    stopped = {job for _, _, job, request in requests if request is JobRequest.STOP}
    for job, name in names.items():
        how, steps = result.finished[job][0], result.steps[job]
        assert exchanges_of(result, job) == expected(case.plans[name][:steps])
        assert (
            how == "ended"
            or (how == "stopped" and job in stopped)
            or (how == "failed" and name in case.faults)
        )
        if how == "ended":
            assert steps == len(case.plans[name])
        if how == "failed":
            rank, step = case.faults[name]
            assert steps == step
            assert [t.startswith("failed\n") for t in result.finished[job][1]] == [
                r == rank for r in range(case.ranks)
            ]
    for begin, (job, paused, slot) in enumerate(result.paused):
        if paused:
            ends = [end for other, on, end in result.paused[begin + 1 :] if other == job and not on]
            rest = [
                s[2]
                for s in result.slots[slot : ends[0] if ends else None]
                if s[:2] == ("exchange", job)
            ]
            assert len(set(rest)) <= 1  # it completes the step that had begun, and makes no other
            assert all(step == result.steps[job] or ends for step in rest)


def endless():
    while True:
        yield Call(graph(1, 1), (0.1, 0.0, 0.0))


def test_one_ranks_request_suffices_and_pause_wins():
    """If ranks request both, a pause takes precedence over a resume."""
    plan = [graph(1, 1)] * 3
    requests = [
        (0.0, 1, 0, JobRequest.PAUSE),
        (0.0, 0, 0, JobRequest.RESUME),
        (50.0, 0, 0, JobRequest.RESUME),
        (3.0, 2, 1, JobRequest.STOP),
    ]
    scripts = [[script(random.Random(rank), plan), endless()] for rank in range(3)]
    results = Simulation(scripts, policy=RoundRobin(), requests=requests).run(20_000)
    check_equal(results)
    assert [(job, paused) for job, paused, _ in results[0].paused] == [(0, True), (0, False)]
    assert results[0].finished == {0: ("ended", ()), 1: ("stopped", ())}
    assert results[0].end_s > 50
    assert results[0].steps[0] == 3


def test_while_all_are_paused_the_lanes_rest():
    requests = [
        (1.0, 0, 0, JobRequest.PAUSE),
        (101.0, 1, 0, JobRequest.RESUME),
        (102.0, 1, 0, JobRequest.STOP),
    ]
    results = Simulation([[endless()], [endless()]], policy=RoundRobin(), requests=requests).run(
        20_000
    )
    check_equal(results)
    pause, go_on = (slot for _, _, slot in results[0].paused)
    rest = results[0].slots[pause:go_on]
    assert [slot for slot in rest if slot[0] == "exchange"] == []
    assert 100 / 0.05 <= len(rest) <= 100 / 0.05 + 20  # paced by the backoff, with no extra votes


def test_paused_and_unstarted_jobs_can_be_stopped():
    requests = [
        (1.0, 0, 0, JobRequest.PAUSE),
        (5.0, 1, 0, JobRequest.STOP),
        (0.5, 0, 2, JobRequest.STOP),
    ]
    scripts = [
        [endless(), script(random.Random(rank), [graph(2, 1)] * 4), endless()] for rank in range(2)
    ]
    results = Simulation(scripts, policy=Sequential(), requests=requests).run(20_000)
    check_equal(results)
    assert {job: how for job, (how, _) in results[0].finished.items()} == {
        0: "stopped",
        1: "ended",
        2: "stopped",
    }
    assert results[0].steps[2] == 0


def test_a_job_that_some_rank_never_adds_is_left_out():
    scripts = [[script(random.Random(rank), [graph(1, 1)] * 3)] for rank in range(3)]
    adds = [(0.1, rank, name, endless()) for rank, name in ((0, "a"), (1, "a"), (0, "b"))]
    results = Simulation(scripts, policy=RoundRobin(), adds=adds).run()
    check_equal(results)
    assert [result.left_out for result in results] == [("a", "b"), ("a",), ()]
    assert not any(result.names for result in results)


@pytest.mark.integration
def test_a_job_may_add_its_successor_as_its_last_act():
    """With 1,000 of them in a row, the interleaver's state doesn't grow."""

    def link(n):
        yield Call(graph(1, n % 7), (0.1, 0.0, 0.1))
        if n < 1000:
            yield Add(f"{n + 1}", link(n + 1))

    simulation = Simulation([[link(0)] for _ in range(2)], policy=RoundRobin())
    results = simulation.run()
    check_equal(results)
    assert results[0].steps == [1] * 1001
    for rank in simulation._ranks:
        agreed = rank.interleaver.shared
        assert agreed.rows == 2  # a row is free again one vote after the previous job has left
        assert not agreed.jobs
        inner = rank.interleaver
        assert not (
            agreed.turns.jobs
            or inner._compute._turns.jobs
            or inner._jobs
            or inner._compute.on_device
        )
        assert len(inner._ballot_writer._ballot.cast()) == 4 + 12 * agreed.rows


def test_joiners_of_weighted_run_get_mean_or_set_share():
    """A job that joins a weighted run gets the run's mean share unless its share is given."""
    assert [Weighted((1, 3)).share(job) for job in range(4)] == [1, 3, 2, 2]
    assert [Weighted((1, 3), joining=0.5).share(job) for job in range(3)] == [1, 3, 0.5]


def test_failure_waits_for_every_rank_to_commit():
    """Rank 1 fails after a step whose last segment the other rank hasn't started yet, because it's
    busy with another job.
    """

    def fails(rank):
        yield Call(graph(1, 1), (0.1, 0.0, 0.1))
        if rank == 1:
            yield Fail("the job failed")
        yield Call(graph(1, 1), (0.1, 0.0, 0.1))

    def busy(rank):
        yield Think(0.5)
        yield Call(StepGraph(kinds=("compute",), needs=((),)), (30.0 if rank == 0 else 0.0,))

    results = Simulation(
        [[fails(rank), busy(rank)] for rank in range(2)], policy=RoundRobin(), depth=1
    ).run()
    check_equal(results)
    assert results[0].steps == [1, 0]
    assert results[0].finished[0][0] == "failed"
