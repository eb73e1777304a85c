"""Steps that exchange nothing, over MPI: they are counted, reported, and resumed after."""

import pytest

pytestmark = pytest.mark.integration


def test_steps_between_two_exchanges_count(mpirun, tmp_path):
    done = mpirun(2, "local_steps.py", str(tmp_path)).check()
    assert done.stdout.count("local steps count") == 2
