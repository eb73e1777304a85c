"""Jobs that join, stop, rest and leave while others run, on ranks that are threads: who sees what, and who does not."""

import gc
import itertools
import json
import threading
import time
import weakref
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcross
from jaxcross.errors import JobError
from jaxcross.interleave.instrument import Instrument
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.jobs.context import current_job
from jaxcross.jobs.plain_loop import Job, run
from jaxcross.jobs.runner import Runner
from jaxcross.report import Report
from tests.support.fakes import FakeCompiled, FakeExecution, plain_program, run_ranks


def make_step(world, name="step", *, exchanges=1, compute=lambda index, values: sum(values)):
    """`step(state, batch) -> state`: adds up, over all ranks."""
    compiled = FakeCompiled(plain_program(name, exchanges=exchanges), world, compute)

    def step(state, batch):
        return current_job().host.run(compiled, [state, batch])

    return step


def loop(job, step, data, state=0.0):
    state = job.restore(state)
    for batch in job.batches(data):
        state = step(state, batch)
    return state


def solo(ranks, batches, state=0.0):
    for batch in batches:
        state += ranks * (state + batch)
    return state


def endless(job, step):
    state = 0.0
    while True:
        state = step(state, 1e-3)


def all_see(job, what):
    """Whether something is so on all ranks: the same answer on all."""
    return bool(job.run_on_all_ranks("all", lambda control: control.allreduce_min(np.array([what()], np.int64)))[0])


def until(job, step, what):
    """Steps until something is so on all ranks."""
    while not all_see(job, what):
        step(0.0, 1e-3)


class Order(Instrument):
    """Exchanges and notes as they came, both from the exchange lane."""

    def __init__(self):
        self.seen = []

    def span(self, span):
        if span.kind == "collective":
            self.seen.append((span.job, span.step))

    def note(self, *, job, kind, step=-1, value=None):
        if kind == "status":
            self.seen.append((job, value))


@pytest.mark.parametrize("policy", [RoundRobin(), Weighted((1, 2)), Sequential()])
def test_jobs_join_that_ranks_add_in_other_orders(policy):
    def work(world):
        runner, batches = Runner(world, policy), [1.0, 2.0, 3.0, 4.0]

        def parent(job, step):
            state = 0.0
            for n, batch in enumerate(batches):
                if n == 2:
                    for name in ("c", "d") if world.rank else ("d", "c"):
                        runner.add(name, loop, step=make_step(world, name), data=[5.0, 6.0])
                state = step(state, batch)
            return state

        runner.add("a", parent, step=make_step(world, "a"))
        runner.add("b", loop, step=make_step(world, "b"), data=batches)
        report = runner.run()
        assert report is runner.report
        return [(job.name, job.state, job.step, job.status) for job in runner.jobs], [job.name for job in report.jobs]

    long, short = solo(2, [1.0, 2.0, 3.0, 4.0]), solo(2, [5.0, 6.0])
    for jobs, names in run_ranks(2, work):
        assert jobs == [("a", long, 4, "ended"), ("b", long, 4, "ended")] + [
            (name, short, 2, "ended")
            for name in "dc"  # as rank 0 says
        ]
        assert names == ["a", "b", "d", "c"]


def test_a_control_thread_adds_a_job_and_waits_for_its_end():
    def work(world):
        runner, got = Runner(world), []
        begun = threading.Event()

        def control():
            begun.wait(60)
            job = runner.add("b", loop, step=make_step(world, "b"), data=[1.0])
            assert job.done.wait(60)
            got.append((job.state, job.status))

        def parent(job, step):
            begun.set()
            until(job, step, lambda: bool(got))

        thread = threading.Thread(target=control)
        thread.start()
        runner.add("a", parent, step=make_step(world, "a"))
        runner.run()
        thread.join()
        return got

    assert run_ranks(2, work) == [[(2.0, "ended")]] * 2


def test_a_job_that_some_rank_does_not_add_is_an_error_on_all():
    def work(world):
        runner = Runner(world)

        def parent(job, step):
            step(0.0, 1.0)
            if world.rank == 1:
                runner.add("b", loop, step=make_step(world, "b"), data=[1.0])
            step(0.0, 1.0)

        runner.add("a", parent, step=make_step(world, "a"))
        with pytest.raises(
            JobError, match=r"^Jobs were added during the run but not on every rank, .*: `b` \(rank 1 of"
        ):
            runner.run()
        assert [job.name for job in runner.report.jobs] == ["a"]
        return [(job.name, job.status, job.done.is_set(), job.error is not None) for job in runner.jobs]

    first, second = run_ranks(2, work)
    assert first == [("a", "ended", True, False)]
    assert second == [*first, ("b", "left out", True, True)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_rank_stops_a_job_and_the_others_go_on(ranks):
    def work(world):
        runner = Runner(world)
        batches = [1.0, 2.0, 3.0]

        def parent(job, step):
            state = 0.0
            for batch in batches:
                state = step(state, batch)
            if world.rank == world.size - 1:
                other.stop()
            until(job, make_step(world, "beat"), other.done.is_set)
            return state

        runner.add("a", parent, step=make_step(world, "a"))
        other = runner.add("b", endless, step=make_step(world, "b"))
        report = runner.run()
        other.stop()  # of no consequence, once it has left
        assert report.jobs[1].how == other.status == "stopped"
        assert other.error is None
        assert runner.jobs[0].state == solo(ranks, batches)
        assert other.state == solo(ranks, [1e-3] * other.step)
        return other.step

    steps = run_ranks(ranks, work)
    assert len(set(steps)) == 1


def test_a_paused_job_takes_no_turn_until_it_goes_on():
    def work(world):
        order = Order()
        runner = Runner(world, instruments=[order])

        def parent(job, step):
            step(0.0, 1.0)
            if world.rank == 1:
                other.pause()
            until(job, step, lambda: other.paused)
            for _ in range(6):
                step(0.0, 1.0)
            if world.rank == 0:
                other.resume()
            until(job, step, lambda: not other.paused)
            if world.rank == 0:
                other.stop()

        runner.add("a", parent, step=make_step(world, "a"))
        other = runner.add("b", endless, step=make_step(world, "b", exchanges=2))
        runner.run()
        assert other.state == solo(4, [1e-3] * other.step)  # two exchanges, each over two ranks
        return order.seen, other.step

    (seen, steps), (theirs, their_steps) = run_ranks(2, work)
    assert (seen, steps) == (theirs, their_steps)
    rest = seen[seen.index(("b", "paused")) : seen.index(("b", "goes on"))]
    assert len({step for job, step in rest if job == "b" and step != "paused"}) <= 1  # of the step that had begun
    assert sum(job == "a" for job, _ in rest) >= 6


def test_wishes_come_too_early_before_the_run():
    def work(world):
        job = Runner(world).add("a", endless, step=None)
        with pytest.raises(JobError, match=r"^Job `a` is not running: it can be stopped or paused during"):
            job.stop()

    run_ranks(1, work)


def test_rank_0_submits_a_job_by_name():
    def work(world):
        runner = Runner(world)
        runner.register("double", lambda job, start: loop(job, make_step(world, job.name), [start]))

        def parent(job, step):
            step(0.0, 1.0)
            if world.rank == 0:
                runner.submit("double", job="late", start=3.0)
                with pytest.raises(ValueError, match=r"^There is a job `late` already"):
                    runner.submit("double", job="late", start=3.0)
            # Nothing waits for it here: it is the last job's last act.

        runner.add("a", parent, step=make_step(world, "a"))
        runner.run()
        return [(job.name, job.state, job.status) for job in runner.jobs]

    assert run_ranks(3, work) == [[("a", None, "ended"), ("late", 9.0, "ended")]] * 3


def test_what_cannot_be_submitted_is_refused_where_it_is_called():
    def work(world):
        runner, refused = Runner(world), []
        runner.register("f", lambda job, **_: None)

        def attempt(*args, **kwargs):
            with pytest.raises((ValueError, TypeError, JobError)) as raised:
                runner.submit(*args, **kwargs)
            refused.append(str(raised.value))

        def parent(job):
            attempt("g", job="x")
            attempt("f", job="x", data=b"code")
            attempt("f", job="x", data=float("nan"))
            attempt("f", job="x", data={1: 2})
            attempt("f", job="x", data="x" * 70_000)
            attempt("f", job="")
            attempt("f", job="a")

        runner.add("a", parent)
        attempt("f", job="x")
        runner.run()
        attempt("f", job="x")
        with pytest.raises(ValueError, match=r"^`f` is registered already"):
            runner.register("f", print)
        with pytest.raises(TypeError, match=r"^`h` must be a function"):
            runner.register("h", 3)  # type: ignore[arg-type]
        return refused

    (refused,) = run_ranks(1, work)
    beginnings = [
        "Job `x` cannot be submitted: jobs are, while `runner.run()` runs.",
        "Job `x`: no function is registered as `g`; there are: `f`.",
        "Job `x`: its arguments cannot be sent as JSON: Object of type bytes",
        "Job `x`: its arguments do not survive JSON: {'data': nan}.",
        "Job `x`: its arguments do not survive JSON: {'data': {1: 2}}.",
        "Job `x`: its submission has 700",
        "the name of a job must be a text that is not empty, got ''",
        "There is a job `a` already.",
        "Job `x` cannot be submitted: jobs are, while `runner.run()` runs.",
    ]
    assert len(refused) == len(beginnings)
    for text, beginning in zip(refused, beginnings, strict=True):
        assert text.startswith(beginning)


def test_only_rank_0_submits_and_a_rank_without_the_function_ends_the_job():
    def work(world):
        runner = Runner(world)
        if world.rank == 0:
            runner.register("f", lambda job: None)

        def parent(job, step):
            if world.rank == 0:
                runner.submit("f", job="x")
            else:
                with pytest.raises(JobError, match=r"^Job `x` was submitted on rank 1\. Submit on rank 0"):
                    runner.submit("f", job="x")
            step(0.0, 1.0)

        runner.add("a", parent, step=make_step(world, "a"))
        with pytest.raises(
            JobError, match=r"^Job `x` failed on rank 1 after step 0: JobError: rank 1 has registered no `f`"
        ):
            runner.run()
        return runner.jobs[0].status

    assert run_ranks(2, work) == ["ended", "ended"]


def nonfinite_run(world, policy, **options):
    """Job `bad` exchanges a NaN in its third step, on the last rank; job `good` must not notice."""
    runner = Runner(world)
    data = [1.0, 2.0, np.nan if world.rank == world.size - 1 else 3.0, 4.0]

    def train(job, step):
        job.nonfinite = policy
        return loop(job, step, data)

    bad = runner.add("bad", train, step=make_step(world, "bad", **options))
    good = runner.add("good", loop, step=make_step(world, "good"), data=[1.0, 2.0, 3.0, 4.0])
    try:
        runner.run()
    except JobError as error:
        return runner.report, bad, good, error
    return runner.report, bad, good, None


@pytest.mark.parametrize("exchanges", [1, 2])
@pytest.mark.parametrize("policy", ["ignore", "raise", "eject", "skip"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_finite(ranks, policy, exchanges):
    def work(world):
        report, bad, good, error = nonfinite_run(world, policy, exchanges=exchanges)
        assert good.state == solo(ranks, [1.0, 2.0, 3.0, 4.0])
        facts = report.jobs[0]
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
        assert (how, steps, skipped, state, raised) == ("ended", 4, 1, alone([1.0, 2.0, 4.0]), False)
    else:
        assert (how, steps, state) == ("failed" if policy == "raise" else "ejected", 2, alone([1.0, 2.0]))
        assert raised == (policy == "raise")
        verb = "failed" if policy == "raise" else "was ejected"
        assert text.startswith(
            f"Job `bad` {verb} on {'ranks 0, 1' if ranks == 2 else 'rank 0'} in step 3, segment 1 (collective):"
            " FloatingPointError: `psum batch float32[]` made values that are not finite"
        )


class OneSided(FakeCompiled):
    """What is exchanged in step 3 is not finite on rank 1 alone, as where a rank receives from one other only."""

    def execution(self, inputs):
        seen = current_job().step == 2 and self.world.rank == 1
        return (Seen if seen else FakeExecution)(self, inputs)


class Seen(FakeExecution):
    """What is exchanged is not finite."""

    def nonfinite(self, index):
        return "`ppermute`"


@pytest.mark.parametrize("policy", ["eject", "skip"])
def test_what_one_rank_alone_sees_counts_on_all(policy):
    def work(world):
        compiled = OneSided(plain_program("a"), world, lambda index, values: sum(values))

        def train(job):
            job.nonfinite = policy
            return loop(
                job, lambda state, batch: current_job().host.run(compiled, [state, batch]), [1.0, 2.0, 3.0, 4.0]
            )

        job = (runner := Runner(world)).add("a", train)
        runner.run()
        return job.status, job.step, job.skipped, job.state

    expected = (
        ("ejected", 2, 0, solo(3, [1.0, 2.0])) if policy == "eject" else ("ended", 4, 1, solo(3, [1.0, 2.0, 4.0]))
    )
    assert run_ranks(3, work) == [expected] * 3


def test_a_policy_must_be_one_of_four():
    def work(world):
        job = Runner(world).add("a", lambda job: None)
        wrong = r"^`nonfinite` of job `a` must be one of 'ignore', 'raise', 'skip', 'eject', got 'drop'\.$"
        with pytest.raises(ValueError, match=wrong):
            job.nonfinite = "drop"
        with pytest.raises(ValueError, match=wrong):
            Job("a", make_step(world), 0.0, [1.0], nonfinite="drop")

    run_ranks(1, work)


def test_the_report_says_who_left_when_and_why(tmp_path):
    def work(world):
        report, *_ = nonfinite_run(world, "eject")
        loaded = Report.load(report.to_json(tmp_path / "report.json"))
        assert loaded.jobs == report.jobs
        left = [(job["name"], job["left"], job["steps"]) for job in report.summary()["jobs"]]
        assert left == [("bad", "ejected", 2), ("good", "ended", 4)]
        text = str(report)
        assert "ejected at 2" in text
        assert "Job `bad` was ejected on rank 0 in step 3, segment 1" in text

    run_ranks(1, work)


class Data:
    """What a job's arguments hold, so that it can be seen to go."""


@pytest.mark.parametrize("how", ["ended", "stopped", "failed", "ejected"])
def test_memory_of_a_job_that_left_is_free_while_others_run(how):
    size, probes = 4099, {}

    def arrays():
        gc.collect()
        return [a for a in jax.live_arrays() if a.shape == (size,)]

    def leave(job, step, held):
        probes["held"], state = weakref.ref(held), job.restore(jnp.zeros(size))
        if how == "ejected":
            job.nonfinite = "eject"
        own = jnp.ones(size)
        for n, batch in enumerate(job.batches(itertools.repeat(np.ones(size, np.float32)))):
            state = step(state, batch * (np.nan if how == "ejected" and n == 3 else 1) + own)
            if n == 3 and how == "failed":
                raise ValueError("boom")
            if n == 3 and how == "ended":
                break
            if n == 3 and how == "stopped":
                job.stop()
        return state

    def work(world):
        runner = Runner(world)

        def watch(job, step):
            until(job, step, other.done.is_set)
            late = time.monotonic() + 30  # what it had begun may still be on the device, or being read
            until(job, step, lambda: len(arrays()) <= 1 or time.monotonic() > late)
            probes["arrays"] = len(arrays())
            other.state = None
            probes["afterwards"] = len(arrays())
            return step(0.0, 1.0)

        runner.add("watch", watch, step=make_step(world, "watch"))
        other = runner.add("other", leave, step=make_step(world, "other"), held=Data())
        if how == "failed":
            with pytest.raises(JobError):
                runner.run()
        else:
            runner.run()
        return other.status

    assert run_ranks(1, work) == [how]
    assert probes["held"]() is None
    assert (probes["arrays"], probes["afterwards"]) == (1, 0)  # the last committed state, as long as somebody wants it


def test_many_jobs_come_and_go_and_nothing_of_them_stays():
    def work(world):
        runner, peak = Runner(world), []

        def child(job, step):
            return step(0.0, 1.0)

        def parent(job, step):
            driver = job._life.driver
            for n in range(60):
                one = runner.add(f"j{n}", child, step=make_step(world, f"j{n}"))
                until(job, step, one.done.is_set)
                peak.append((len(driver._jobs), driver._interleaver.shared.rows, len(driver._threads)))

        runner.add("a", parent, step=make_step(world, "a"))
        runner.run()
        assert [job.state for job in runner.jobs[1:]] == [2.0] * 60
        return [max(numbers) for numbers in zip(*peak, strict=True)]

    for seats, rows, threads in run_ranks(2, work):
        assert seats <= 3
        assert rows == 2
        assert threads <= 4


# A real step, cut and compiled, on one rank.


def real_step(**options):
    @jaxcross.crossover(axes="batch", **options)
    def step(state, batch):
        w, count = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
        grads, loss = jax.lax.pmean((grads, loss), "batch")
        return (w - 0.1 * grads, count + 1), {"loss": loss}

    return step


def batches(*bad, n=6):
    rng = np.random.default_rng(0)
    for k in range(n):
        x = rng.normal(size=(4, 8)).astype(np.float32)
        if k in bad:
            x[0, 0] = np.inf
        yield x


@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {}, {"cut": 2, "bucket_bytes": 0, "donate_argnums": 0}])
def test_a_skipped_step_is_as_if_its_batch_had_not_been_there(options):
    world, step = jaxcross.initialize(), real_step(**options)

    def state():
        return jnp.ones(8), jnp.int32(0)

    skips = Job("skips", step, state(), batches(1, 4), nonfinite="skip")
    never = Job("never", step, state(), (b for k, b in enumerate(batches()) if k not in (1, 4)), nonfinite="skip")
    still_open = Job("beside", step, state(), batches())
    report = run([skips, never, still_open], world=world)
    alone = state()
    for batch in batches():
        alone, _ = step(alone, batch)
    for one, other in ((skips, never), (still_open, None)):
        assert all(
            np.array_equal(a, b) for a, b in zip(one.state, alone if other is None else other.state, strict=True)
        )
    assert [job.skipped for job in report.jobs] == [2, 0, 0]
    assert (skips.step, int(skips.state[1])) == (6, 4)


def test_a_step_that_does_not_return_its_state_cannot_be_skipped():
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def step(state, batch):
        return (state[:1] + jax.lax.pmean(batch.sum(), "batch"), None)

    @jaxcross.crossover(axes="batch")
    def twice(state, batch):
        new = state + jax.lax.pmean(batch.sum(), "batch")
        return new, new + 1

    for each, message in ((step, "none of its results has"), (twice, "2 of its results have")):
        job = Job("a", each, jnp.ones(3), [np.ones(4, np.float32)], nonfinite="skip")
        with pytest.raises(JobError, match=rf"CutError: `\w+` cannot skip a step: {message}"):
            run([job], world=world)


def test_an_exchange_in_the_middle_is_named_by_its_line():
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch")
    def step(state, batch):
        mean = jax.lax.pmean(batch.mean(), "batch")
        wide = jax.lax.pmean(batch.astype(jnp.bfloat16) / 0, "batch")  # not this one, but this one's division
        return state + jax.lax.pmean(mean * state, "batch") + wide.sum(), None

    job = Job("a", step, jnp.ones(3), [np.ones(4, np.float32)], nonfinite="raise")
    with pytest.raises(JobError, match=r"FloatingPointError: `psum batch bfloat16\[4\]` at \S*test_membership.py:\d+"):
        run([job], world=world)
    assert job.step == 0


@pytest.mark.parametrize("cut", ["whole", 2])
def test_an_infinite_norm_that_its_own_segment_divides_by_is_seen(cut):
    """Gradients over it are zeros: nothing that leaves the segment says that it was infinite."""
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch", cut=cut, donate_argnums=0)
    def step(state, grads):
        norm = jnp.sqrt(jax.lax.psum(jnp.sum(grads * grads), "batch"))
        return state - jax.lax.pmean(grads / jnp.maximum(norm, 1), "batch"), None

    data = [np.full(4, x, np.float32) for x in (1, 1e25, 1)]
    skips = Job("skips", step, jnp.ones(4), data, nonfinite="skip")
    (told,) = run([skips], world=world).jobs
    assert (skips.step, told.skipped, skips.state.tolist()) == (3, 1, [0.0] * 4)
    raises = Job("raises", step, jnp.ones(4), data, nonfinite="raise")
    with pytest.raises(JobError, match=r"FloatingPointError: `psum batch float32\[\]` at \S*test_membership.py:\d+"):
        run([raises], world=world)
    assert raises.step == 1


def test_the_first_exchange_that_is_not_finite_is_named_also_where_its_segment_reads_it():
    world = jaxcross.initialize()

    @jaxcross.crossover(axes="batch")
    def step(state, grads):
        norm = jax.lax.psum(jnp.sum(grads * grads), "batch")
        return state - jax.lax.pmean(grads / jnp.minimum(norm, 9) + grads, "batch"), None

    job = Job("a", step, jnp.ones(4), [np.full(4, np.nan, np.float32)], nonfinite="raise")
    with pytest.raises(JobError, match=r"FloatingPointError: `psum batch float32\[\]` at"):
        run([job], world=world)


def test_a_policy_for_values_that_ranks_do_not_share_is_refused():
    """One would skip the step that the other one takes."""

    def work(world):
        step = make_step(world)

        def fn(job):
            job.nonfinite = "skip" if world.rank else "ignore"
            job.run_on_all_ranks("first call", job.host.check_nonfinite)
            return loop(job, step, [1.0])

        runner = Runner(world)
        runner.add("a", fn)
        with pytest.raises(JobError, match="`nonfinite` is `ignore` on rank 0, `skip` on rank 1"):
            runner.run()

    run_ranks(2, work)


def test_a_policy_for_values_comes_before_the_first_step():
    def work(world):
        step = make_step(world)

        def fn(job):
            state = step(job.restore(0.0), 1.0)
            job.nonfinite = "ignore"  # as it was
            with pytest.raises(JobError, match="after its first step"):
                job.nonfinite = "skip"
            return state

        runner = Runner(world)
        runner.add("a", fn)
        runner.run()

    run_ranks(1, work)


@pytest.mark.parametrize("ends", ["stops", "fails"])
def test_a_job_that_catches_everything_is_left_behind(ends, caplog):
    """It hears at each call that it is over, and calls again for ever."""

    def work(world):
        step = make_step(world)

        def compute(index, values):
            return 1 / 0 if ends == "fails" and bad.step == 3 else sum(values)

        breaks = make_step(world, "breaks", compute=compute)

        def deaf(job):
            state = job.restore(0.0)
            while True:
                with suppress(BaseException):
                    state = breaks(state, 1e-3)

        runner = Runner(world)
        bad = runner.add("deaf", deaf)
        other = runner.add("other", loop, step=step, data=[1.0] * 5)

        def stops(job):
            until(job, step, lambda: bad.step >= 3)
            if ends == "stops":
                bad.stop()

        runner.add("stops", stops)
        if ends == "stops":
            runner.run()
        else:
            with pytest.raises(JobError, match="division by zero"):
                runner.run()
        return bad.status, bad.state is not None, other.state

    (how, kept, state), second = run_ranks(2, work)
    assert (how, kept, state) == second
    assert (how, kept, state) == ("stopped" if ends == "stops" else "failed", True, solo(2, [1.0] * 5))
    assert sum("catches every exception" in r.getMessage() for r in caplog.records) == 2


def test_numbers_and_names_that_no_float_and_no_json_holds_are_reported_all_the_same():
    def work(world):
        def fn(job):
            job.log({"huge": 10**400, "low": -(10**400)})
            job.log({("a", 1): 2.0})

        runner = Runner(world)
        runner.add("a", fn)
        report = runner.run()
        json.dumps(report.summary())
        return report.jobs[0].metrics

    assert run_ranks(1, work)[0] == {"huge": np.inf, "('a', 1)": 2.0, "low": -np.inf}
