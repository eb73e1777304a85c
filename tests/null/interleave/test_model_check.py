"""Every order in which small cases can happen; and that the search finds what is wrong where something is."""

import threading
from dataclasses import replace

import pytest

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.policy import Sequential
from jaxcross.interleave.shared_state import SharedState, Slot
from jaxcross.interleave.simulator import Add, Batch, Fail, Prepare, Step, Sync, Think
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest
from tests.model.explore import explore
from tests.model.model_case import Case
from tests.model.model_rank import RankModel
from tests.model.model_state import clone, name

PLAIN = StepGraph(
    kinds=("compute", "collective", "compute"), needs=((), (0,), (0, 1)), after_commit=frozenset({2}), signature=1,
    text="x",
)  # fmt: skip
TWICE = StepGraph(
    kinds=("compute", "collective", "compute", "collective"), needs=((), (0,), (1,), (2,)), signature=2, text="y"
)
SHORT = StepGraph(kinds=("compute", "collective"), needs=((), (0,)), signature=3, text="z")
WIDE = StepGraph(kinds=("compute", "compute", "collective"), needs=((), (), (0, 1)), signature=4, text="w")
LOCAL = StepGraph(kinds=("compute",), needs=((),))
BETWEEN = StepGraph(kinds=("compute",), needs=((),), local_step=True)


EXHAUSTIVE = pytest.mark.exhaustive  # seconds each; benchmarks/model_check.py has larger ones


def step(graph, **fails):
    """`step(PLAIN, s0="dispatch")`: segment 0 fails when it is dispatched."""
    return Step(graph, (0.0,) * len(graph.kinds), {int(key[1:]): how for key, how in fails.items()})


def fed(batches, graph=PLAIN):
    """A loop over so many batches, prepared while it runs."""
    loop = [action for n in range(batches) for action in (Batch(0, n), step(graph))]
    prepared = [Prepare(0, 0, n + 1, n + 1 == batches) for n in range(batches)] or [Prepare(0, 0, 0, True)]
    return (*prepared, *loop, Batch(0, batches))


def loops(*reads):
    """Batches of several loops, of which all but the first begin when they are read: two batches in each."""
    script, index = [], {}
    for stream in reads:
        if stream not in index:
            script.append(Prepare(0, stream, 2, True))
        index[stream] = index.get(stream, -1) + 1
        script.append(Batch(stream, index[stream]))
    return tuple(script)


def alike(ranks, *jobs, **options):
    return Case(scripts=(tuple(jobs),) * ranks, **options)


def unlike(*ranks, **options):
    """One job, another script on each rank."""
    return Case(scripts=tuple((script,) for script in ranks), **options)


def ends(case):
    """How the jobs can end: (steps, how) of each. Who said what is asked elsewhere."""
    return {tuple((steps, left[0]) for _, steps, left in jobs) for jobs, _ in explore(case).outcomes}


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (alike(1, (step(PLAIN),)), [1]),
        (alike(3, (step(PLAIN), step(PLAIN))), [2]),
        (alike(2, (step(TWICE), Think(0), step(LOCAL), step(TWICE))), [2]),
        (alike(2, (Sync("restore"), step(PLAIN), Sync("save"))), [1]),
        (alike(2, (step(BETWEEN), step(SHORT), step(BETWEEN))), [3]),
        pytest.param(alike(2, fed(1, PLAIN)), [1], marks=EXHAUSTIVE),
        (unlike(fed(1), fed(0)), [0]),
        (alike(2, loops(0, 1)), [0]),
        (alike(2, loops(0, 1, 0)), [0]),
        (alike(1, loops(0, 1, 2, 0)), [0]),
        pytest.param(alike(2, loops(0, 1, 2, 0)), [0], marks=EXHAUSTIVE),
        pytest.param(alike(2, (*loops(0, 1, 2, 0), step(SHORT))), [1], marks=EXHAUSTIVE),
        (alike(2, (step(SHORT),), (step(SHORT),), policy=Sequential()), [1, 1]),
        (alike(1, (step(SHORT),), (step(SHORT),), depth=1), [1, 1]),
        pytest.param(alike(1, (step(LOCAL),), (step(SHORT),)), [0, 1], marks=EXHAUSTIVE),
        pytest.param(unlike(fed(2, SHORT), fed(1, SHORT)), [1], marks=EXHAUSTIVE),
        pytest.param(alike(2, (step(SHORT),), (step(SHORT),)), [1, 1], marks=EXHAUSTIVE),
    ],
)
def test_in_every_order_all_ranks_make_all_steps(case, steps):
    assert ends(case) == {tuple((n, "ended") for n in steps)}


@pytest.mark.parametrize(
    ("bad", "good", "steps"),
    [
        ((step(PLAIN, s0="dispatch"),), (step(PLAIN),), {0}),
        ((step(PLAIN, s0="complete"),), (step(PLAIN),), {0}),
        ((step(TWICE, s2="complete"),), (step(TWICE),), {0}),
        ((step(PLAIN, s2="dispatch"), step(PLAIN)), (step(PLAIN), step(PLAIN)), {1}),
        # After the commit: the other rank may have made one more step before it hears of it.
        ((step(PLAIN, s2="complete"), step(PLAIN)), (step(PLAIN), step(PLAIN)), {1, 2}),
        ((step(SHORT), step(LOCAL, s0="complete"), step(SHORT)), (step(SHORT), step(LOCAL), step(SHORT)), {1, 2}),
        ((step(PLAIN), Fail("boom")), (step(PLAIN), step(PLAIN)), {1}),
        ((step(SHORT), step(BETWEEN), Fail("boom")), (step(SHORT), step(BETWEEN), step(BETWEEN), step(SHORT)), {1}),
        ((step(PLAIN),), (step(PLAIN), step(PLAIN)), {1}),
        ((step(PLAIN), Sync("save")), (step(PLAIN), step(PLAIN)), {1}),
        ((step(PLAIN), step(SHORT)), (step(PLAIN), step(PLAIN)), {1}),
        # The same exchanges, at different calls of a step that exchanges now and then.
        ((step(BETWEEN), step(SHORT)), (step(SHORT), step(BETWEEN)), {0}),
        ((step(SHORT), step(BETWEEN), step(SHORT)), (step(SHORT), step(SHORT), step(BETWEEN)), {1}),
    ],
)
def test_in_every_order_a_fault_of_one_rank_ends_the_job_on_all(bad, good, steps):
    assert ends(unlike(bad, good)) == {((n, "failed"),) for n in steps}


@pytest.mark.parametrize(
    ("bad", "good", "end"),
    [
        ((step(PLAIN, s0="dispatch"),), (step(PLAIN),), (0, "failed")),
        ((step(PLAIN, s0="complete"),), (step(PLAIN),), (0, "failed")),
        ((step(PLAIN, s2="dispatch"),), (step(PLAIN),), (1, "failed")),
        ((step(PLAIN, s2="complete"),), (step(PLAIN),), (1, "failed")),
        ((step(PLAIN), Fail("boom")), (step(PLAIN), step(PLAIN)), (1, "failed")),
        ((step(PLAIN),), (step(PLAIN), step(PLAIN)), (1, "failed")),
        ((step(PLAIN, s1="skip"),), (step(PLAIN),), (1, "ended")),
        ((step(PLAIN, s1="eject"),), (step(PLAIN),), (0, "ejected")),
    ],
)
def test_in_every_order_two_other_ranks_hear_of_a_fault_of_one(bad, good, end):
    assert ends(unlike(bad, good, good)) == {(end,)}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=EXHAUSTIVE)])
def test_in_every_order_the_other_job_does_not_notice(ranks):
    others = [((), (step(SHORT),))] * (ranks - 1)
    found = ends(Case(scripts=(((Fail("boom"),), (step(SHORT),)), *others)))
    assert found == {((0, "failed"), (1, "ended"))}


def test_an_interrupt_at_any_moment_stops_all_ranks_at_one_step():
    stopped = {((n, "stopped"),) for n in (0, 1)}
    assert ends(alike(2, (step(SHORT),) * 2, outside=((m.StopRequested(),), ()))) == {*stopped, ((2, "ended"),)}


def request(what):
    return m.JobRequested(0, "", what)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # Somebody wants the job to stop, or to rest for a while, at any moment.
        (
            alike(2, (step(SHORT),) * 2, outside=((request(JobRequest.STOP),), ())),
            {"0 stopped", "1 stopped", "2 ended"},
        ),
        (alike(1, (step(SHORT),), outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)),)), {"1 ended"}),
        (
            alike(3, (step(SHORT),) * 2, outside=((request(JobRequest.STOP),), (), ())),
            {"0 stopped", "1 stopped", "2 ended"},
        ),
        (
            alike(3, (step(SHORT),), outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)), (), ())),
            {"1 ended"},
        ),
        # It is to stop while it rests, perhaps while ranks are at different steps of it.
        (
            alike(
                2,
                (step(LOCAL), step(SHORT)),
                outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME), request(JobRequest.STOP)), ()),
            ),
            {"0 stopped", "1 ended"},
        ),
        # Added in a job: in time always. Added by somebody else: perhaps when all is over.
        (alike(2, (Add("new", ()), step(SHORT))), {"1 ended, 0 ended"}),
        pytest.param(alike(1, (Add("new", (step(SHORT),)), step(SHORT))), {"1 ended, 1 ended"}, marks=EXHAUSTIVE),
        pytest.param(
            alike(2, (step(SHORT),), outside=((Add("new", ()),),) * 2),
            {"1 ended", "1 ended, 0 ended"},
            marks=EXHAUSTIVE,
        ),
        (
            alike(2, (step(SHORT),), outside=((m.TextSubmitted("new"),), ()), submitted=(("new", ()),)),
            {"1 ended", "1 ended, 0 ended"},
        ),
        # On one rank only: it never joins, and nobody waits for it.
        (unlike((Add("new", ()), step(SHORT)), (step(SHORT),)), {"1 ended"}),
        # What is exchanged is not finite, as one rank finds.
        (unlike((step(PLAIN, s1="skip"),), (step(PLAIN),)), {"1 ended"}),
        (unlike((step(PLAIN, s1="eject"),), (step(PLAIN),)), {"0 ejected"}),
        (unlike((step(TWICE, s1="raise"),), (step(TWICE, s3="eject"),)), {"0 failed"}),
    ],
)
def test_in_every_order_jobs_join_rest_and_leave_alike(case, expected):
    assert {", ".join(f"{steps} {how}" for steps, how in end) for end in ends(case)} == expected


def test_what_was_found_is_counted():
    found = explore(alike(2, (step(SHORT),)))
    assert found.moves > found.states > found.meetings > 10
    assert found.joint_states > found.states
    with pytest.raises(MemoryError, match="more than 20 states of a rank"):
        explore(alike(2, (step(SHORT),)), limit=20)


# Wrong interleavers: each must be found out.


class SkipsForItself(Interleaver):
    """A rank that has found values that are not finite keeps its state, and the others do not."""

    def _apply_outcome(self, outcome):
        if outcome.kind == "skipped" and self._jobs[outcome.job].call.finite:
            outcome = replace(outcome, kind="committed")
        super()._apply_outcome(outcome)


class RunsWhatRests(Interleaver):
    """A rank begins a job's next step although it rests."""

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self.shared = RestlessState(jobs, policy)


class RestlessState(SharedState):
    def _choose_running(self):
        super()._choose_running()
        for job in self.jobs.values():
            job.held = False
        self.running = tuple(self.jobs)


class ByCompletion(Interleaver):
    """Exchanges go in the order in which this rank is ready for them."""

    def _begin_slot(self, backoff_over=False):
        slot = self.shared.slot()
        if self._slot is None and slot.kind == "exchange":
            ready = [
                job
                for job, shared in self.shared.jobs.items()
                if shared.remaining and set(self._jobs[job].call.graph.needs[1]) <= self._jobs[job].call.dispatched
            ]
            if ready and slot.job not in ready:
                self.shared._next = Slot("exchange", ready[0], 1)
        super()._begin_slot(backoff_over)


class TakesTheCommitForGranted(Interleaver):
    """What overwrites the step's input state runs before the ranks have voted."""

    def _exchange_done(self, job, segment, finite):
        super()._exchange_done(job, segment, finite)
        self._jobs[job].call.committed = self.shared.commit == job


class DeafState(SharedState):
    def _apply_job(self, number, said, committing, called):
        return super()._apply_job(number, replace(said, good=True), committing, called)


class HastyState(SharedState):
    def _apply_job(self, number, said, committing, called):
        return super()._apply_job(number, replace(said, received_commit=True), committing, called)


class LosesTheLastStep(Interleaver):
    """A job that has failed leaves at once, also where its last committed step is still to be received."""

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self.shared = HastyState(jobs, policy)


class DeafToFailure(Interleaver):
    """A step is committed whatever the ranks say of it."""

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self.shared = DeafState(jobs, policy)


class GoesOnAfterFailure(Interleaver):
    """A job that has failed is dispatched all the same."""

    def _fail(self, job, text, ejects=False):
        self._jobs[job].failed = text

    def _note_ready(self, job):
        call = self._jobs[job].call
        self._compute.set_ready(job, None if call is None else call.ready())


class MakesNoZeros(Interleaver):
    """A rank that has failed leaves the others alone with the step's exchanges."""

    def _begin_slot(self, backoff_over=False):
        slot = self.shared.slot()
        if slot.kind != "exchange" or self._jobs[slot.job].failed is None:
            super()._begin_slot(backoff_over)


class ForgetsBatches(Interleaver):
    """A job that waits for a batch is not told when all ranks have it."""

    def _apply_outcome(self, outcome):
        if outcome.kind != "batches":
            super()._apply_outcome(outcome)


class ForgetsOpenLoops(Interleaver):
    """A loop that begins ends all others."""

    def _apply(self, event):
        super()._apply(m.StreamBegun(event.job, ()) if isinstance(event, m.StreamBegun) else event)


class LeavesThreadsBehind(Interleaver):
    """A job that is over is not told so."""

    def _finish_job(self, job, how, texts=()):
        super()._finish_job(job, how, texts)
        self._out = [told for told in self._out if not isinstance(told, m.Raised)]


class CountsForItself(Interleaver):
    """A rank grants batches as far as its own data goes."""

    def _grant_batch(self, job):
        mine = self._jobs[job]
        if mine.point is not None and mine.point.kind == "batch" and mine.has_update():
            more = mine.prepared.get(mine.stream, 0) > mine.point.index
            self._answer(job, m.BatchGranted(job, more))


FAILING = unlike((step(PLAIN, s0="dispatch"),), (step(PLAIN),))


@pytest.mark.parametrize(
    ("wrong", "case", "message"),
    [
        (ByCompletion, alike(2, (step(SHORT),), (step(SHORT),)), "ranks meet in different slots"),
        (TakesTheCommitForGranted, alike(1, (step(PLAIN),)), "overwrites the state of a step that is not committed"),
        (DeafToFailure, FAILING, "overwrites the state of a step that is not committed"),
        (
            LosesTheLastStep,
            unlike((step(PLAIN, s2="dispatch"),), (step(PLAIN),)),
            "it has not received here what its last",
        ),
        (GoesOnAfterFailure, unlike((step(WIDE, s0="dispatch"),), depth=1), "its job has failed here"),
        (SkipsForItself, unlike((step(PLAIN, s1="skip"),), (step(PLAIN),)), "its step is skipped: True, but told so"),
        (
            RunsWhatRests,
            alike(1, (step(SHORT),) * 2, outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)),)),
            "makes steps while it is paused",
        ),
        (MakesNoZeros, FAILING, "a rank stands still"),
        (ForgetsBatches, alike(2, fed(1)), "ranks meet for ever and nothing comes of it"),
        (ForgetsOpenLoops, alike(1, loops(0, 1, 2, 0)), "ranks meet for ever and nothing comes of it"),
        (LeavesThreadsBehind, FAILING, r"all is over, but the threads of jobs \[0\] wait"),
    ],
)
def test_a_wrong_interleaver_is_found_out(wrong, case, message):
    with pytest.raises(InternalError, match=message) as error:
        explore(replace(case, make=wrong))
    assert "moves of one rank:" in str(error.value)


def test_ranks_that_do_not_ask_each_other_end_elsewhere():
    case = unlike(fed(0, SHORT), fed(1, SHORT))
    assert ends(case) == {((0, "ended"),)}
    assert ends(replace(case, make=CountsForItself)) == {((0, "failed"),)}


# States as values.


def test_a_copy_moves_apart_and_equal_states_have_equal_names():
    model = RankModel(alike(1, fed(1), (step(TWICE),)), 0)
    for _ in range(30):
        if model.arrival is not None:
            break
        before, copy = model.name(), model.copy()
        assert copy.name() == before
        for move in model.moves():
            other = model.copy()
            other.take(move)
            assert other.name() != before
        assert model.name() == before, "a copy's moves have changed the original"
        model.take(model.moves()[-1])


def test_a_state_holds_nothing_that_cannot_be_copied():
    assert name({1, 2}) == name({2, 1}) != name({1, 3})
    assert name({1: [1], 2: (2.0,)}) == name({2: (2.0,), 1: [1]})
    assert name({"a": 1, "b": 2}) != name({"b": 2, "a": 1}), "ranks tell each other names in their order"
    with pytest.raises(TypeError, match="`_thread.lock` has no place in a state"):
        clone([threading.Lock()])
