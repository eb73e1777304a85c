"""Ctrl-C before or in `jaxcross.initialize()` ends a run with one line and exit code 130, without
an import's traceback.
"""

import os
import subprocess
import sys

import pytest

from tests.support.optional import NEEDS_MPI4JAX

IN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
JOIN = 'import jaxcross\njaxcross.initialize(wire="mpi4jax")\n'  # imports both libraries


def launched(tmp_path, code):
    script = tmp_path / "train.py"
    script.write_text(code)
    line = [sys.executable, "-m", "jaxcross.cli", "launch", "-n", "2", str(script)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        line, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    done.stderr = done.stderr.replace(
        "\0", ""
    )  # Open MPI's `mpirun` may print a zero byte at the end, which no terminal shows
    return done


def test_launch_says_that_it_stopped_before_the_start(tmp_path):
    code = (
        IN_IMPORT.format(name="sched") + "try:\n    import sched\nfinally:\n    print('cleaned')\n"
    )
    done = launched(tmp_path, code)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "jaxcross launch: stopped before the start."
    assert "cleaned" in done.stdout, "the script's own blocks are left in order"
    assert "Traceback" not in done.stderr and "post-mortem" not in done.stderr


@NEEDS_MPI4JAX
@pytest.mark.integration
def test_launch_says_so_while_ranks_join(tmp_path):
    done = launched(tmp_path, IN_IMPORT.format(name="mpi4jax") + JOIN)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "jaxcross launch: stopped before the start."
    assert "Traceback" not in done.stderr


@NEEDS_MPI4JAX
@pytest.mark.integration
@pytest.mark.parametrize("name", ["mpi4py.MPI", "mpi4jax"])
def test_mpirun_ends_with_one_line_of_a_rank(mpirun, name):
    done = mpirun(1, IN_IMPORT.format(name=name) + JOIN, warm=False)
    assert done.returncode == 130, done.stderr
    assert done.stderr.count("jaxcross: stopped before the start.") == 1
    assert "Traceback" not in done.stderr
