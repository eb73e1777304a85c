"""Sweeps with threads as ranks: what runs, what fails alone, what's rejected before any step."""

import json
from contextlib import nullcontext

import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.errors import JobError
from jaxcross.interleave.messages import StopRequested
from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
from jaxcross.jobs.runner import Runner
from jaxcross.sweeps import Choices, Draws, Grid
from jaxcross.sweeps.run_sweep import sweep
from jaxcross.sweeps.sweep_rank import search_of
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step


def training(world, *, steps=6, every=2, begun=None):
    """Returns a `train` that adds `lr` at each step, and logs its state as `score`."""
    step = make_step(world)

    def train(job, lr, fails=False, logs="score", saves=True):
        if begun is not None:
            begun.append((world.rank, job.name))
        state = job.restore(0.0)
        for batch in job.batches([float(lr)] * steps):
            state = step(state, batch)
            if fails and job.step == 4 and world.rank == world.size - 1:
                raise ValueError("the trial failed")
            if job.step % every == 0:
                job.log({logs: state})
                if saves:
                    job.save(state)
        return state

    return train


def on_ranks(search, ranks=2, make=training, **options):
    options = {"metric": "score", "mode": "max", **options}
    return run_ranks(ranks, lambda world: sweep(make(world), search, world=world, **options))


def facts(result):
    return [
        (t.number, t.params, t.status, t.step, t.value, t.digest, t.values) for t in result.trials
    ]


@pytest.mark.parametrize("concurrent", [1, 2, 5])
def test_grid_is_the_same_however_many_run_at_a_time(concurrent):
    first, second = on_ranks(Grid({"lr": [1, 3, 2], "saves": [True]}), concurrent=concurrent)
    assert facts(first) == facts(second)
    assert [t.params["lr"] for t in first.trials] == [1, 3, 2]
    assert {t.status for t in first.trials} == {"finished"}
    assert first.best == first.trials[1]
    assert first.state == first.best.value == first.best.values[-1][1]
    assert len(first.reports) == 1  # a trial joins before its predecessor has left the run


def test_smallest_is_best_where_the_mode_says_so():
    result, _ = on_ranks(Grid({"lr": [3, 1, 2]}), mode="min")
    assert [t.params["lr"] for t in result.ranked] == [1, 2, 3]


def test_random_draws_do_not_depend_on_their_number():
    def draw(rng):
        return {"lr": int(rng.integers(100))}

    few, _ = on_ranks(Draws(draw, seed=7), trials=2)
    more, _ = on_ranks(Draws(draw, seed=7), trials=4)
    assert [t.params for t in more.trials][:2] == [t.params for t in few.trials]
    drawn, _ = on_ranks(Draws({"lr": list(range(50))}), trials=2)
    assert len({t.params["lr"] for t in drawn.trials}) == 2


@pytest.mark.integration
def test_trial_that_raises_on_one_rank_fails_alone(tmp_path):
    trials = [{"lr": 1}, {"lr": 2, "fails": True}, {"lr": 3}, {"lr": 4, "fails": True}]
    result, other = on_ranks(Choices(trials), folder=tmp_path)
    assert facts(result) == facts(other)
    assert [t.status for t in result.trials] == ["finished", "failed", "finished", "failed"]
    assert result.best.params == {"lr": 3}
    assert "failed on rank 1" in result.trials[1].error
    assert "Trial `1 lr=2 fails=True` failed: Job `1 lr=2 fails=True` failed on rank 1" in str(
        result
    )
    written = json.loads((tmp_path / "sweep.json").read_text())["trials"]
    assert [t["status"] for t in written] == ["finished", "failed", "finished", "failed"]


def test_all_trials_failing_is_an_error_on_every_rank():
    def work(world):
        with pytest.raises(
            JobError, match="All 2 trials of the sweep failed. The first error: Job `0 lr=1"
        ):
            sweep(
                training(world),
                Grid({"lr": [1, 2], "fails": [True]}),
                metric="score",
                mode="max",
                world=world,
            )

    run_ranks(2, work)


def test_metric_that_is_never_logged_fails_the_trial():
    result, _ = on_ranks(Choices([{"lr": 1}, {"lr": 2, "logs": "loss"}]))
    assert [t.status for t in result.trials] == ["finished", "failed"]
    assert (
        "never logged `score`, by which trials are compared. It logged: `loss`."
        in result.trials[1].error
    )


def test_saving_before_logging_is_refused(tmp_path):
    def make(world):
        step = make_step(world)

        def train(job, lr):
            state = job.restore(0.0)
            for batch in job.batches([float(lr)] * 4):
                state = step(state, batch)
                job.save(state)
                job.log({"score": state})
            return state

        return train

    def work(world):
        with pytest.raises(
            JobError, match=r"logged `score` of step 1 after it had saved the state"
        ):
            sweep(
                make(world),
                Grid({"lr": [1]}),
                metric="score",
                mode="max",
                world=world,
                folder=tmp_path,
            )

    on_ranks(Grid({"lr": [1]}), make=make)  # without a folder, nothing can be lost
    run_ranks(2, work)


@pytest.mark.integration
def test_second_start_has_nothing_to_do(tmp_path):
    begun = []

    def make(world):
        return training(world, begun=begun)

    first, _ = on_ranks(Grid({"lr": [1, 2, 3]}), make=make, folder=tmp_path)
    assert len(begun) == 6
    again, _ = on_ranks(Grid({"lr": [1, 2, 3]}), make=make, folder=tmp_path)
    assert len(begun) == 6
    assert facts(again) == facts(first)
    assert again.best == first.best and again.state is None and again.reports == ()


@pytest.mark.integration
def test_best_trials_state_stays_on_disk(tmp_path):
    result, _ = on_ranks(Grid({"lr": [1, 3, 2]}), folder=tmp_path, concurrent=1)
    left = {path.parent.name for path in (tmp_path / "checkpoints").glob("*/0*")}
    assert left == {"1 lr=3"}

    def load(world):
        with Runner(world, checkpoints=Checkpoints(tmp_path / "checkpoints")) as runner:
            job = runner.add(result.best.name, training(world), result.best.params)
            runner.run()
        return job.state

    assert run_ranks(2, load) == [result.state] * 2


@pytest.mark.parametrize(
    ("search", "options", "error", "text"),
    [
        (Grid({"rate": [1]}), {}, TypeError, "calls its function as `fn(job, rate=...)`"),
        (7, {}, TypeError, "`search` must be `jaxcross.Grid(values)`"),
        ({"lr": [1]}, {}, TypeError, "`search` must be `jaxcross.Grid(values)`"),
        (Grid, {}, TypeError, "`search` must be `jaxcross.Grid(values)`"),
        (Grid({"lr": [1]}), {"trials": 1}, ValueError, "but `Grid` runs all of its trials"),
        (Choices([{"lr": 1}]), {"trials": 1}, ValueError, "but `Choices` runs all of its"),
        (Draws({"lr": [1]}), {"trials": 2}, ValueError, "in `space` of `Draws` is 1, and none"),
        (Draws({"lr": [1]}), {}, ValueError, "`trials` must say how many"),
        (Draws(lambda rng: {"lr": 1}), {}, ValueError, "`trials` must say how many"),
        (Draws(lambda rng: 1), {"trials": 1}, TypeError, "The parameters of trial 0 must be"),
        (Draws({"lr": [1]}), {"trials": 0}, ValueError, "`trials` must be at least 1"),
        (Grid({"lr": [1]}), {"metric": ""}, ValueError, "`metric` is empty"),
        (Grid({"lr": [1]}), {"metric": None}, TypeError, "`metric` must be the name"),
        (Grid({"lr": [1]}), {"mode": "most"}, ValueError, "`mode` must be `max` or `min`"),
        (
            Grid({"lr": [1]}),
            {"metric": "error", "mode": None},
            ValueError,
            "`mode` must say which `error` is better",
        ),
        (Grid({"lr": [1]}), {"concurrent": 0}, ValueError, "`concurrent` must be at least 1"),
        (Grid({"lr": [1]}), {"keep": 0}, ValueError, "`keep` must be at least 1"),
        (Grid({"lr": [1]}), {"seed": 1}, TypeError, "`sweep` has no argument `seed`"),
        (Grid({"lr": [1]}), {"metrics": "m"}, TypeError, "`sweep` has no argument `metrics`"),
        (Grid({"lr": [1]}), {"policy": "fair"}, TypeError, "`policy` must be"),
        (Grid({"lr": [1]}), {"policy": Weighted((1, 2))}, ValueError, "trials of a sweep come and"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_arguments_are_refused_before_the_first_step(tmp_path, search, options, error, text):
    begun = []

    def work(world):
        options_here = {"metric": "score", "mode": "max", **options, "folder": tmp_path / "sweep"}
        with pytest.raises(error) as raised:
            sweep(training(world, begun=begun), search, world=world, **options_here)
        assert text in str(raised.value)

    run_ranks(2, work)
    assert not begun
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("policy", [RoundRobin(), Sequential()])
def test_trials_run_under_a_policy_of_the_callers(policy):
    result, _ = on_ranks(Grid({"lr": [1, 3, 2]}), policy=policy)
    expected, _ = on_ranks(Grid({"lr": [1, 3, 2]}))
    assert facts(result) == facts(expected)
    assert {report.policy for report in result.reports} == {policy.name}


def test_policy_that_lets_no_others_come_as_far_is_refused_with_a_pruner():
    optuna = pytest.importorskip("optuna")
    search = Grid({"lr": [1, 3, 2]}, pruner=optuna.pruners.ThresholdPruner(lower=0.0))

    def work(world):
        with pytest.raises(ValueError, match="`sequential` does not run all of the 2 trials"):
            sweep(
                training(world),
                search,
                metric="score",
                mode="max",
                world=world,
                policy=Sequential(),
            )

    run_ranks(2, work)
    result, _ = on_ranks(search, policy=Sequential(), concurrent=1)
    assert {t.status for t in result.trials} == {"finished"}


def test_draws_can_be_extended_to_all_combinations(tmp_path):
    few, _ = on_ranks(Draws({"lr": [1, 2, 3]}, seed=2), trials=2, folder=tmp_path)
    more, _ = on_ranks(Draws({"lr": [1, 2, 3]}, seed=2), trials=3, folder=tmp_path)
    assert facts(more)[:2] == facts(few)
    assert sorted(t.params["lr"] for t in more.trials) == [1, 2, 3]


def test_the_command_draws_if_a_number_of_trials_is_given():
    task = {"grid": {"lr": [1, 2]}, "trials": None, "seed": 3, "prune": None}
    assert search_of(task) == Grid({"lr": [1, 2]})
    assert search_of({**task, "trials": 1}) == Draws({"lr": [1, 2]}, seed=3)


def test_argument_that_is_wrong_on_one_rank_is_refused_on_all():
    def work(world):
        with pytest.raises((TypeError, JobError)) as raised:
            sweep(
                training(world),
                Grid({"lr": [1]}),
                metric="score",
                mode="max",
                world=world,
                concurrent=[1, "a"][world.rank],
            )
        return str(raised.value)

    first, second = run_ranks(2, work)
    assert first == f"On rank 1: {second}"


def test_ranks_with_different_sweeps_are_refused():
    def work(world):
        with pytest.raises(JobError, match="Ranks 0 and 1 want different sweeps: `search` is"):
            sweep(
                training(world),
                Grid({"lr": [1 + world.rank]}),
                metric="score",
                mode="max",
                world=world,
            )

    run_ranks(2, work)


def test_folder_of_another_sweep_is_left_alone(tmp_path):
    on_ranks(Grid({"lr": [1, 2]}), folder=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*") if path.is_file()}
    refused = [
        ({"metric": "loss"}, "began with `metric` 'score', not 'loss'"),
        ({"mode": "min"}, "began with `mode` 'max', not 'min'"),
        ({"search": Grid({"lr": [2, 1]})}, "Trial 0 of the sweep"),
        ({"search": Grid({"lr": [1]})}, "can have more but not fewer"),
    ]

    def work(world):
        for changes, text in refused:
            options = {
                "search": Grid({"lr": [1, 2]}),
                "metric": "score",
                "mode": "max",
                "folder": tmp_path,
                **changes,
            }
            with pytest.raises(ValueError, match=text):
                sweep(training(world), world=world, **options)

    run_ranks(2, work)
    assert {path: path.read_bytes() for path in before} == before


def test_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")

    def work(world):
        with pytest.raises(ValueError, match="contains files that do not belong to a sweep"):
            sweep(
                training(world),
                Grid({"lr": [1]}),
                metric="score",
                mode="max",
                world=world,
                folder=tmp_path,
            )

    run_ranks(2, work)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.integration
@pytest.mark.parametrize("at", [3, 6])
def test_values_before_a_stop_are_not_lost(at, tmp_path):
    """A stop saves states that the script hasn't saved.

    A restart therefore doesn't repeat what was logged before.
    """

    def run_all(folder, stops):
        def work(world):
            step = make_step(world)

            def train(job, lr):
                state = job.restore(0.0)
                for batch in job.batches([float(lr)] * 6):
                    job.state = state = step(state, batch)
                    job.log({"score": state})
                    if stops and job.step == at and lr == 1 and world.rank == 0:
                        job._engine.driver.post(
                            StopRequested()
                        )  # what the main thread does on Ctrl-C
                return state

            with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
                return sweep(
                    train,
                    Grid({"lr": [1, 2, 3]}),
                    metric="score",
                    mode="max",
                    world=world,
                    folder=folder,
                )

        return run_ranks(2, work)

    run_all(tmp_path / "stopped", True)
    again, _ = run_all(tmp_path / "stopped", False)
    whole, _ = run_all(tmp_path / "whole", False)
    assert facts(again) == facts(whole)
    jobs = [job for report in again.reports for job in report.jobs]
    assert any(job.first_step > 0 for job in jobs)
    assert all(
        job.first_step + job.steps == 6 for job in jobs
    )  # the report counts only the steps of this run


@pytest.mark.parametrize(
    "wrong",
    [{"memory": "lots"}, {"instruments": 5}, {"events": ""}, {"progress": "often"}],
    ids=str,
)
def test_an_option_that_is_wrong_on_one_rank_is_an_error_on_every_rank(wrong):
    """`Runner` would find it on that rank alone, and the others would wait for it."""

    def work(world):
        options = wrong if world.rank else {}
        with pytest.raises((TypeError, ValueError, JobError), match=next(iter(wrong))):
            sweep(
                training(world),
                Grid({"lr": [1]}),
                metric="score",
                mode="max",
                world=world,
                **options,
            )
        return True

    assert run_ranks(2, work) == [True, True]
