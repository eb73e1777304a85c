"""Tests invariant 4 and that nothing hangs, for random programs on up to 4 ranks and 4 jobs.

The timings are random too, and so is which segments fail. The simulator raises an error if a rank
hangs, or if the ranks' exchange lanes would run different work at the same position. After every
event, each interleaver checks its invariants: a segment runs only after its dependencies, a segment
behind the commit runs only once the step is committed, and the compute lane is never idle while a
segment is ready.
"""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.interleave.simulator import Batch, Call, Fail, Prepare, Simulation, Sync, Think
from jaxcross.interleave.step_graph import StepGraph
from tests.support.examples import scaled
from tests.support.parts import in_parts

SEEDS = st.integers(0, 2**32 - 1)
PARTS = in_parts(6)


def random_graph(rng: random.Random, signature: int) -> StepGraph:
    """Returns exchanges that depend on each other via random compute segments, then an update after
    the commit.
    """
    kinds, needs = [], []
    for _ in range(rng.randint(1, 4)):
        for _ in range(rng.randint(0, 2)):
            kinds.append("compute")
            needs.append(
                tuple(
                    sorted(
                        rng.sample(range(len(kinds) - 1), min(len(kinds) - 1, rng.randint(0, 2)))
                    )
                )
            )
        kinds.append("collective")
        needs.append(
            tuple(sorted(rng.sample(range(len(kinds) - 1), min(len(kinds) - 1, rng.randint(0, 2)))))
        )
    last = len(kinds) - 1
    for _ in range(rng.randint(0, 2)):
        kinds.append("compute")
        needs.append((last, len(kinds) - 2) if len(kinds) - 2 != last else (last,))
    after = frozenset(range(last + 1, len(kinds)))
    return StepGraph(
        kinds=tuple(kinds), needs=tuple(needs), after_commit=after, signature=signature, text="x"
    )


def local_graph(rng: random.Random) -> StepGraph:
    n = rng.randint(1, 3)
    return StepGraph(kinds=("compute",) * n, needs=tuple((i - 1,) if i else () for i in range(n)))


def random_case(rng: random.Random):
    """Returns outlines by job and step. They are the same on all ranks, just as programs are."""
    ranks, jobs = rng.randint(1, 4), rng.randint(1, 4)
    plans = []
    for job in range(jobs):
        variants = [random_graph(rng, 10 * job + v) for v in range(rng.randint(1, 2))]
        plans.append([rng.choice(variants) for _ in range(rng.randint(0, 5))])
    locals_ = [local_graph(rng) for _ in range(jobs)]
    return ranks, jobs, plans, locals_


def duration(rng: random.Random) -> float:
    return rng.choice((0.0, 0.001, rng.random(), 3 * rng.random()))


def script(
    rng: random.Random,
    plan,
    local,
    *,
    fault=None,
    fault_step=-1,
    segment=0,
    how="dispatch",
    data=True,
):
    """Yields the actions of one rank's thread of one job. Only durations and the fault are
    rank-local.
    """
    if data:
        # The last batch is marked as such. On each rank, batches become ready at different times.
        at = 0.0
        for n in range(len(plan)):
            at += duration(rng)
            yield Prepare(at, 0, n + 1, n + 1 == len(plan))
    for n, graph in enumerate(plan):
        if data and not (yield Batch(0, n)):
            return
        yield Think(duration(rng))
        if n == fault_step and fault == "raise":
            yield Fail("raised")
        if n == fault_step and fault == "return":
            return
        if n == fault_step and fault == "other":
            graph = StepGraph(kinds=graph.kinds, needs=graph.needs, signature=99, text="y")
        if n == fault_step and fault == "function":
            graph = replace(graph, function="another")
        fails = {}
        if n == fault_step and fault == "segment":
            compute = [i for i, kind in enumerate(graph.kinds) if kind == "compute"]
            fails = {compute[segment % len(compute)]: how} if compute else {}
        yield Call(graph, tuple(duration(rng) for _ in graph.kinds), fails)
        if n % 2:
            yield Call(local, tuple(duration(rng) for _ in local.kinds))
        if n == 2:
            yield Sync("save")


def run(rng: random.Random, ranks, scripts, policy, stop_at_s=None):
    salt = rng.random()
    return Simulation(
        scripts,
        policy=policy,
        depth=rng.randint(1, 3),
        exchange_s=lambda *slot: random.Random(f"{slot}{salt}").random(),
        vote_s=rng.choice((0.0, 0.01)),
        backoff_s=lambda level: min(0.02 * 2**level, 1.0),
        stop_at_s=stop_at_s,
    ).run()


def exchanges_of(result, job):
    return [slot[2:] for slot in result.slots if slot[0] == "exchange" and slot[1] == job]


def expected_exchanges(plan):
    return [(n + 1, segment) for n, graph in enumerate(plan) for segment in graph.collectives]


@PARTS
@settings(max_examples=scaled(120), deadline=None)
@given(
    seed=SEEDS, kind=st.sampled_from(("round-robin", "weighted", "sequential")), data=st.booleans()
)
def test_every_rank_makes_every_exchange_in_one_order(part, seed, kind, data):
    rng = random.Random(seed)
    ranks, jobs, plans, locals_ = random_case(rng)
    scripts = [
        [
            script(random.Random(f"{seed} {rank} {job}"), plans[job], locals_[job], data=data)
            for job in range(jobs)
        ]
        for rank in range(ranks)
    ]
    weighted = Weighted(tuple(rng.choice((0.1, 1, 3)) for _ in range(jobs)))
    policy = {"round-robin": RoundRobin(), "weighted": weighted, "sequential": Sequential()}[kind]
    results = run(rng, ranks, scripts, policy)
    for result in results:
        assert result.slots == results[0].slots
        assert result.steps == [len(plan) for plan in plans]
        assert {how for how, _ in result.finished.values()} == {"ended"}
        for job in range(jobs):
            assert exchanges_of(result, job) == expected_exchanges(plans[job])
    if kind == "sequential":
        order = [slot[1] for slot in results[0].slots if slot[0] == "exchange"]
        assert order == sorted(order)


@PARTS
@settings(max_examples=scaled(120), deadline=None)
@given(
    seed=SEEDS,
    fault=st.sampled_from(("raise", "return", "other", "function", "segment", "segment")),
    how=st.sampled_from(("dispatch", "complete")),
)
def test_a_fault_on_one_rank_ends_one_job_on_all_ranks(part, seed, fault, how):
    rng = random.Random(seed)
    ranks, jobs, plans, locals_ = random_case(rng)
    failing_rank, failing_job = rng.randrange(ranks), rng.randrange(jobs)
    plan = plans[failing_job] = plans[failing_job] or [random_graph(rng, 5)]
    at, segment = rng.randrange(len(plan)), rng.randrange(9)
    scripts = [
        [
            script(
                random.Random(f"{seed} {rank} {job}"),
                plans[job],
                locals_[job],
                segment=segment,
                how=how,
                fault=fault if (rank, job) == (failing_rank, failing_job) else None,
                fault_step=at,
            )
            for job in range(jobs)
        ]
        for rank in range(ranks)
    ]
    results = run(rng, ranks, scripts, RoundRobin())
    compute = "compute" in plan[at].kinds
    harmless = (ranks == 1 and fault in ("return", "other", "function")) or (
        fault == "segment" and not compute
    )
    for result in results:
        assert result.slots == results[0].slots
        assert result.finished == results[0].finished
        assert result.steps == results[0].steps
        for job in range(jobs):
            if job != failing_job or harmless:
                assert result.finished[job][0] == "ended"
            if job != failing_job:
                assert result.steps[job] == len(plans[job])
                assert exchanges_of(result, job) == expected_exchanges(plans[job])
        if harmless:
            continue
        assert result.finished[failing_job][0] == "failed"
        texts = result.finished[failing_job][1]
        assert len(texts) == ranks
        if fault in ("raise", "segment"):
            assert [t.startswith("failed\n") for t in texts] == [
                rank == failing_rank for rank in range(ranks)
            ]
        else:
            said = {
                "return": f"end\nended after step {at}",
                "other": f"step\ncalled step {at + 1}\ny",
                "function": f"step\ncalled step {at + 1} by another\nx",
            }[fault]
            assert texts[failing_rank] == said
            assert {t for rank, t in enumerate(texts) if rank != failing_rank} == {
                f"step\ncalled step {at + 1}\nx"
            }
        # Nothing overwrote the state of an uncommitted step. A fault after the commit may lose one
        # step.
        after = fault == "segment" and result.steps[failing_job] > at
        assert result.steps[failing_job] == at or after


@PARTS
@settings(max_examples=scaled(50), deadline=None)
@given(seed=SEEDS)
def test_data_ending_on_one_rank_ends_loop_everywhere(part, seed):
    rng = random.Random(seed)
    ranks, jobs = rng.randint(1, 4), rng.randint(1, 3)
    lengths = [[rng.randint(0, 5) for _ in range(jobs)] for _ in range(ranks)]
    graphs = [random_graph(rng, job) for job in range(jobs)]

    def loop(rng, length, graph):
        at = 0.0
        for n in range(length):
            at += duration(rng)
            yield Prepare(at, 0, n + 1, n + 1 == length)
        if not length:
            yield Prepare(duration(rng), 0, 0, True)
        n = 0
        while (yield Batch(0, n)):
            assert n < length
            yield Call(graph, tuple(duration(rng) for _ in graph.kinds))
            n += 1
        yield Think(duration(rng))

    scripts = [
        [loop(random.Random(f"{seed} {r} {j}"), lengths[r][j], graphs[j]) for j in range(jobs)]
        for r in range(ranks)
    ]
    for result in run(rng, ranks, scripts, RoundRobin()):
        assert result.steps == [min(lengths[r][job] for r in range(ranks)) for job in range(jobs)]
        assert {how for how, _ in result.finished.values()} == {"ended"}


@PARTS
@settings(max_examples=scaled(50), deadline=None)
@given(seed=SEEDS, stop_at_s=st.floats(0, 8))
def test_an_interrupt_stops_all_ranks_at_the_same_step(part, seed, stop_at_s):
    rng = random.Random(seed)
    ranks, jobs, plans, locals_ = random_case(rng)
    scripts = [
        [
            script(random.Random(f"{seed} {rank} {job}"), plans[job], locals_[job])
            for job in range(jobs)
        ]
        for rank in range(ranks)
    ]
    results = run(rng, ranks, scripts, rng.choice((RoundRobin(), Sequential())), stop_at_s)
    for result in results:
        assert result.steps == results[0].steps
        assert result.finished == results[0].finished
        for job, steps in enumerate(result.steps):
            assert exchanges_of(result, job) == expected_exchanges(plans[job][:steps])


@PARTS
@settings(max_examples=scaled(35), deadline=None)
@given(
    times=st.lists(st.tuples(st.floats(0.05, 3), st.floats(0.05, 3)), min_size=1, max_size=4),
    ranks=st.integers(1, 2),
)
def test_round_robin_reaches_the_bound_after_start_up(part, times, ranks):
    steps = 30
    graph = StepGraph(kinds=("compute", "collective"), needs=((), (0,)), signature=1)

    def loop(c):
        for _ in range(steps):
            yield Call(graph, (c, 0.0))

    scripts = [[loop(c) for c, _ in times] for _ in range(ranks)]
    end = (
        Simulation(
            scripts, policy=RoundRobin(), exchange_s=lambda job, *_: times[job][1], check=False
        )
        .run()[0]
        .end_s
    )
    bound = max(sum(c for c, _ in times), sum(m for _, m in times), *(c + m for c, m in times))
    start_up = sum(c + m for c, m in times)
    assert steps * bound * (1 - 1e-9) <= end <= steps * bound + start_up
