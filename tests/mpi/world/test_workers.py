"""Worker processes of ranks: they have the rank's numbers, join no world, and fail at once if they
try to train.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def mpirun(mpirun):
    """Starts real processes, because these tests are about starts, exits and signals."""
    return partial(mpirun, warm=False)


pytestmark = pytest.mark.integration


CASE = Path(__file__).parents[1] / "cases" / "workers.py"
LINE = next(
    n for n, line in enumerate(CASE.read_text().splitlines(), 1) if "must not come to" in line
)


@pytest.mark.parametrize("how", ["spawn", "forkserver", "fork", "grain"])
def test_a_guarded_script_trains_with_workers(mpirun: Callable[..., Any], how: str) -> None:
    assert mpirun(2, "workers.py", how).check().stdout.splitlines() == ["trained"] * 2


@pytest.mark.parametrize(
    "how", ["spawn", pytest.param("forkserver", marks=pytest.mark.exhaustive), "grain"]
)
def test_workers_that_would_train_end_all_at_once(mpirun: Callable[..., Any], how: str) -> None:
    """No worker starts MPI, and a pool doesn't keep starting workers.

    The time limit is far below the watchdog's.
    """
    done = mpirun(2, "workers.py", "--unguarded", how, timeout=200)
    assert done.returncode == 1
    assert (
        f"reached line {LINE} of `{CASE}`, which exchanges with other ranks; all 2 ranks end."
        in done.stderr
    )
    assert "put the code that trains under `if __name__ == '__main__':`" in done.stderr
    assert "MPI_Init" not in done.stderr and "Traceback" not in done.stderr


FORK = """
import os, sys, threading, warnings
import jaxcross
world = jaxcross.initialize()
warnings.simplefilter("ignore")  # JAX's, of forks
def forked(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except Exception:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def raises():
    raise OSError("of the child")
def raises_in_a_thread():
    thread = threading.Thread(target=raises)
    thread.start()
    thread.join()
def exchanges():
    assert jaxcross.initialize() is world and jaxcross.current_world() is world
    uses = (
        lambda: world.control.allgather_text(""),
        lambda: world.abort("no"),
        lambda: world.exchanger.submit(max),
    )
    for use in uses:
        try:
            use()
        except jaxcross.ExchangeError as error:
            begin = f"A worker process of rank {world.rank} reached line "
            assert str(error).startswith(begin), error
        else:
            raise AssertionError
assert [forked(work) for work in (raises, raises_in_a_thread, exchanges)] == [1, 0, 0]
if world.control.allgather_text("alive") == ["alive"] * 2 and world.rank == 0:
    print("both live")
"""


def test_forked_child_neither_exchanges_nor_ends_rank(mpirun: Callable[..., Any]) -> None:
    done = mpirun(2, FORK).check()
    assert done.stdout.splitlines() == ["both live"]
    assert done.stderr.count("OSError: of the child") == 4
    assert "jaxcross: rank" not in done.stderr, "the hooks of a rank are not its child's"


SUBPROCESS = """
import os, subprocess, sys
import jaxcross
world = jaxcross.initialize()
def child(environ):
    code = "import jaxcross; world = jaxcross.initialize(); print(world.size)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr.strip().split("\\n")[-1]
if world.rank == 1:
    print(child(None))
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_"))}
    print(child(plain).split()[0])
"""


def test_subprocess_of_a_rank_is_not_a_rank(mpirun: Callable[..., Any]) -> None:
    """The child's error says that it isn't a rank."""
    refused, size = mpirun(2, SUBPROCESS).check().stdout.splitlines()
    assert (
        "ExchangeError: `jaxcross.initialize()` was called in a process that a rank has started"
        in refused
    )
    assert size == "1", "without the launcher's variables it is a world of its own"
