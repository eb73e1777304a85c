"""Steps in which nothing is exchanged, over MPI: counted, reported, and gone on behind."""

import pytest

pytestmark = pytest.mark.integration


def test_steps_between_two_exchanges_count(mpirun, tmp_path):
    done = mpirun(2, "local_steps.py", str(tmp_path)).check()
    assert done.stdout.count("local steps count") == 2
