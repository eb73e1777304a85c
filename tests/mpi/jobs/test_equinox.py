"""Jobs with Equinox modules: equal to solo training, also after a rank was killed."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("equinox")
pytestmark = pytest.mark.integration


def arrays(path):
    return [[x.tobytes() for x in np.load(f"{path}-{rank}.npz").values()] for rank in range(2)]


def test_equinox_jobs_equal_solo_training_and_resume_bit_for_bit(mpirun, tmp_path):
    def run(folder, result, kill_at=0):
        args = (folder, str(tmp_path / result), "12", str(kill_at))
        return mpirun(2, "equinox_jobs.py", *args, warm=False)

    run("", "whole").check()
    folder = str(tmp_path / "checkpoints")
    assert run(folder, "killed", kill_at=8).returncode != 0
    assert not (tmp_path / "killed-0.npz").exists()
    resumed = run(folder, "resumed").check()
    # The rank is killed at step 8, possibly before its checkpoint of step 6 is complete.
    assert re.search("job `b` resumes after step [36]\\.", resumed.stdout + resumed.stderr)
    assert arrays(tmp_path / "resumed") == arrays(tmp_path / "whole")
