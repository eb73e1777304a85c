"""Jobs added during the run that wait until every rank has added them, and texts for all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.vote import Ballot, JobRequest


class PendingJobs:
    """One rank's pending jobs and texts.

    Ranks may add jobs in any order. A job joins once all ranks have added it.
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
        """Stores a request for a job that hasn't joined. It's cast once the job has joined."""
        if name in self._waiting:
            self._waiting[name].add_request(request)

    def submit(self, text: str) -> None:
        """Accepts a text for delivery on all ranks."""
        self._texts.append(text)

    def write(self, ballot: Ballot) -> None:
        """Writes into the next vote whether the ranks should gather their announcements.

        An added job counts as news in one vote only. Otherwise the ranks would gather over and over
        while one of them hasn't added the job yet.
        """
        ballot.set_announcements(
            has_pending=bool(self._waiting), has_added=self._has_added, has_texts=bool(self._texts)
        )
        self._has_added = False

    def announcement(self) -> str:
        """Returns this rank's text for a gathering. Each submitted text is sent once."""
        texts = self._texts
        self._texts = []
        return json.dumps({"jobs": list(self._waiting), "texts": texts})

    def apply(self, texts: Sequence[str]) -> tuple[list[tuple[str, LocalJob]], list[str]]:
        """Applies the announcements of all ranks.

        Returns:
            The jobs that join now, in rank 0's order, and all submitted texts in rank order.
        """
        gathered = [json.loads(text) for text in texts]
        common = [
            name for name in gathered[0]["jobs"] if all(name in each["jobs"] for each in gathered)
        ]
        return [(name, self._waiting.pop(name)) for name in common], [
            t for each in gathered for t in each["texts"]
        ]
