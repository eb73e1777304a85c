"""Writes a rank's ballot: its votes on the jobs, on jobs that may join, and on pending texts.

A ballot is a vector with one row per job. Writing every row before each vote would make votes more
expensive the more jobs there are, so we keep the vector from vote to vote and update it
incrementally: whatever changes a job's local state marks the job by calling `touch`, and `cast`
rewrites only the rows of the marked jobs.

The ballot outlives a vote, but two kinds of entries must not: requests to stop, pause or resume a
job, and the bit that says that a job was added since the last vote. We drop these as soon as
they've been cast.

The names of jobs that want to join, and texts for all ranks, don't fit into a numeric vector whose
length must be the same on all ranks. So the ballot only carries bits saying whether there's
anything to announce. If the vote shows that there is, the ranks gather the announcements
themselves, as text, in a separate collective operation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.shared_order import SharedJob
from jaxcross.interleave.vote import Ballot, JobBallot, JobRequest


class BallotWriter:
    """One rank's ballot, and the changes that haven't been written into it yet.

    Attributes:
        pending: Jobs that were added on this rank during the run and haven't joined yet.
        urgent: Whether this rank should enter the next vote immediately instead of backing off
            first, because there's something to decide that isn't tied to a particular job's turn.
    """

    def __init__(self, rows: int) -> None:
        self.pending = PendingJobs()
        self.urgent = False
        self._ballot = Ballot(rows)
        self._touched: set[int] = set()  # jobs whose row may be stale

    def touch(self, job: int) -> None:
        """Marks a job's row in the ballot as possibly stale."""
        self._touched.add(job)

    def join(self, job: int, rows: int) -> None:
        """Adds a job that has joined. `rows` is the number of rows that the ballot needs now."""
        self._ballot.grow(rows)
        self._touched.add(job)

    def leave(self, job: int, row: int) -> None:
        """Clears a finished job's row, because another job may reuse the row."""
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
        """Returns the ballot for the next vote. Each request is cast in one vote only."""
        requesting = set()
        for job in self._touched:
            mine = jobs[job]
            self._ballot.set_job(shared[job].row, mine.ballot())
            # Cast each request to stop, pause or resume a job only once. If a pause request stayed
            # in the ballot, this rank would pause the job again right after another rank has
            # resumed it.
            if mine.request is not JobRequest.NONE:
                mine.request = JobRequest.NONE
                requesting.add(job)
        self._touched = requesting  # their rows must be rewritten without the request
        self.pending.write(self._ballot)
        self.urgent = False
        return self._ballot.cast()


class PendingJobs:
    """Jobs added on this rank that haven't joined yet, and texts that haven't been sent yet.

    Ranks may add their jobs in different orders. A job joins once all ranks have added it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, LocalJob] = {}
        self._texts: list[str] = []
        self._has_added = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._waiting)

    def add(self, name: str) -> None:
        """Records that a job was added on this rank."""
        self._waiting[name] = LocalJob()
        self._has_added = True

    def request(self, name: str, request: JobRequest) -> None:
        """Stores a request for a job that hasn't joined yet. It's cast once the job has joined."""
        if name in self._waiting:
            self._waiting[name].add_request(request)

    def submit(self, text: str) -> None:
        """Accepts a text for delivery on all ranks."""
        self._texts.append(text)

    def write(self, ballot: Ballot) -> None:
        """Writes into the ballot whether the ranks should gather their announcements next.

        A vote only leads to a gathering, in which the ranks exchange their announcements, if the
        ballots ask for it. A newly added job asks just once. If it asked in every vote, the ranks
        might keep gathering to no effect until the last rank has added the job.
        """
        ballot.set_announcements(
            has_pending=bool(self._waiting), has_added=self._has_added, has_texts=bool(self._texts)
        )
        self._has_added = False

    def announcement(self) -> str:
        """Returns this rank's pending jobs and texts as JSON. Each text is included only once."""
        texts = self._texts
        self._texts = []
        return json.dumps({"jobs": list(self._waiting), "texts": texts})

    def apply(self, texts: Sequence[str]) -> tuple[list[tuple[str, LocalJob]], list[str]]:
        """Applies the announcements of all ranks.

        Returns:
            The jobs that join now, in the order in which rank 0 added them, and all submitted texts
            in rank order.
        """
        gathered = [json.loads(text) for text in texts]
        common = [
            name for name in gathered[0]["jobs"] if all(name in each["jobs"] for each in gathered)
        ]
        return [(name, self._waiting.pop(name)) for name in common], [
            t for each in gathered for t in each["texts"]
        ]
