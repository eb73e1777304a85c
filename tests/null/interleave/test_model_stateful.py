"""Tests cases that are too large to explore completely.

Hypothesis searches for an order of events that breaks a rule, and shrinks it.
"""

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxcross.interleave import messages as m
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.interleave.simulator import Add, Batch, Call, Fail, Prepare, Sync
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest
from tests.model.model_case import Case, meet
from tests.model.model_rank import RankModel
from tests.support.examples import scaled

SIGNATURES = iter(range(1, 10**9))


@st.composite
def graphs(draw):
    """Draws compute segments and exchanges in any order, each needing earlier ones, then perhaps an
    update.
    """
    kinds = (*draw(st.lists(st.sampled_from(("compute", "collective")), max_size=4)), "collective")
    needs = [
        tuple(sorted(draw(st.sets(st.integers(0, n - 1), max_size=2)))) if n else ()
        for n in range(len(kinds))
    ]
    after = draw(st.integers(0, 2))
    return StepGraph(
        kinds=(*kinds, *["compute"] * after),
        needs=(*needs, *[(len(kinds) - 1,)] * after),
        after_commit=frozenset(range(len(kinds), len(kinds) + after)),
        signature=next(SIGNATURES),
        text="x",
    )


@st.composite
def scripts(draw):
    """Draws a job's scripts: the same loop on every rank, but one rank may deviate from it."""
    step, local = draw(graphs()), StepGraph(kinds=("compute",), needs=((),))
    kinds = draw(st.lists(st.sampled_from(("step", "step", "batch", "local", "sync")), max_size=4))
    loop, batches = [], 0
    for kind in kinds:
        if kind == "batch":
            loop.append(Batch(0, batches))
            batches += 1
        else:
            what = {"step": step, "local": local}.get(kind)
            loop.append(Sync("save") if what is None else Call(what, (0.0,) * len(what.kinds)))
    return loop, batches


@st.composite
def outside(draw, ranks, jobs):
    """Draws what each rank receives from outside: jobs to add, requests, an interrupt."""
    coming = [[] for _ in range(ranks)]
    for n in range(draw(st.integers(0, 2))):
        script, batches = draw(scripts())
        prepared = [Prepare(0, 0, k + 1, k + 1 == batches) for k in range(batches)]
        on = draw(st.sampled_from((range(ranks), range(ranks), [0])))
        for rank in on:
            coming[rank].append(Add(f"new-{n}", (*prepared, *script)))
    for what in draw(st.lists(st.sampled_from(("stop", "pause", "interrupt")), max_size=2)):
        rank, job = draw(st.integers(0, ranks - 1)), draw(st.integers(0, jobs - 1))
        events = {
            "stop": [m.JobRequested(job, "", JobRequest.STOP)],
            "interrupt": [m.StopRequested()],
            "pause": [
                m.JobRequested(job, "", JobRequest.PAUSE),
                m.JobRequested(job, "", JobRequest.RESUME),
            ],
        }[what]
        at = draw(st.integers(0, len(coming[rank])))
        coming[rank][at:at] = events
    return tuple(map(tuple, coming))


@st.composite
def cases(draw):
    ranks, jobs = draw(st.integers(2, 4)), draw(st.lists(scripts(), min_size=1, max_size=4))
    rows = [[list(job) for job, _ in jobs] for _ in range(ranks)]
    for number, (job, batches) in enumerate(jobs):
        for row in rows:  # each rank's data may end at a different batch
            have = draw(st.integers(0, batches)) if batches else 0
            prepared = [Prepare(0, 0, n + 1, n + 1 == have) for n in range(have)] or [
                Prepare(0, 0, 0, True)
            ]
            row[number] = [*prepared, *job] if batches else list(job)
        steps = [n for n, action in enumerate(job) if isinstance(action, Call)]
        fault = draw(st.sampled_from(("none", "none", "raise", "dispatch", "complete")))
        if steps and fault != "none":
            row, at = rows[draw(st.integers(0, ranks - 1))], draw(st.sampled_from(steps))
            at = row[number].index(job[at])
            compute = [
                n for n, kind in enumerate(job_step(row[number][at]).kinds) if kind == "compute"
            ]
            if fault == "raise":
                row[number][at] = Fail("raised")
            elif compute:
                graph = job_step(row[number][at])
                fails = {draw(st.sampled_from(compute)): fault}
                row[number][at] = Call(graph, (0.0,) * len(graph.kinds), fails)
    policy = draw(
        st.sampled_from((RoundRobin(), Sequential(), Weighted((1.0, 0.3, 3.0, 1.0)[: len(jobs)])))
    )
    return Case(
        scripts=tuple(tuple(tuple(job) for job in row) for row in rows),
        policy=policy,
        depth=draw(st.integers(1, 3)),
        outside=draw(outside(ranks, len(jobs))),
        opening=draw(st.sampled_from((1, 16))),
        together=draw(st.booleans()),
        slow=tuple(range(len(jobs))),
    )


def job_step(action):
    assert isinstance(action, Call)
    return action.graph


def will_resume(rank):
    """Whether a rank that pauses a job resumes it in the end, whatever it requests before."""
    return any(
        isinstance(event, m.JobRequested) and event.request is JobRequest.RESUME
        for event in rank.outside
    )


class Ranks(RuleBasedStateMachine):
    """Ranks that move in an order that Hypothesis chooses."""

    @initialize(case=cases())
    def start(self, case):
        self.ranks = [RankModel(case, rank) for rank in range(len(case.scripts))]
        self.through = [0] * len(self.ranks)  # per rank: the number of slots that it has left
        self.waiting = defaultdict(dict)  # by slot: the arrivals of the ranks that have reached it
        self.note()

    def note(self):
        for number, rank in enumerate(self.ranks):
            if rank.arrival is not None:
                self.waiting[self.through[number]].setdefault(number, rank.arrival)

    def may_leave(self, number):
        stand = self.waiting[self.through[number]]
        return number in stand and len(stand) == len(self.ranks) and not self.ranks[number].through

    def leave(self, number):
        stand = self.waiting[self.through[number]]
        result = meet([stand[n] for n in range(len(self.ranks))])
        self.through[number] += 1
        self.ranks[number].leave(result)
        self.note()

    @precondition(lambda self: any(rank.moves() for rank in self.ranks))
    @rule(data=st.data())
    def move(self, data):
        able = [rank for rank in self.ranks if rank.moves()]
        rank = data.draw(st.sampled_from(able))
        rank.take(data.draw(st.sampled_from(rank.moves())))
        self.note()

    @precondition(lambda self: any(self.may_leave(n) for n in range(len(self.ranks))))
    @rule(data=st.data())
    def go_on(self, data):
        self.leave(
            data.draw(st.sampled_from([n for n in range(len(self.ranks)) if self.may_leave(n)]))
        )

    @precondition(lambda self: all(rank.through and not rank.moves() for rank in self.ranks))
    @rule()
    def rest(self):
        """The run has ended, but Hypothesis needs a rule that it can still apply."""

    def teardown(self):
        """Checks that the end can still be reached, and that it's the same on every rank."""
        if not hasattr(self, "ranks"):
            return
        for _ in range(10_000):
            for rank in self.ranks:
                while moves := [
                    move for move in rank.moves() if move != ("person",) or will_resume(rank)
                ]:
                    rank.take(moves[0])
            self.note()
            able = [n for n in range(len(self.ranks)) if self.may_leave(n)]
            if not able:
                break
            for n in able:
                self.leave(n)
        assert all(rank.through for rank in self.ranks), "the ranks came to a stand"
        assert len({rank.spec.shared for rank in self.ranks}) == 1
        for rank in self.ranks:
            rank.check_end()


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=scaled(40), stateful_step_count=60, deadline=None)
