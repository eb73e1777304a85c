"""Sweeps with Optuna: the same trials whatever the threads do, and a complete study at the end."""

import threading
from contextlib import nullcontext

import pytest

from jaxcross.errors import JobError
from jaxcross.interleave.messages import StopRequested
from jaxcross.sweeps import Grid, Optuna
from jaxcross.sweeps.run_sweep import sweep
from tests.support.fakes import run_ranks
from tests.support.runner_jobs import make_step

optuna = pytest.importorskip("optuna")


def train_of(world, stop=None):
    step = make_step(world)

    def train(job, lr, steps):
        state = job.restore(0.0)
        for batch in job.batches([lr] * steps):
            state = step(state, batch)
            if job.step % 2 == 0:
                job.log({"score": state % 1.0})
                job.save(state)
            if stop is not None and job.name.startswith(f"{stop} ") and job.step == 3:
                job.stop()
        return state

    return train


def make_study(pruner=None, seed=1, **options):
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=3)
    pruner = pruner or optuna.pruners.MedianPruner(n_startup_trials=1)
    return optuna.create_study(
        **{"direction": "maximize", "sampler": sampler, "pruner": pruner, **options}
    )


def space_of(trial):
    return {
        "lr": trial.suggest_float("lr", 0.1, 1.0),
        "steps": trial.suggest_categorical("steps", [4, 8]),
    }


def on_ranks(make=make_study, stop=None, trials=10, **options):
    options = {"metric": "score", "concurrent": 3, "trials": trials, **options}
    studies = [make(), make()]

    def work(world):
        search = Optuna(studies[world.rank], space_of)
        return sweep(train_of(world, stop), search, world=world, **options)

    return run_ranks(2, work)[0], studies[0]


def facts(result):
    return [
        (t.number, t.params, t.status, t.step, t.value, t.digest, t.values) for t in result.trials
    ]


PRUNERS = {
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=1),
    "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=2),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(
        min_resource=2, max_resource=8, reduction_factor=2
    ),
}


@pytest.mark.mostly_integration("median")
@pytest.mark.parametrize("pruner", PRUNERS)
def test_late_threads_change_nothing(pruner, monkeypatch):
    def make():
        return make_study(PRUNERS[pruner]())

    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("JAXCROSS_CHAOS", seed)
        found.append(on_ranks(make)[0])
    assert facts(found[0]) == facts(found[1])
    assert {t.status for t in found[0].trials} == {"finished", "pruned"}


def test_study_gets_the_trials_and_is_not_asked_itself():
    result, study = on_ranks()
    assert [t.number for t in study.trials] == list(range(10))
    states = {"finished": "COMPLETE", "pruned": "PRUNED"}
    assert [t.state.name for t in study.trials] == [states[t.status] for t in result.trials]
    assert study.best_trial.number == result.best.number
    assert study.trials[0].params == result.trials[0].params


@pytest.mark.integration
def test_restart_repeats_and_adds_nothing_twice(tmp_path):
    storage = optuna.storages.InMemoryStorage()  # outlives the first start, like a database

    def make():
        return make_study(study_name="kept", storage=storage, load_if_exists=True)

    first, _ = on_ranks(make, trials=5, folder=tmp_path)
    more, study = on_ranks(make, trials=10, folder=tmp_path)
    assert len(study.trials) == 10
    whole, _ = on_ranks(folder=tmp_path / "whole")
    assert facts(more) == facts(whole)
    assert facts(first) == facts(whole)[:5]


@pytest.mark.integration
def test_sampler_without_a_seed_resumes_with_a_warning(tmp_path, caplog):
    on_ranks(lambda: make_study(seed=None), trials=4, folder=tmp_path)
    result, _ = on_ranks(lambda: make_study(seed=None), trials=6, folder=tmp_path)
    assert len(result.trials) == 6
    assert "Give the sampler a seed" in caplog.text


def test_grid_can_be_pruned():
    def work(world):
        grid = Grid(
            {"lr": [0.11, 0.23, 0.37, 0.53, 0.71], "steps": [8]},
            pruner=optuna.pruners.ThresholdPruner(lower=0.3),
        )
        return sweep(train_of(world), grid, metric="score", mode="max", world=world)

    first, second = run_ranks(2, work)
    assert facts(first) == facts(second)
    assert [t.params["lr"] for t in first.trials] == [0.11, 0.23, 0.37, 0.53, 0.71]
    for trial in first.trials:
        assert (trial.status == "pruned") == any(value < 0.3 for _, value in trial.values)


def test_stop_before_a_decision_leaves_it_to_the_restart(tmp_path):
    """The state saved by a stop covers the pending value, so a restart doesn't log it again."""

    def run_all(folder, stops):
        late = threading.Event()  # set on rank 0, which decides trials

        def work(world):
            step = make_step(world)

            def train(job, lr):
                state = job.restore(0.0)
                for batch in job.batches([lr] * 6):
                    state = step(state, batch)
                    if stops and world.rank == 0:
                        if lr == 2.0 and job.step == 1:
                            late.wait(30)
                            job._engine.driver.post(
                                StopRequested()
                            )  # what the main thread does on Ctrl-C
                        elif lr == 1.0 and job.step == 2:
                            late.set()
                    if job.step % 2 == 0:
                        job.log({"score": state})
                        job.save(state)
                return state

            grid = Grid({"lr": [1.0, 2.0]}, pruner=optuna.pruners.ThresholdPruner(lower=10.0))
            options = {"metric": "score", "mode": "max", "concurrent": 2, "folder": folder}
            with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
                return sweep(train, grid, world=world, **options)

        return run_ranks(2, work)[0]

    run_all(tmp_path / "stopped", True)
    again, whole = run_all(tmp_path / "stopped", False), run_all(tmp_path / "whole", False)
    assert facts(again) == facts(whole)
    assert [(t.status, t.step) for t in again.trials] == [("pruned", 2), ("finished", 6)]
    assert not [*(tmp_path / "stopped/checkpoints").glob("0*/0*")]  # of the pruned trial


def test_stopped_trial_gives_its_place_away():
    result, _ = on_ranks(stop=1, trials=5)
    assert [t.status for t in result.trials].count("stopped") == 1
    assert result.trials[1].status == "stopped"
    assert len(result.trials) == 5


def test_a_searchs_own_pruner_replaces_the_studys():
    study = make_study()

    def work(world):
        search = Optuna(study, space_of, pruner=optuna.pruners.NopPruner())
        return sweep(train_of(world), search, metric="score", trials=6, world=world)

    result = run_ranks(1, work)[0]
    assert {t.status for t in result.trials} == {"finished"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trials": None}, "`trials` must say how many"),
        ({"mode": "min"}, "the study's direction says `max`"),
        ({"metric": ""}, "`metric` is empty"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, options, text):
    def work(world):
        found = {"metric": "score", "trials": 2, **options}
        search = Optuna(make_study(), space_of)
        with pytest.raises((TypeError, ValueError)) as raised:
            sweep(train_of(world), search, world=world, folder=tmp_path / "s", **found)
        assert text in str(raised.value)

    run_ranks(2, work)
    assert not (tmp_path / "s").exists()


def test_failing_space_is_an_error_on_every_rank():
    def space(trial):
        if trial.number == 4:
            raise RuntimeError("the search space failed")
        return space_of(trial)

    def work(world):
        search = Optuna(make_study(), space)
        with pytest.raises((RuntimeError, JobError), match="the search space failed"):
            sweep(train_of(world), search, metric="score", trials=8, world=world)

    run_ranks(2, work)


def test_trial_is_pruned_by_an_evaluation():
    """Values logged by `job.every` count, and a trial pruned by one doesn't fail."""

    def work(world):
        step = make_step(world)

        def train(job, lr):
            state = job.restore(0.0)
            job.every(2, lambda state: {"score": float(state)})
            for batch in job.batches([lr] * 4):
                job.state = state = step(state, batch)
            return state

        pruner = optuna.pruners.MedianPruner(n_startup_trials=1)
        grid = Grid({"lr": [0.5, 0.4, 0.3]}, pruner=pruner)
        return sweep(train, grid, metric="eval/score", mode="max", concurrent=1, world=world)

    first, _ = run_ranks(2, work)
    assert [(t.status, t.step) for t in first.trials] == [
        ("finished", 4),
        ("pruned", 2),
        ("pruned", 2),
    ]
    assert {job.how for report in first.reports for job in report.jobs} == {"ended"}
