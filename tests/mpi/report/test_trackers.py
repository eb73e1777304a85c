"""W&B (offline) and MLflow (SQLite) receive each step exactly once, even if a run is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import wandb_files

pytest.importorskip("wandb")
pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy")
# MLflow's tables use an option that SQLAlchemy has deprecated.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
CASE = "tracked.py"
STEPS = list(range(1, 13))


def mlflow_runs(folder: Path) -> tuple[Any, dict[str, list[Any]]]:
    """Returns MLflow's client, and the runs of each job."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    found: dict[str, list[Any]] = {}
    for run in client.search_runs([client.get_experiment_by_name("experiment").experiment_id]):
        found.setdefault(run.info.run_name, []).append(run)
    return client, found


def steps_of(client: Any, run: Any, key: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, key)]


def wandb_id(folder: Path, job: str) -> str:
    """Returns the id that we've stored. After a SIGKILL, W&B's own file may be empty."""
    return json.loads((folder / "metrics" / f"{job}.wandb.json").read_text())["id"]


def only(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the run of each job. There's one for each job that `wandb sync` finds."""
    found = wandb_files.runs(folder)
    assert all(len(runs) == 1 for runs in found.values())
    return {name: run for name, (run,) in found.items()}


def test_killed_runs_continue_with_each_step_once(mpirun, tmp_path, quick_compiler) -> None:
    """The first kill comes when MLflow has steps that the resumed run repeats. The second run is
    killed at once, so services haven't received what the checkpoints contain. The number of ranks
    changes in between.
    """
    for ranks, kill in ((2, ("8", "wait")), (1, ("11", "now"))):
        ended = mpirun(ranks, CASE, "jobs", str(tmp_path), *kill, env=quick_compiler)
        assert ended.returncode != 0, ended
        if kill[1] == "wait":
            client, found = mlflow_runs(tmp_path)
            first = {name: run.info.run_id for name, (run,) in found.items()}
            assert steps_of(client, found["a"][0], "loss")[-1][0] == 8
            ids = {name: wandb_id(tmp_path, name) for name in first}
    mpirun(2, CASE, "jobs", str(tmp_path), env=quick_compiler).check()

    client, found = mlflow_runs(tmp_path)
    assert {name: run.info.run_id for name, (run,) in found.items()} == first
    assert len(first) == 3
    for name, lr in (("a", 0.5), ("b", 0.25), ("fails", 7.0)):
        (run,) = found[name]
        losses = [(step, 2 * (lr + step - 1)) for step in STEPS]
        assert steps_of(client, run, "loss") == losses
        norms = [(step, 2 * (lr + step)) for step in (4, 8, 12)]
        assert steps_of(client, run, "eval/norm") == norms
        failed = name == "fails"
        assert run.info.status == ("FAILED" if failed else "FINISHED")
        assert run.data.tags["jaxcross.status"] == ("failed" if failed else "ended")
    assert found["a"][0].data.params == {"lr": "0.5", "tags/x": "[1, 2]"}

    wandb = only(tmp_path / "wandb")
    assert {name: run["id"] for name, run in wandb.items()} == ids
    for name, lr in (("a", 0.5), ("b", 0.25), ("fails", 7.0)):
        run = wandb[name]
        assert [(row["_step"], row["loss"]) for row in run["rows"]] == [
            (step, 2 * (lr + step - 1)) for step in STEPS
        ]
        assert [row["_step"] for row in run["rows"] if "eval/norm" in row] == [4, 8, 12]
        assert run["exit"] == int(name == "fails")
        assert run["summary"]["jaxcross/status"] == ("failed" if name == "fails" else "ended")
    assert wandb["a"]["config"] == {"lr": 0.5, "tags": {"x": [1, 2]}}


def test_trials_are_grouped_and_their_ends_reported(mpirun, tmp_path, quick_compiler) -> None:
    mpirun(1, CASE, "sweep", str(tmp_path), env=quick_compiler).check()
    _, found = mlflow_runs(tmp_path)
    (parent,) = [runs[0] for name, runs in found.items() if name.startswith("my_sweep-")]
    trials = {name: runs for name, runs in found.items() if name != parent.info.run_name}
    assert parent.info.status == "FINISHED" and len(trials) == 4
    wandb = only(tmp_path / "wandb")
    assert wandb.keys() == trials.keys()
    statuses = set()
    for name, (run,) in trials.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params.keys() == {"lr"}
        offline = wandb[name]
        assert offline["group"] == parent.info.run_name
        assert offline["config"].keys() == {"lr"}
        assert offline["summary"]["jaxcross/status"] == run.data.tags["jaxcross.status"]
        assert offline["exit"] == 0 and run.info.status == "FINISHED"
        statuses.add(run.data.tags["jaxcross.status"])
    assert statuses == {"ended", "pruned"}


def test_a_job_ends_well_if_no_service_can_be_reached(mpirun, tmp_path, quick_compiler) -> None:
    ended = mpirun(1, CASE, "unreachable", str(tmp_path), env=quick_compiler)
    ended.check()
    for service in ("W&B", "MLflow"):
        assert f"Metrics of job `a` do not reach {service}: " in ended.stderr
        assert (
            f"{service} may lack the last metrics of this run: 15 of them had not" in ended.stderr
        )


def test_a_job_that_fails_on_all_ranks_ends_its_run(mpirun, tmp_path, quick_compiler) -> None:
    ended = mpirun(2, CASE, "slow", str(tmp_path), env=quick_compiler)
    assert ended.returncode != 0 and "on purpose" in ended.stderr, ended
    assert (tmp_path / "finished").read_text() == "failed"
