"""If a rank's script has ended, or failed outside a run, the other ranks report that and end."""

from functools import partial

import pytest

from tests.support.fault_scripts import START, WAIT


@pytest.fixture
def mpirun(mpirun):
    """Starts real processes, because these tests are about starts, exits and signals."""
    return partial(mpirun, warm=False)


pytestmark = pytest.mark.integration


def test_waiter_learns_that_a_ranks_script_has_ended(mpirun):
    code = (
        START.format("heartbeat_timeout_s=10")
        + "if world.rank == 1:\n    raise SystemExit(0)\n"
        + WAIT
    )
    done = mpirun(2, code)
    assert done.returncode != 0
    said = (
        "because rank 1 will not enter job 'a', step 3, segment 1 (psum): its script ended after "
        "0 of 1 exchanges"
    )
    assert said in done.stderr


LEFT = (
    "import time\nprocess = int(world.control.allgather_text(str(os.getpid()))[1])\nif world.rank "
    "== 1:\n"
    "    raise SystemExit(0)\ntime.sleep(5)\nos.kill(process, signal.SIG{})\ntime.sleep(60)\n"
)


def test_a_rank_whose_script_has_ended_is_watched(mpirun):
    done = mpirun(3, START.format("heartbeat_timeout_s=10") + LEFT.format("STOP"))
    assert done.returncode != 0
    assert (
        "because rank 1 is silent for " in done.stderr
        and "is stopped (by SIGSTOP or a debugger)." in done.stderr
    )


def test_a_rank_whose_script_has_ended_can_be_stopped(mpirun):
    done = mpirun(2, START.format("") + LEFT.format("TERM"))
    assert done.returncode == 143
    said = "jaxcross: rank 1 received SIGTERM while it waited for the others to end."
    assert said in done.stderr


def test_exception_is_reported_by_every_rank(mpirun):
    code = START.format("") + "if world.rank == 1:\n    raise ValueError('no more data')\n" + WAIT
    done = mpirun(3, code)
    for rank in (0, 2):
        heading = f"jaxcross: rank {rank} of 3 ends while "
        assert (
            "because rank 1 failed with ValueError: no more data, outside of any step"
            in done.stderr.split(heading)[1]
        )
