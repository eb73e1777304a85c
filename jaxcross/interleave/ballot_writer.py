"""What one rank says in the votes: of its jobs, and of jobs that may join."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.pending_jobs import PendingJobs
from jaxcross.interleave.shared_state import SharedJob
from jaxcross.interleave.vote import Ballot, JobBallot, JobRequest


class BallotWriter:
    """The ballot and what is to be written into it.

    Attributes:
        joiners: Jobs that were added here during the run.
        urgent: There is something to say that does not wait for a job's turn.
    """

    def __init__(self, rows: int) -> None:
        self.pending = PendingJobs()
        self.urgent = False
        self._ballot = Ballot(rows)
        self._touched: set[int] = set()  # jobs whose row may be out of date

    def touch(self, job: int) -> None:
        """There may be news of the job."""
        self._touched.add(job)

    def join(self, job: int, rows: int) -> None:
        """The job comes in; so many rows are needed now."""
        self._ballot.grow(rows)
        self._touched.add(job)

    def leave(self, job: int, row: int) -> None:
        """The job is over. Nothing is said in its row until another one gets it."""
        self._touched.discard(job)
        self._ballot.set_job(row, JobBallot())

    def add(self, name: str) -> None:
        """A job was added here."""
        self.pending.add(name)
        self.urgent = True

    def submit(self, text: str) -> None:
        """All ranks are to hear the text."""
        self.pending.submit(text)
        self.urgent = True

    def stop(self) -> None:
        """Somebody wishes that all jobs stop."""
        self._ballot.stop()
        self.urgent = True

    def cast(self, jobs: Mapping[int, LocalJob], shared: Mapping[int, SharedJob]) -> np.ndarray:
        """The ballot of the coming vote. Wishes are said in one only."""
        requested = set()
        for job in self._touched:
            mine = jobs[job]
            self._ballot.set_job(shared[job].row, mine.ballot())
            if mine.request is not JobRequest.NONE:
                mine.request = JobRequest.NONE
                requested.add(job)
        self._touched = requested
        self.pending.write(self._ballot)
        self.urgent = False
        return self._ballot.cast()
