"""Jobs that were added during the run and wait until every rank has added them; texts for all
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.vote import Ballot, JobRequest


class PendingJobs:
    """The pending jobs and texts of one rank. Ranks may add jobs in any order: a job joins once all
    have added it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, LocalJob] = {}
        self._texts: list[str] = []
        self._has_added = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the jobs that wait."""
        return tuple(self._waiting)

    def add(self, name: str) -> None:
        """Notes that a job was added here."""
        self._waiting[name] = LocalJob()
        self._has_added = True

    def request(self, name: str, request: JobRequest) -> None:
        """Takes a request for a job that has not joined; it is cast once the job has."""
        if name in self._waiting:
            self._waiting[name].add_request(request)

    def submit(self, text: str) -> None:
        """Takes a text that is to be delivered on all ranks."""
        self._texts.append(text)

    def write(self, ballot: Ballot) -> None:
        """Writes into the coming vote whether ranks should gather.

        An added job counts in one vote only: otherwise ranks would gather for ever while one of
        them lacks it.
        """
        ballot.set_announcements(
            has_pending=bool(self._waiting), has_added=self._has_added, has_texts=bool(self._texts)
        )
        self._has_added = False

    def announcement(self) -> str:
        """Returns this rank's text for a gathering. Texts are sent once."""
        texts = self._texts
        self._texts = []
        return json.dumps({"jobs": list(self._waiting), "texts": texts})

    def apply(self, texts: Sequence[str]) -> tuple[list[tuple[str, LocalJob]], list[str]]:
        """Applies the announcements of all ranks.

        Returns:
            The jobs that join now, in the order of rank 0, and all texts, in the order of ranks.
        """
        gathered = [json.loads(text) for text in texts]
        common = [
            name for name in gathered[0]["jobs"] if all(name in each["jobs"] for each in gathered)
        ]
        return [(name, self._waiting.pop(name)) for name in common], [
            t for each in gathered for t in each["texts"]
        ]
