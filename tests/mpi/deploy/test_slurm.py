"""The Slurm recipe on a one-node Slurm: it is accepted, and its job is requeued until done."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcross.commands.launch import find_mpirun

ROOT = Path(__file__).parents[3]
BOX = ROOT / "tests" / "support" / "slurm_box.sh"
RECIPE = ROOT / "deploy" / "slurm" / "job.sbatch"
CASE = ROOT / "tests" / "mpi" / "cases" / "relaunch.py"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm in namespaces needs root"),
    pytest.mark.skipif(
        not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))),
        reason="no Slurm is installed",
    ),
]
# One node rather than two, and two ranks without an accelerator.
SMALL = "--nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-task=0"

# Rank 1 is killed in the first run. The second run gets SIGTERM, as `--signal` would send it
# before the time limit.
STORY = f"""
set -e
until_there() {{
    for _ in $(seq 1200); do [ -e "$1" ] && return; sleep 0.1; done
    echo "no $1"
    exit 1
}}
touch "$1/kill-1-12" "$1/hold-20"
job=$(sbatch --parsable {SMALL} --output="$1/log" {RECIPE} {CASE} "$1" top_k)
until_there "$1/holds"
scancel --signal=TERM "$job"
rm "$1/hold-20"
until_there "$1/final-0"
until_there "$1/final-1"
"""


def in_a_box(tmp_path, script, *arguments):
    box = tmp_path / "box"
    box.mkdir()
    environ = {
        **os.environ,
        "JAXCROSS_ENV": sys.prefix,
        "JAXCROSS_MPI": "pmi2",
        "JAX_PLATFORMS": "cpu",
    }
    line = [str(BOX), str(box), "bash", "-c", script, "bash", *arguments]
    # A file, because waiting for a pipe would mean waiting for the daemons, which keep it open
    # until the box ends.
    with (tmp_path / "output").open("w") as output:
        done = subprocess.run(
            line,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=400,
            check=False,
            cwd=tmp_path,  # the recipe leaves its events here
        )
    return done.returncode, (tmp_path / "output").read_text()


def test_slurm_accepts_the_recipe(tmp_path):
    code, output = in_a_box(tmp_path, f"sbatch --test-only --nodes=1 {RECIPE} train.py")
    assert code == 0 and "to start at" in output, output


@pytest.mark.exhaustive
def test_job_is_requeued_until_it_is_done(tmp_path):
    """The job first loses a rank and later receives SIGTERM, as before a time limit.

    It must still end in the same state as an undisturbed job, bit for bit.
    """
    mpirun = find_mpirun()
    if mpirun is None or mpirun.vendor != "mpich":
        pytest.skip("Debian's Slurm speaks PMI-2, and so does MPICH only")
    alone = tmp_path / "alone"
    alone.mkdir()
    launch = [
        sys.executable,
        "-m",
        "jaxcross.cli",
        "launch",
        "-n",
        "2",
        str(CASE),
        str(alone),
        "top_k",
    ]
    subprocess.run(launch, check=True, capture_output=True, timeout=240)
    folder = tmp_path / "run"
    folder.mkdir()
    code, output = in_a_box(tmp_path, STORY, str(folder))
    log = (folder / "log").read_text() if (folder / "log").exists() else ""
    assert code == 0, output + log
    assert [(folder / f"final-{rank}").read_text() for rank in (0, 1)] == [
        (alone / f"final-{rank}").read_text() for rank in (0, 1)
    ]
    assert "exit code 137, requeued (it was 0 times before)" in log
    # `srun` may kill the ranks when the first of them exits with 143.
    assert re.search(r"exit code 1(43|37), requeued \(it was 1 times before\)", log)
    steps = [int(line.split()[1]) for line in (folder / "times-0").read_text().splitlines()]
    assert min(steps[steps.index(20) :]) == 20, (
        "SIGTERM came at step 20, and nothing before it was lost"
    )
