"""Replicas: what the ranks' reports imply, and when nothing is reported."""

import logging
from threading import Thread

import jax
import jax.numpy as jnp
import pytest

from jaxcross.errors import ExchangeError, JobError
from jaxcross.jobs.arguments import checked_interval
from jaxcross.jobs.job_state import JobState
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.replicas import (
    BETWEEN,
    UNCHANGED,
    Findings,
    RankReport,
    ReplicaChecks,
    ReplicaDifference,
    judge,
)
from jaxcross.jobs.replicas import exchange as exchange_reports
from jaxcross.jobs.runner import Runner
from jaxcross.report import JobSummary, Report
from tests.support.fakes import FakeControl, run_ranks
from tests.support.runner_jobs import make_step


def test_reports_are_gathered_only_where_they_differ():
    one, two = RankReport(4, "", {"x": "1", "y": "2"}), RankReport(4, "", {"x": "1", "y": "3"})
    mine = [[one, one], [one, two]]
    heard, controls = {}, FakeControl.group(2)
    gathers = []

    def rank(control):
        gather = control.allgather_text
        control.allgather_text = lambda text: (gathers.append(text), gather(text))[1]
        heard[control.rank] = exchange_reports(control, mine[control.rank])

    threads = [Thread(target=rank, args=(control,)) for control in controls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard[0] == heard[1] == [[one, one], [one, two]]
    assert len(gathers) == 2 and all(
        '"x": "1"' in text and text.count("[4,") == 1 for text in gathers
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([RankReport(1, "", {"x": "1"})] * 3, None),
        (
            [RankReport(1, "", {"x": "1", "y": "1"}), RankReport(1, "", {"x": "1", "y": "2"})],
            ReplicaDifference("y", (0, 1)),
        ),
        (
            [*[RankReport(1, "", {"x": "1"})] * 2, RankReport(1, "", {})],
            ReplicaDifference("x", (0, 2)),
        ),
        (
            [RankReport(1, "", {"x": "1"}), RankReport(2, "", {"x": "2"})],
            "its ranks are at different steps, 1, 2",
        ),
        ([RankReport(1, "", {"x": "1"}), RankReport(1, "gone", {})], "gone"),
        ([RankReport(1, BETWEEN, {"x": "1"})] * 2, None),
        ([RankReport(1, BETWEEN, {"x": "1"}), RankReport(1, BETWEEN, {"x": "2"})], BETWEEN),
        ([RankReport(1, BETWEEN, {"x": "1"}), RankReport(1, "gone", {})], "gone"),
    ],
)
def test_what_follows_from_reports(said, found):
    assert judge(said) == found


def test_findings_keep_the_last_comparison_that_held():
    findings = Findings("a")
    alike, apart = (
        [RankReport(4, "", {"x": "1"})] * 2,
        [RankReport(9, "", {"x": "1"}), RankReport(9, "", {"x": "2"})],
    )
    assert findings.add(alike, 1) is None and (findings.text, findings.held) == ("equal", 4)
    assert findings.add(apart, 1) == ReplicaDifference("x", (0, 1))
    assert findings.text == "differ after step 9, first `x` on ranks 0 and 1; equal after step 4"
    assert (
        "Job `a`: its replicas differ after step 9, first in `x` on ranks 0 and 1."
        in findings.message()
    )
    findings.add([RankReport(12, "between two exchanges", {})] * 2, 1)
    assert findings.text == "not compared: between two exchanges; equal after step 4"
    findings.add([RankReport(12, UNCHANGED, {})] * 2, 1)
    assert findings.text == ""
    findings.add(alike, 3)
    assert findings.text == "equal in 1 of 3 leaves"


def test_findings_count_batches_if_there_are_no_steps():
    findings = Findings("a")
    findings.unit = "batch"
    findings.held = 10
    findings.add([RankReport(30, "", {"x": "1"}), RankReport(30, "", {"x": "2"})], 1)
    assert (
        findings.text == "differ after batch 30, first `x` on ranks 0 and 1; equal after batch 10"
    )
    assert (
        "differ after batch 30" in findings.message()
        and "They were equal after batch 10." in findings.message()
    )


def test_single_array_state_is_named_its_only_leaf():
    findings = Findings("a")
    findings.add([RankReport(3, "", {"": "1"}), RankReport(3, "", {"": "2"})], 1)
    assert findings.text.startswith("differ after step 3, first its only leaf on ranks 0 and 1")
    assert "first in its only leaf on" in findings.message() and "``" not in findings.message()


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_a_bad_number_of_steps_is_refused(every):
    with pytest.raises(ValueError, match=r"^`check_replicas` must be the number of steps"):
        checked_interval("`check_replicas`", every)


def test_table_groups_jobs_with_the_same_finding():
    facts = [
        JobSummary(name=name, steps=1, replicas=text)
        for name, text in (
            ("a", "equal"),
            ("b", "differ after step 1, first `x` on ranks 0 and 1"),
            ("c", "equal"),
        )
    ]
    report = Report(spans=(), jobs=(*facts, JobSummary(name="d", steps=1)), wall_ns={0: (0, 1)})
    lines = str(report).splitlines()
    assert "a, c: replicas equal." in lines
    assert "b: replicas differ after step 1, first `x` on ranks 0 and 1." in lines
    assert sum("replicas" in line for line in lines) == 2


def jobs_of_one_rank(world):
    runner = Runner(world)
    plain = jax.jit(lambda state, batch: state + batch)

    def train(job):
        state = job.restore(jnp.zeros(3), check_replicas=1)
        for batch in job.batches([jnp.ones(3)] * 3):
            state = plain(state, batch)
        return state

    runner.add("a", train)
    report = runner.run()
    return str(report), report.jobs[0].replicas


def test_one_rank_is_silent(caplog):
    with caplog.at_level(logging.WARNING, "jaxcross"):
        ((table, text),) = run_ranks(1, jobs_of_one_rank)
    assert text == "" and "replicas" not in table and not caplog.records


def trains_apart(job, donate, hands_over):
    state = job.restore({"w": jnp.zeros(3)})
    for batch in job.batches([jnp.full(3, 1.0 + job._engine.world.rank)] * 3):
        state = jax.jit(
            lambda s, x: jax.tree.map(lambda w: w + x, s), donate_argnums=(0,) if donate else ()
        )(state, batch)
        if hands_over:
            job.state = state
    return state


@pytest.mark.mostly_integration("True-False")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("hands_over", [False, True])
def test_a_job_that_never_exchanges_is_warned_of_twice(caplog, donate, hands_over):
    def work(world):
        runner = Runner(world)
        runner.add("a", trains_apart, {"donate": donate, "hands_over": hands_over})
        return runner.run().jobs[0].replicas

    with caplog.at_level(logging.WARNING, "jaxcross"):
        texts = run_ranks(2, work)
    assert texts == ["differ after batch 3, first `['w']` on ranks 0 and 1; equal at the start"] * 2
    said = [record.getMessage() for record in caplog.records]
    begins = [text.partition(" and has not exchanged")[0] for text in said[:2]]
    assert begins == ["Job `a` has used its first batch", "Job `a` came to its end"]
    assert len(said) == 3 and "its replicas differ after batch 3" in said[2]


def evaluations():
    def nothing(job):
        for _ in job.batches([jnp.ones(3)] * 3):
            job.log({"loss": 0.0})

    def hands_back(job):
        state = job.restore({"w": jnp.ones(3)}, check_replicas=2)
        for _ in job.batches([jnp.ones(3)] * 3):
            job.state = jax.tree.map(jnp.copy, state)  # the values are unchanged
        return state

    def numbers(job):
        return {"accuracy": 0.5, "seen": sum(1 for _ in job.batches([jnp.ones(3)] * 3))}

    def without_data(job):
        return job.restore({"w": jnp.ones(3)}, check_replicas=2)

    return [nothing, hands_back, numbers, without_data]


@pytest.mark.parametrize("fn", evaluations(), ids=lambda fn: fn.__name__)
def test_an_evaluation_is_silent(caplog, fn):
    def work(world):
        runner = Runner(world)
        runner.add("a", fn)
        return runner.run().jobs[0].replicas

    with caplog.at_level(logging.WARNING, "jaxcross"):
        texts = run_ranks(2, work)
    assert not caplog.records, caplog.records
    assert texts[0] in ("", "equal")


def test_unreadable_state_is_reported_without_hanging():
    """A state that can't be read leads to a report instead of a hang."""

    class Unreadable:
        def __jax_array__(self):
            raise RuntimeError("lost")

    latest = JobState()
    checks = ReplicaChecks("a", rank=0, ranks=2, latest=latest)
    start = {"w": jnp.ones(3)}
    latest.set(start, 0)
    checks.begin(
        start,
        0,
        local=False,
        named=(),
        check_every=None,
        resumed=False,
        run_on_all_ranks=lambda *_: None,
    )
    latest.set({"w": Unreadable()}, 0)
    checks.finish("ended", 0)
    assert checks.end is not None and checks.end.why.startswith(
        "rank 0 cannot read its state (TypeError"
    )


def trains_together(job, rate, check_replicas=None, mode="check"):
    state = job.restore(0.0, check_replicas=check_replicas, mode=mode)
    step = make_step(job._engine.world)
    for batch in job.batches([1.0] * 6):
        state = job.state = step(state, batch) * rate
    return state


def test_each_job_is_checked_as_it_asks():
    """A job that doesn't request checks gets a warning at its end, and trains to it."""

    def work(world):
        runner = Runner(world)
        rate = 1.0 + world.rank
        checked = runner.add("checked", trains_together, {"rate": rate, "check_replicas": 2})
        other = runner.add("other", trains_together, {"rate": rate})
        with pytest.raises(ExchangeError, match="Job `checked`: its replicas differ after step 2"):
            runner.run()
        assert runner.report is not None
        found = [job.replicas.partition(",")[0] for job in runner.report.jobs]
        return (checked.status, checked.step), (other.status, other.step), found

    ends = ("failed", 2), ("ended", 6), ["differ after step 2", "differ after step 6"]
    assert run_ranks(2, work) == [ends] * 2


@pytest.mark.parametrize("mode", ["check", "broadcast", "local"])
@pytest.mark.parametrize("other", [None, 3])
def test_unequal_check_intervals_raise_on_every_rank(mode, other):
    def work(world):
        runner = Runner(world)
        every = other if world.rank else 2
        runner.add("a", trains_together, {"rate": 1.0, "check_replicas": every, "mode": mode})
        with pytest.raises(
            JobError, match=r"different things on different ranks.*rank 0.*check_replicas=2"
        ) as raised:
            runner.run()
        return str(raised.value)

    texts = run_ranks(2, work)
    assert texts[0] == texts[1]


def test_a_plain_loop_is_checked():
    def work(world):
        step = make_step(world)
        job = Job(
            "a",
            lambda state, batch: (step(state, batch) * (1.0 + world.rank), {}),
            0.0,
            [1.0] * 6,
            check_replicas=3,
        )
        with pytest.raises(ExchangeError, match="Job `a`: its replicas differ after step 3"):
            run([job], world=world)
        return job.status, job.step

    assert run_ranks(2, work) == [("failed", 3)] * 2
    with pytest.raises(ValueError, match="^`check_replicas` of job `a` must be the number"):
        Job("a", lambda state, batch: (state, {}), 0.0, [], check_replicas=0)
