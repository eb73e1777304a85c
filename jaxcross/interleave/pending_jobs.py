"""Jobs that were added here during the run and wait until every rank has added them; texts that all are to hear."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxcross.interleave.local_state import LocalJob
from jaxcross.interleave.vote import Ballot, JobRequest


class PendingJobs:
    """Those of one rank. Ranks may add jobs in any order: what counts is which of them all ranks have added."""

    def __init__(self) -> None:
        self._waiting: dict[str, LocalJob] = {}
        self._texts: list[str] = []
        self._has_added = False

    @property
    def names(self) -> tuple[str, ...]:
        """Those that wait."""
        return tuple(self._waiting)

    def add(self, name: str) -> None:
        """A job was added here."""
        self._waiting[name] = LocalJob()
        self._has_added = True

    def request(self, name: str, request: JobRequest) -> None:
        """A wish for a job that has not joined, which it brings along."""
        if name in self._waiting:
            self._waiting[name].add_request(request)

    def submit(self, text: str) -> None:
        """All ranks are to hear the text."""
        self._texts.append(text)

    def write(self, ballot: Ballot) -> None:
        """Writes into the coming vote whether ranks should gather. News are news once: nobody votes for ever."""
        ballot.set_announcements(
            has_pending=bool(self._waiting), has_added=self._has_added, has_texts=bool(self._texts)
        )
        self._has_added = False

    def announcement(self) -> str:
        """What this rank tells all of them."""
        texts, self._texts = self._texts, []
        return json.dumps({"jobs": list(self._waiting), "texts": texts})

    def apply(self, texts: Sequence[str]) -> tuple[list[tuple[str, LocalJob]], list[str]]:
        """What all ranks gathered: the jobs that join now, in the order of rank 0, and the texts in order of ranks."""
        gathered = [json.loads(text) for text in texts]
        common = [name for name in gathered[0]["jobs"] if all(name in each["jobs"] for each in gathered)]
        return [(name, self._waiting.pop(name)) for name in common], [t for each in gathered for t in each["texts"]]
