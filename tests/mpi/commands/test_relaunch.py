"""A run restarted after it lost a rank or a host ends in the same bits as an undisturbed run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
CASE = Path(__file__).parents[1] / "cases" / "relaunch.py"


def line(folder, *options, strategy="top_k"):
    folder.mkdir()
    launch = [
        sys.executable,
        "-m",
        "jaxcross.cli",
        "launch",
        "-n",
        "2",
        "--events",
        str(folder / "events"),
    ]
    return [*launch, *options, str(CASE), str(folder), strategy]


@pytest.fixture(scope="module")
def finish(quick_compiler):
    def call(folder, *options, fates=()):
        command, env = line(folder, *options), {**os.environ, **quick_compiler}
        for fate in fates:
            (folder / fate).touch()
        return subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, env=env
        )

    return call


def reports(stderr):
    return re.findall(
        r"^\0?jaxcross launch: (.*)$", stderr, re.MULTILINE
    )  # Open MPI may print a zero byte first


def finals(folder):
    return [(folder / f"final-{rank}").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, finish):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(folder).check_returncode()
    return finals(folder)


def test_killed_ranks_end_in_the_same_bits(tmp_path, finish, undisturbed):
    """Two kills in two runs.

    A budget of one restart is enough, because each run had made a checkpoint.
    """
    ended = finish(tmp_path / "run", "--max-restarts", "1", fates=["kill-1-12", "kill-0-27"])
    assert ended.returncode == 0, ended.stderr
    assert finals(tmp_path / "run") == undisturbed
    lost, first, again, second = reports(ended.stderr)
    assert (first, second) == ("restart 1 on this machine.", "restart 2 on this machine.")
    assert all(
        re.search(r"continues from the checkpoints of job 'a' after step \d+ \(0 of 1", x)
        for x in (lost, again)
    )


def test_budget_ends_a_run_that_saves_nothing(tmp_path, finish):
    """A run that never reaches a checkpoint is restarted as often as allowed, then ends as its last
    run did.
    """
    ended = finish(tmp_path / "run", "--max-restarts", "1", fates=["kill-1-2", "kill-1-3"])
    assert ended.returncode != 0
    last = reports(ended.stderr)[-1]
    assert last.endswith("; not restarted: 2 runs in a row ended without a new checkpoint."), (
        ended.stderr
    )


def test_exception_of_the_user_is_not_repeated(tmp_path, finish):
    ended = finish(tmp_path / "run", "--max-restarts", "3", fates=["raise-7"])
    assert ended.returncode == 1
    (report,) = reports(ended.stderr)
    assert report.startswith("not restarted: rank ") and "ValueError: a bad example" in report
