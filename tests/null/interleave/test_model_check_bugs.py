"""Tests that the model checker finds bugs planted in the interleaver."""

from dataclasses import replace

import pytest

from jaxcross.errors import InternalError
from jaxcross.interleave import messages as m
from jaxcross.interleave.compute_queue import ComputeQueue
from jaxcross.interleave.interleaver import Interleaver
from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.shared_order import SharedState, Slot
from jaxcross.interleave.simulator import Fail
from jaxcross.interleave.vote import JobRequest
from tests.model.explore import explore
from tests.support.model_scripts import (
    EVALUATE,
    LOCAL,
    PLAIN,
    SHORT,
    TRAIN,
    WIDE,
    alike,
    ends,
    fed,
    loops,
    request,
    step,
    unlike,
)


class SkipsForItself(Interleaver):
    """Bug: only the rank that found non-finite values keeps its state; the others don't."""

    def _apply_outcome(self, outcome):
        if outcome.kind == "skipped" and self._jobs[outcome.job].call.finite:
            outcome = replace(outcome, kind="committed")
        super()._apply_outcome(outcome)


class RunsWhatRests(Interleaver):
    """Bug: a rank begins the next step of a paused job."""

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
    """Bug: exchanges run in the order in which this rank is ready for them."""

    def _begin_slot(self, backoff_over=False):
        slot = self.shared.slot()
        if self._slot is None and slot.kind == "exchange":
            ready = [
                job
                for job, shared in self.shared.jobs.items()
                if shared.remaining
                and set(self._jobs[job].call.graph.needs[1]) <= self._jobs[job].call.dispatched
            ]
            if ready and slot.job not in ready:
                self.shared._next = Slot("exchange", ready[0], 1)
        super()._begin_slot(backoff_over)


class TakesTheCommitForGranted(Interleaver):
    """Bug: segments that overwrite the step's input state run before the ranks have voted."""

    def _exchange_done(self, job, segment, finite):
        super()._exchange_done(job, segment, finite)
        self._jobs[job].call.committed = self.shared.commit == job


class IgnoresFailuresState(SharedState):
    def _apply_job(self, number, said, committing, called):
        return super()._apply_job(number, replace(said, good=True), committing, called)


class HastyJob(LocalJob):
    def must_complete(self):
        return False


class LosesTheLastStep(Interleaver):
    """Bug: a failed job leaves at once, even if a call without exchanges is still overwriting its
    state.
    """

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self._jobs = {job: HastyJob() for job in self._jobs}


class BlindQueue(ComputeQueue):
    def busy(self, job, *, but=-1):
        return but < 0 and super().busy(job)


class ComparesTooEarly(Interleaver):
    """Bug: ranks compare texts while results that a job already has may still fail."""

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self._compute = BlindQueue(jobs, policy, depth)


class IgnoresFailures(Interleaver):
    """Bug: a step is committed even if a rank votes against it."""

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self.shared = IgnoresFailuresState(jobs, policy)


class ContinuesAfterFailure(Interleaver):
    """Bug: a failed job's segments are still dispatched."""

    def _fail(self, job, text, ejects=False):
        self._jobs[job].failed = text

    def _note_ready(self, job):
        call = self._jobs[job].call
        self._compute.set_ready(job, None if call is None else call.ready())


class MakesNoZeros(Interleaver):
    """Bug: a failed rank doesn't take part in the step's remaining exchanges."""

    def _begin_slot(self, backoff_over=False):
        slot = self.shared.slot()
        if slot.kind != "exchange" or self._jobs[slot.job].failed is None:
            super()._begin_slot(backoff_over)


class ForgetsBatches(Interleaver):
    """Bug: a job that waits for a batch isn't notified when all ranks have it."""

    def _apply_outcome(self, outcome):
        if outcome.kind != "batches":
            super()._apply_outcome(outcome)


class ForgetsOpenLoops(Interleaver):
    """Bug: a loop that begins ends all other loops."""

    def _apply(self, event):
        super()._apply(m.StreamBegun(event.job, ()) if isinstance(event, m.StreamBegun) else event)


class LeavesThreadsBehind(Interleaver):
    """Bug: the thread of a job that has ended isn't notified."""

    def _finish_job(self, job, how, texts=()):
        super()._finish_job(job, how, texts)
        self._out = [each for each in self._out if not isinstance(each, m.Raised)]


class BlindJob(LocalJob):
    def begin_call(self, event, made):
        super().begin_call(event, made)
        if self.point is not None:
            self.point = replace(self.point, hash=event.graph.signature)


class MixesFunctions(Interleaver):
    """Bug: a job's functions are distinguished only by their exchanges."""

    def __init__(self, jobs, policy, depth=2):
        super().__init__(jobs, policy, depth)
        self._jobs = {job: BlindJob() for job in self._jobs}


class CountsForItself(Interleaver):
    """Bug: a rank grants batches based on its own data alone."""

    def _grant_batch(self, job):
        mine = self._jobs[job]
        if mine.point is not None and mine.point.kind == "batch" and mine.has_update():
            more = mine.prepared.get(mine.stream, 0) > mine.point.index
            self._answer(job, m.BatchGranted(job, more))


FAILING = unlike((step(PLAIN, s0="dispatch"),), (step(PLAIN),))


@pytest.mark.mostly_integration(
    "TakesTheCommitForGranted-case1-overwrites the state of a step that is not committed",
    "ContinuesAfterFailure-case5-its job has failed here",
    "ForgetsBatches-case9-ranks keep meeting without progress",
    "ForgetsOpenLoops-case10-ranks keep meeting without progress",
    "LeavesThreadsBehind-case11-every job has ended, but the threads of jobs \\\\[0\\\\] wait",
)
@pytest.mark.parametrize(
    ("wrong", "case", "message"),
    [
        (ByCompletion, alike(2, (step(SHORT),), (step(SHORT),)), "ranks meet in different slots"),
        (
            TakesTheCommitForGranted,
            alike(1, (step(PLAIN),)),
            "overwrites the state of a step that is not committed",
        ),
        (IgnoresFailures, FAILING, "overwrites the state of a step that is not committed"),
        (
            LosesTheLastStep,
            unlike((Fail("the job failed"),), (step(LOCAL),)),
            "its state is being overwritten",
        ),
        (ComparesTooEarly, unlike((Fail("the job failed"),), (step(LOCAL),)), "may still fail"),
        (
            ContinuesAfterFailure,
            unlike((step(WIDE, s0="dispatch"),), depth=1),
            "its job has failed here",
        ),
        (
            SkipsForItself,
            unlike((step(PLAIN, s1="skip"),), (step(PLAIN),)),
            "its step is skipped: True, instructed to skip it",
        ),
        (
            RunsWhatRests,
            alike(
                1,
                (step(SHORT),) * 2,
                outside=((request(JobRequest.PAUSE), request(JobRequest.RESUME)),),
            ),
            "makes steps while it is paused",
        ),
        (MakesNoZeros, FAILING, "a rank stands still"),
        (ForgetsBatches, alike(2, fed(1)), "ranks keep meeting without progress"),
        (
            ForgetsOpenLoops,
            alike(1, loops(0, 1, 2, 0)),
            "ranks keep meeting without progress",
        ),
        (LeavesThreadsBehind, FAILING, r"every job has ended, but the threads of jobs \[0\] wait"),
        (
            MixesFunctions,
            unlike((step(TRAIN),), (step(EVALUATE),)),
            "ranks meet in different slots",
        ),
    ],
)
def test_a_wrong_interleaver_is_found_out(wrong, case, message):
    with pytest.raises(InternalError, match=message) as error:
        explore(replace(case, make=wrong))
    assert "moves of one rank:" in str(error.value)


@pytest.mark.integration
def test_ranks_that_do_not_vote_end_differently():
    case = unlike(fed(0, SHORT), fed(1, SHORT))
    assert ends(case) == {((0, "ended"),)}
    assert ends(replace(case, make=CountsForItself)) == {((0, "failed"),)}
