"""Every collective and element type as steps, in more processes than cores.

Nothing may hang, and no bit may change.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


BUSY = "while True: sum(range(10_000))"


@pytest.fixture
def load():
    """Twelve busy processes. Each has its own time limit, in case this process is killed."""
    line = ["timeout", "900", sys.executable, "-c", BUSY]
    processes = [subprocess.Popen(line) for _ in range(12)]
    yield
    for process in processes:
        process.terminate()
        process.wait()


def run(mpirun, folder, steps, x64, seed, jobs, compiler):
    env = {
        "JAXCROSS_EVENTS": str(folder),
        **compiler,
    }  # for `jaxcross doctor --post-mortem` after a hang
    done = mpirun(
        2, "table_steps.py", *map(str, (steps, int(x64), seed, jobs)), timeout=900, env=env
    ).check()
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["steps"] == steps
    assert found["wrong"] == []


@pytest.mark.parametrize(("x64", "jobs"), [(False, 2), (True, 0)])
def test_steps_of_every_type(mpirun, tmp_path, x64, jobs, quick_compiler):
    run(mpirun, tmp_path, 100, x64, 0, jobs, quick_compiler)


# Few cases and steps, because each case takes minutes and slows down all tests that run at the same
# time.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("seed", "x64", "jobs"), [(1, False, 0), (2, False, 2), (3, True, 0), (4, True, 2)]
)
def test_steps_of_every_type_under_load(mpirun, tmp_path, x64, seed, jobs, load):
    run(mpirun, tmp_path, 500, x64, seed, jobs, {})
