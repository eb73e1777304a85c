"""A sweep that's killed twice gives the same result as an undisturbed one.

Both have the same trials, which are pruned at the same steps and have bitwise identical states.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("optuna")
CASE = "sweep_killed.py"


def compare(
    mpirun, folder: Path, trials: int, kills: list[tuple[int, int]], env: dict[str, str]
) -> dict:
    whole = folder / "whole.json"
    mpirun(2, CASE, str(folder / "whole"), str(trials), str(whole), timeout=900, env=env).check()
    killed = folder / "killed.json"
    for rank, count in kills:
        arguments = (str(folder / "killed"), str(trials), str(killed), str(rank), str(count))
        assert mpirun(2, CASE, *arguments, timeout=900, env=env).returncode != 0
        assert not killed.exists()
    mpirun(2, CASE, str(folder / "killed"), str(trials), str(killed), timeout=900, env=env).check()
    found = json.loads(whole.read_text())
    assert json.loads(killed.read_text()) == found
    statuses = [status for _, _, status, *_ in found["trials"]]
    assert len(statuses) == trials
    assert {"finished", "pruned"} == set(statuses)
    assert all(digest for _, _, status, _, _, digest, _ in found["trials"] if status == "finished")
    return found


def lines(path: Path) -> list[dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("time") for line in found)
    return sorted(found, key=str)


@pytest.mark.integration
def test_eight_trials_killed_twice_end_alike(mpirun, tmp_path, quick_compiler):
    """Rank 1 dies, then rank 0."""
    compare(mpirun, tmp_path, 8, [(1, 17), (0, 9)], {**quick_compiler, "METRIC": "loss"})


@pytest.mark.integration
def test_trials_pruned_by_evaluations_end_alike(mpirun, tmp_path, quick_compiler):
    """Some trials stop early.

    Rank 0 dies in an evaluation, whose batches and steps don't count as training's.
    """
    compare(mpirun, tmp_path, 8, [(0, 20), (1, 16)], {**quick_compiler, "METRIC": "eval/loss"})
    for whole in (tmp_path / "whole" / "metrics").glob("*.jsonl"):
        assert lines(whole) == lines(tmp_path / "killed" / "metrics" / whole.name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [[(0, 100), (1, 60)], [(1, 60), (0, 90)], [(0, 130), (1, 25)]])
def test_many_trials_killed_twice_end_alike(mpirun, tmp_path, kills):
    """Trials log and save about 200 times in total, so both kills come before the end."""
    compare(mpirun, tmp_path, 64, kills, {"METRIC": "loss"})
