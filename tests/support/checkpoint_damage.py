"""Damages checkpoints, makes writes fail, and checks that jobs refuse to resume."""

from unittest import mock

import pytest

from jaxcross.checkpoint import Checkpoints
from jaxcross.checkpoint.folders import Folders
from jaxcross.errors import JobError
from jaxcross.jobs.runner import Runner
from tests.support.checkpoint_jobs import batches, loop
from tests.support.fakes import run_ranks


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def newest(folder, job="a"):
    return max(path for path in (folder / job).iterdir() if path.is_dir())


def names(folder, job="a"):
    return sorted(path.name for path in (folder / job).glob("0*"))


def half_written(folder, **kwargs):
    """Makes rank 1's write of the first checkpoint of job `a` fail."""
    write = Folders.commit

    def commit(self, name, part):
        if part.rank == 1:
            raise OSError(28, "No space left on device")
        write(self, name, part)

    with mock.patch.object(Folders, "commit", commit):
        refused(2, folder, "could not be saved, on rank 1", own=True)


def refused(ranks, folder, match, fn=loop, **kwargs):
    """Checks that the job fails on every rank with a text that matches."""

    def work(world):
        runner = Runner(world, checkpoints=Checkpoints(folder))
        job = runner.add("a", fn, {"world": world, "data": batches(world), **kwargs})
        with pytest.raises(JobError, match=match):
            runner.run()
        return job.step

    return run_ranks(ranks, work)
