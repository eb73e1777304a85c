"""What happens to a job that exchanges non-finite values, by policy, the same on every rank."""

import re
from contextlib import suppress

import numpy as np
import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.jobs.engine import current_engine
from jaxcross.jobs.plain_loop import Job
from jaxcross.jobs.runner import Runner
from jaxcross.program.nonfinite import NonFiniteOutcome
from jaxcross.report import Report
from tests.support.checkpoint_jobs import ending
from tests.support.fakes import FakeCompiled, FakeExecution, plain_program, run_ranks
from tests.support.membership_jobs import loop, solo
from tests.support.runner_jobs import make_step


def nonfinite_run(world, policy, **options):
    """Runs `bad`, whose last rank exchanges NaN in step 3; `good` must be unaffected."""
    runner = Runner(world)
    data = [1.0, 2.0, np.nan if world.rank == world.size - 1 else 3.0, 4.0]

    def train(job, step):
        job.nonfinite = policy
        return loop(job, step, data)

    bad = runner.add("bad", train, {"step": make_step(world, "bad", **options)})
    good = runner.add(
        "good", loop, {"step": make_step(world, "good"), "data": [1.0, 2.0, 3.0, 4.0]}
    )
    try:
        runner.run()
    except JobError as error:
        return runner.report, bad, good, error
    return runner.report, bad, good, None


@pytest.mark.mostly_integration("1-raise-1", "1-raise-2", "1-eject-2", "1-skip-1", "1-skip-2")
@pytest.mark.parametrize("exchanges", [1, 2])
@pytest.mark.parametrize("policy", ["ignore", "raise", "eject", "skip"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_finite(ranks, policy, exchanges):
    def work(world):
        report, bad, good, error = nonfinite_run(world, policy, exchanges=exchanges)
        assert good.state == solo(ranks, [1.0, 2.0, 3.0, 4.0])
        facts = report.jobs[0]  # pyright: ignore[reportOptionalMemberAccess]
        assert (facts.how, facts.steps, facts.skipped) == (bad.status, bad.step, bad.skipped)
        assert facts.why == ("" if bad.error is None else str(bad.error))
        return bad.status, bad.step, bad.skipped, repr(bad.state), str(bad.error), error is not None

    def alone(batches):
        state = 0.0
        for batch in batches:
            value = ranks * (state + batch)
            for _ in range(exchanges - 1):
                value *= ranks
            state += value
        return repr(state)

    results = run_ranks(ranks, work)
    assert len({str(result) for result in results}) == 1
    how, steps, skipped, state, text, raised = results[0]
    if policy == "ignore":
        assert (how, steps, skipped, state, raised) == ("ended", 4, 0, "nan", False)
    elif policy == "skip":
        assert (how, steps, skipped, state, raised) == (
            "ended",
            4,
            1,
            alone([1.0, 2.0, 4.0]),
            False,
        )
    else:
        assert (how, steps, state) == (
            "failed" if policy == "raise" else "ejected",
            2,
            alone([1.0, 2.0]),
        )
        assert raised == (policy == "raise")
        verb = "failed" if policy == "raise" else "was ejected"
        assert text.startswith(
            f"Job `bad` {verb} on {'ranks 0, 1' if ranks == 2 else 'rank 0'} in step 3, segment 1 "
            "(collective): FloatingPointError: `psum batch float32[]` made values that are not "
            "finite"
        )


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_job_that_would_skip_for_ever_fails(spoilt):
    """The job fails if its state is non-finite. With bad data alone, the data may run out."""

    def work(world):
        def train(job, step):
            job.nonfinite = "skip"
            state = np.full(1, np.nan if spoilt else 1.0)
            return loop(job, step, [np.full(1, 1.0 if spoilt else np.nan)] * 25, state)  # pyright: ignore[reportArgumentType]

        runner = Runner(world)
        bad = runner.add("bad", train, {"step": make_step(world, "bad", shape=(1,))})
        try:
            runner.run()
        except JobError as error:
            return bad.step, bad.skipped, str(error)
        return bad.step, bad.skipped, ""

    results = run_ranks(2, work)
    assert len(set(results)) == 1
    steps, skipped, text = results[0]
    assert steps == skipped == (10 if spoilt else 25)
    # Both ranks raise. The error names only one of them if the other hadn't yet raised at the
    # comparison.
    assert (
        bool(re.match("Job `bad` failed on (ranks 0, 1|rank [01]) after step 10: ", text)) == spoilt
    )
    assert ("the last 10 steps were skipped, and `state` of the state" in text) == spoilt


@pytest.mark.parametrize("spoilt", [False, True])
def test_skipped_steps_count_on_after_a_restart(spoilt, tmp_path):
    """The limit of ten in a row counts them too: seven before the restart, three after it."""

    def work(world):
        checkpoints = Checkpoints(tmp_path)

        def train(job, step, after):
            job.nonfinite = "skip"
            state = job.restore(np.full(1, np.nan if spoilt else 1.0))
            for batch in job.batches(ending([np.full(1, 1.0 if spoilt else np.nan)] * 12, after)):
                state = step(state, batch)
            return state

        found = []
        for after in (7, 20):
            runner = Runner(world, checkpoints=checkpoints)
            bad = runner.add(
                "bad", train, {"step": make_step(world, "bad", shape=(1,)), "after": after}
            )
            with suppress(JobError):
                runner.run()
            report = runner.report
            assert report is not None
            found.append(
                (
                    bad.step,
                    bad.skipped,
                    report.jobs[0].skipped,
                    "the last 10 steps" in str(bad.error),
                )
            )
        return found

    for found in run_ranks(2, work):
        assert found == [(7, 7, 7, False), (10, 10, 3, True) if spoilt else (12, 12, 5, False)]


class OneSided(FakeCompiled):
    """In step 3, only rank 1 gets a non-finite value, as if received from one rank."""

    def execution(self, inputs):
        seen = current_engine().step == 2 and self.world.rank == 1  # pyright: ignore[reportOptionalMemberAccess]
        return (Seen if seen else FakeExecution)(self, inputs)


class Seen(FakeExecution):
    """The exchanged values are non-finite."""

    def check_finite(self, index):
        return NonFiniteOutcome.by_policy(self._policy, "`ppermute`", skippable=self.skippable)


@pytest.mark.parametrize("policy", ["eject", "skip"])
def test_what_one_rank_alone_sees_counts_on_all(policy):
    def work(world):
        compiled = OneSided(plain_program("a"), world, lambda index, values: sum(values))

        def train(job):
            job.nonfinite = policy
            return loop(
                job,
                lambda state, batch: current_engine().run(compiled, [state, batch], compiled),  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
                [1.0, 2.0, 3.0, 4.0],
            )

        job = (runner := Runner(world)).add("a", train)
        runner.run()
        return job.status, job.step, job.skipped, job.state

    expected = (
        ("ejected", 2, 0, solo(3, [1.0, 2.0]))
        if policy == "eject"
        else ("ended", 4, 1, solo(3, [1.0, 2.0, 4.0]))
    )
    assert run_ranks(3, work) == [expected] * 3


def test_a_policy_must_be_one_of_four():
    def work(world):
        job = Runner(world).add("a", lambda job: None)
        wrong = (
            "^`nonfinite` of job `a` must be one of 'ignore', 'raise', 'skip', 'eject', "
            r"got 'drop'\.$"
        )
        with pytest.raises(ValueError, match=wrong):
            job.nonfinite = "drop"  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ValueError, match=wrong):
            Job("a", make_step(world), 0.0, [1.0], nonfinite="drop")  # pyright: ignore[reportArgumentType]

    run_ranks(1, work)


def test_the_report_says_who_left_when_and_why(tmp_path):
    def work(world):
        report, *_ = nonfinite_run(world, "eject")
        loaded = Report.load(report.to_json(tmp_path / "report.json"))  # pyright: ignore[reportOptionalMemberAccess]
        assert loaded.jobs == report.jobs  # pyright: ignore[reportOptionalMemberAccess]
        left = [(job["name"], job["left"], job["steps"]) for job in report.summary()["jobs"]]  # pyright: ignore[reportOptionalMemberAccess]
        assert left == [("bad", "ejected", 2), ("good", "ended", 4)]
        text = str(report)
        assert "ejected at 2" in text
        assert "Job `bad` was ejected on rank 0 in step 3, segment 1" in text

    run_ranks(1, work)


def test_nonfinite_policies_that_differ_are_rejected():
    """With different policies, one rank would skip a step that the other one takes."""

    def work(world):
        step = make_step(world)

        def fn(job):
            job.nonfinite = "skip" if world.rank else "ignore"
            job.run_on_all_ranks("first call", job._engine.check_nonfinite)
            return loop(job, step, [1.0])

        runner = Runner(world)
        runner.add("a", fn)
        with pytest.raises(JobError, match="`nonfinite` is `ignore` on rank 0, `skip` on rank 1"):
            runner.run()

    run_ranks(2, work)


def test_nonfinite_policy_is_set_before_the_first_step():
    def work(world):
        step = make_step(world)

        def fn(job):
            state = step(job.restore(0.0), 1.0)
            job.nonfinite = "ignore"  # unchanged
            with pytest.raises(JobError, match="after its first step"):
                job.nonfinite = "skip"
            return state

        runner = Runner(world)
        runner.add("a", fn)
        runner.run()

    run_ranks(1, work)
