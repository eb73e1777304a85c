"""The vote: the one control message between ranks, an all-reduce (minimum) of a short int64 vector.

Each rank casts its `Ballot`; all receive the same `Verdict`. Every question is put so that the minimum over ranks
answers it: "all of us?" is a bit, "any of us not?" the same bit, "are we equal?" a number and its negation, "how far
is the slowest?" a count, "what is the strongest wish?" its rank among wishes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

_NEUTRAL = np.iinfo(np.int64).max
_FIELDS = 11  # waiting, point, -point, good, stream, -stream, prepared, limit, wish, finite, settled
_HEADER = 4
_GO, _HOLDS, _QUIET, _MUTE = range(_HEADER)


class JobRequest(IntEnum):
    """What somebody wishes for a job. Of several ranks' wishes the least counts: to stop before all, then to pause."""

    STOP = 0
    PAUSE = 1
    RESUME = 2
    NONE = 3


def point_hash(*parts: object) -> int:
    """A number below 2**62 (so that its negation exists) that is equal on two ranks when `parts` print equally."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBallot:
    """What one rank says about one job.

    Attributes:
        point: Hash of the thing the job's thread waits to do together with the other ranks (call a step with
            exchanges, end, ...), or None while it does not wait.
        good: Nothing of this job has failed here. Acted upon at a step's commit, or between its steps.
        stream: The stream of batches it reads, -1 for none.
        prepared: How many batches of that stream are or were ready on this rank.
        limit: How many batches that stream has in all, if that is known already.
        wish: What somebody here wishes for it; ballot once.
        finite: The exchanged values of its step, as far as they were looked at, are finite here.
        settled: It does not have to receive here what a committed step makes.
    """

    point: int | None = None
    good: bool = True
    stream: int = -1
    prepared: int = 0
    limit: int | None = None
    request: JobRequest = JobRequest.NONE
    finite: bool = True
    received_commit: bool = True


class Ballot:
    """What one rank says: a few bits on the whole run, and one row a job. Kept from vote to vote, and written only
    where there is news: a vote costs the host what has changed, however many jobs there are.
    """

    __slots__ = ("_rows", "_vector")

    def __init__(self, rows: int) -> None:
        self._vector = np.ones(_HEADER, np.int64)
        self._vector[_HOLDS] = False
        self._rows = self._vector[_HEADER:].reshape(0, _FIELDS)
        self.grow(rows)

    def grow(self, rows: int) -> None:
        """Makes room for so many jobs. On all ranks between the same two votes."""
        before = len(self._rows)
        if rows > before:
            self._vector = np.concatenate([self._vector, np.zeros((rows - before) * _FIELDS, np.int64)])
            self._rows = self._vector[_HEADER:].reshape(rows, _FIELDS)
            for row in range(before, rows):
                self.set_job(row, JobBallot())

    def set_job(self, row: int, ballot: JobBallot) -> None:
        """From now on this rank says so about the job of that row."""
        self._rows[row] = (
            ballot.point is not None,
            _NEUTRAL if ballot.point is None else ballot.point,
            _NEUTRAL if ballot.point is None else -ballot.point,
            ballot.good,
            ballot.stream,
            -ballot.stream,
            ballot.prepared,
            _NEUTRAL if ballot.limit is None else ballot.limit,
            ballot.request,
            ballot.finite,
            ballot.received_commit,
        )

    def stop(self) -> None:
        """From now on this rank wishes that all jobs stop."""
        self._vector[_GO] = False

    def set_announcements(self, *, has_pending: bool, has_added: bool, has_texts: bool) -> None:
        """What this rank says about jobs that may join.

        Args:
            has_pending: Some wait here until all ranks have added them.
            has_added: One of them was added since the last vote.
            has_texts: There is a text here that all ranks are to hear.
        """
        self._vector[_HOLDS], self._vector[_QUIET], self._vector[_MUTE] = has_pending, not has_added, not has_texts

    def cast(self) -> np.ndarray:
        """The vector that the minimum is taken of, as it is now. Same length on every rank that has the same jobs."""
        return self._vector.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """What all ranks say about one job.

    Attributes:
        waiting: The job waits on every rank.
        same_point: It waits at the same point on every rank. Only meaningful with `waiting`.
        good: It has failed on no rank.
        stream: The stream that every rank reads, or None if they read different ones.
        prepared: How many batches of it every rank has ready.
        limit: The least known length of it, or None.
        wish: The strongest wish of any rank.
        finite: No rank has found exchanged values that are not finite.
        settled: It has received, on every rank, what its last committed step made.
    """

    waiting: bool
    same_point: bool
    good: bool
    stream: int | None
    prepared: int
    limit: int | None
    request: JobRequest
    finite: bool
    received_commit: bool


class Verdict:
    """The outcome of a vote, the same on every rank: the minimum of all ranks' vectors.

    Attributes:
        stop: Some rank wishes that all jobs stop.
        gather: Ranks have something to tell in words: a text, or jobs that perhaps all of them have added by now.
    """

    __slots__ = ("_rows", "gather", "stop")

    def __init__(self, vector: np.ndarray) -> None:
        self.stop = not vector[_GO]
        self.gather = bool(not vector[_MUTE] or (vector[_HOLDS] and not vector[_QUIET]))
        self._rows = vector[_HEADER:].reshape(-1, _FIELDS)

    def job(self, row: int) -> JobVerdict:
        """What all ranks say about the job of that row."""
        waiting, low, negated, good, stream, unstream, prepared, limit, request, finite, received_commit = self._rows[
            row
        ].tolist()
        return JobVerdict(
            waiting=bool(waiting),
            same_point=low == -negated,
            good=bool(good),
            stream=stream if stream == -unstream else None,
            prepared=prepared,
            limit=None if limit == _NEUTRAL else limit,
            request=JobRequest(request),
            finite=bool(finite),
            received_commit=bool(received_commit),
        )

    def changed_rows(self, before: Verdict | None) -> list[int]:
        """The rows that say something else than in an earlier verdict; all of them if there were fewer in that."""
        if before is None or len(before._rows) != len(self._rows):
            return list(range(len(self._rows)))
        return (self._rows != before._rows).any(axis=1).nonzero()[0].tolist()


def tally(ballots: Sequence[np.ndarray]) -> Verdict:
    """What ranks that cast these ballots would receive. For simulators and tests: no communication."""
    return Verdict(np.min(np.stack(ballots), axis=0))
