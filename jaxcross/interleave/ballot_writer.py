"""Writes one rank's votes, on its jobs and on jobs that may join."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.pending_jobs import PendingJobs
from jaxcross.interleave.shared_state import SharedJob
from jaxcross.interleave.vote import Ballot, JobBallot, JobRequest


class BallotWriter:
    """One rank's ballot, and the changes that still have to be written into it.

    Attributes:
        pending: Jobs that were added on this rank during the run and haven't joined yet.
        urgent: Whether there's something to vote on right away, without waiting for a job's turn.
    """

    def __init__(self, rows: int) -> None:
        self.pending = PendingJobs()
        self.urgent = False
        self._ballot = Ballot(rows)
        self._touched: set[int] = set()  # jobs whose row may be stale

    def touch(self, job: int) -> None:
        """Marks a job whose vote may have changed."""
        self._touched.add(job)

    def join(self, job: int, rows: int) -> None:
        """Registers a job that joins. `rows` is the number of rows that the ballot needs now."""
        self._ballot.grow(rows)
        self._touched.add(job)

    def leave(self, job: int, row: int) -> None:
        """Clears a finished job's row, so that another job can reuse it."""
        self._touched.discard(job)
        self._ballot.set_job(row, JobBallot())

    def add(self, name: str) -> None:
        """Records that a job was added on this rank."""
        self.pending.add(name)
        self.urgent = True

    def submit(self, text: str) -> None:
        """Accepts a text for delivery on all ranks."""
        self.pending.submit(text)
        self.urgent = True

    def stop(self) -> None:
        self._ballot.stop()
        self.urgent = True

    def cast(self, jobs: Mapping[int, LocalJob], shared: Mapping[int, SharedJob]) -> np.ndarray:
        """Writes the ballot for the next vote. Each request is cast in one vote only."""
        requesting = set()
        for job in self._touched:
            mine = jobs[job]
            self._ballot.set_job(shared[job].row, mine.ballot())
            if mine.request is not JobRequest.NONE:
                mine.request = JobRequest.NONE
                requesting.add(job)
        self._touched = requesting  # to be rewritten without the request
        self.pending.write(self._ballot)
        self.urgent = False
        return self._ballot.cast()
