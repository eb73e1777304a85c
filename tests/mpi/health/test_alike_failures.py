"""If all ranks raise the same exception, only one of them prints the traceback.

Each of the others prints a single line. No folder of event files is left behind.
"""

import re

import pytest

SCRIPT = """
import sys, jaxcross
world = jaxcross.initialize(stall_timeout_s=60)

def helper():
    raise ValueError("a bad example")

def bad(job):
    helper()

world.control.allgather_text("")  # all ranks are here
if sys.argv[1] == "script":
    helper()
if sys.argv[1] == "check":  # fails on rank 0, which the others report
    raise ValueError("On rank 0: " * (world.rank > 0) + "a bad argument")
if sys.argv[1] == "unlike":
    raise ValueError(f"an example of rank {world.rank}")
checkpoints = jaxcross.Checkpoints(sys.argv[2]) if len(sys.argv) > 2 else None
runner = jaxcross.Runner(world, checkpoints=checkpoints, progress=False)
runner.add("a", bad)
runner.run()
"""


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (2, "script"),
        pytest.param(4, "script", marks=pytest.mark.integration),
        pytest.param(3, "check", marks=pytest.mark.integration),
    ],
)
def test_a_script_that_fails_alike_everywhere_says_so_once(mpirun, ranks, case):
    done = mpirun(ranks, SCRIPT, case)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    for rank in range(
        ranks
    ):  # a rank that fails late may find the traceback printed by another rank
        begins = f"jaxcross: rank {rank} of {ranks} "
        said = ("failed:\n", "fails in the same way (", "ends while ")
        assert sum(done.stderr.count(begins + text) for text in said) == 1


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_job_that_fails_alike_has_one_traceback(mpirun, ranks, tmp_path):
    done = mpirun(ranks, SCRIPT, "job", str(tmp_path / "ck"))
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    # The vote that ends the job may take place before the job has failed on every rank.
    failed = re.search(r"Job `a` failed on ranks? ([0-9, ]+) after step 0", done.stderr)
    assert set(failed[1].split(", ")) <= set(map(str, range(ranks)))
    end = f"ends after the run: JobError: {failed[0]}"
    for rank in range(
        ranks
    ):  # a rank that leaves late is terminated by another rank's notice, and says so
        begins = f"jaxcross: rank {rank} of {ranks} "
        assert sum(done.stderr.count(begins + text) for text in (end, "ends while ")) == 1
    assert end in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_unlike_failures_have_a_traceback_each(mpirun):
    done = mpirun(2, SCRIPT, "unlike")
    assert done.stderr.count("Traceback (most recent call last)") in (
        1,
        2,
    )  # the second rank may be terminated first
    assert "ValueError: an example of rank " in done.stderr
    assert "fails in the same way" not in done.stderr
