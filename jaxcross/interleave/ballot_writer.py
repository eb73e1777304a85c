"""Writes one rank's votes: about its jobs, and about jobs that may join."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.pending_jobs import PendingJobs
from jaxcross.interleave.shared_state import SharedJob
from jaxcross.interleave.vote import Ballot, JobBallot, JobRequest


class BallotWriter:
    """The ballot of one rank, and the changes that are to be written into it.

    Attributes:
        pending: Jobs that were added here during the run and have not joined.
        urgent: Whether there is something to vote on that does not wait for a job's turn.
    """

    def __init__(self, rows: int) -> None:
        self.pending = PendingJobs()
        self.urgent = False
        self._ballot = Ballot(rows)
        self._touched: set[int] = set()  # jobs whose row may be out of date

    def touch(self, job: int) -> None:
        """Marks a job whose vote may have changed."""
        self._touched.add(job)

    def join(self, job: int, rows: int) -> None:
        """Takes in a job that joins; the ballot needs `rows` rows now."""
        self._ballot.grow(rows)
        self._touched.add(job)

    def leave(self, job: int, row: int) -> None:
        """Clears the row of a job that is over, for the next job that gets it."""
        self._touched.discard(job)
        self._ballot.set_job(row, JobBallot())

    def add(self, name: str) -> None:
        """Notes that a job was added here."""
        self.pending.add(name)
        self.urgent = True

    def submit(self, text: str) -> None:
        """Takes a text that is to be delivered on all ranks."""
        self.pending.submit(text)
        self.urgent = True

    def stop(self) -> None:
        """Requests that all jobs stop."""
        self._ballot.stop()
        self.urgent = True

    def cast(self, jobs: Mapping[int, LocalJob], shared: Mapping[int, SharedJob]) -> np.ndarray:
        """Writes the ballot of the coming vote. A request is cast in one vote only."""
        requesting = set()
        for job in self._touched:
            mine = jobs[job]
            self._ballot.set_job(shared[job].row, mine.ballot())
            if mine.request is not JobRequest.NONE:
                mine.request = JobRequest.NONE
                requesting.add(job)
        self._touched = requesting  # their rows change back in the next vote
        self.pending.write(self._ballot)
        self.urgent = False
        return self._ballot.cast()
