"""The vote: the one control message between ranks, an all-reduce (minimum) of a short int64 vector.

Each rank casts its `Ballot`; all receive the same `Verdict`. Every question is put so that the
minimum over ranks answers it: "is it so on all ranks?" is a bit, "are all ranks equal?" a number
and its negation, "how far is the slowest rank?" a count, "what is the strongest request?" its place
among the requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

# The largest value: it never decides a minimum, so it stands for "no opinion".
_NEUTRAL = np.iinfo(np.int64).max
# Columns of a job's row. Two of them come with their negation: the minimum of -x is minus the
# maximum of x, so x is equal on all ranks exactly if the two minima are. waiting, point, -point,
# good, stream, -stream, prepared, limit, request, finite, received_commit, at_start
_FIELDS = 12
# The header. A minimum of 1 means: no rank wants all jobs to stop; all ranks have pending jobs; no
# rank has added one since the last vote; no rank has a text to deliver.
_HEADER = 4
_NO_STOP, _ALL_PENDING, _NONE_ADDED, _NO_TEXT = range(_HEADER)


class JobRequest(IntEnum):
    """A request about a job. Of several ranks' requests the least value counts: a stop first, then
    a pause.
    """

    STOP = 0
    PAUSE = 1
    RESUME = 2
    NONE = 3


class AtStart(IntEnum):
    """A job's progress towards its first step. Of several ranks' values the least counts."""

    EXCUSED = 0  # the other jobs need not wait for it
    LATE = 1  # nor for this one, which takes too long
    COMING = 2
    HERE = 3  # it has called it


def point_hash(*parts: object) -> int:
    """Returns a number that is equal on two ranks when `parts` print equally."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (
        int.from_bytes(digest, "little") >> 2
    )  # below 2**62: its negation is an int64, and it is not `_NEUTRAL`


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBallot:
    """One rank's vote on one job.

    Attributes:
        point: Hash of the action that the job's thread waits to take on all ranks (call a step with
            exchanges, end, ...), or None while it does not wait.
        good: Nothing of this job has failed here. Acted upon at a step's commit, or between its
            steps.
        stream: Number of the stream of batches that it reads, -1 for none.
        prepared: Number of batches of that stream that are or were ready on this rank.
        limit: Number of batches in that stream, if it is known already.
        request: A request about it on this rank; cast in one vote only.
        finite: The exchanged values of its step, as far as they were checked, are finite here.
        received_commit: This rank has received the results of its last committed step, or will
            never need them.
        at_start: Whether it has come to its first step on this rank.
    """

    point: int | None = None
    good: bool = True
    stream: int = -1
    prepared: int = 0
    limit: int | None = None
    request: JobRequest = JobRequest.NONE
    finite: bool = True
    received_commit: bool = True
    at_start: AtStart = AtStart.COMING


class Ballot:
    """One rank's vote: a few bits on the whole run, and one row a job.

    It is kept from vote to vote, and only changed rows are written: a vote costs the host only as
    much as has changed, however many jobs there are.
    """

    __slots__ = ("_rows", "_vector")

    def __init__(self, rows: int) -> None:
        self._vector = np.ones(_HEADER, np.int64)
        self._vector[_ALL_PENDING] = False
        self._rows = self._vector[_HEADER:].reshape(0, _FIELDS)
        self.grow(rows)

    def grow(self, rows: int) -> None:
        """Makes room for `rows` jobs. Called on all ranks between the same two votes, so that
        vectors match.
        """
        before = len(self._rows)
        if rows > before:
            self._vector = np.concatenate(
                [self._vector, np.zeros((rows - before) * _FIELDS, np.int64)]
            )
            self._rows = self._vector[_HEADER:].reshape(rows, _FIELDS)
            for row in range(before, rows):
                self.set_job(row, JobBallot())

    def set_job(self, row: int, ballot: JobBallot) -> None:
        """Sets this rank's vote on the job of that row, for this vote and later ones."""
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
            ballot.at_start,
        )

    def stop(self) -> None:
        """Requests that all jobs stop, in this vote and later ones."""
        self._vector[_NO_STOP] = False

    def set_announcements(self, *, has_pending: bool, has_added: bool, has_texts: bool) -> None:
        """Sets whether this rank wants a gathering of announcements.

        Args:
            has_pending: Jobs wait here until all ranks have added them.
            has_added: One of them was added since the last vote.
            has_texts: There is a text here for all ranks.
        """
        self._vector[_ALL_PENDING] = has_pending
        self._vector[_NONE_ADDED] = not has_added
        self._vector[_NO_TEXT] = not has_texts

    def cast(self) -> np.ndarray:
        """Returns a copy of the vector for the minimum over ranks. Its length is the same on every
        rank.
        """
        return self._vector.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """The outcome of a vote about one job, the same on every rank.

    Attributes:
        waiting: The job waits on every rank.
        same_point: It waits at the same point on every rank. Only meaningful with `waiting`.
        good: It has failed on no rank.
        stream: The stream that every rank reads, or None if they read different ones.
        prepared: Number of batches of it that every rank has ready.
        limit: The least known length of it, or None.
        request: The strongest request of any rank.
        finite: No rank has found exchanged values that are not finite.
        received_commit: Every rank has received the results of its last committed step.
        at_start: Whether it has come to its first step on every rank, or is excused by one.
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
    at_start: AtStart


class Verdict:
    """The outcome of a vote, the same on every rank: the minimum of all ranks' vectors.

    Attributes:
        stop: Some rank requests that all jobs stop.
        gather: A gathering of announcements is needed: for a text, or for jobs that all ranks may
            have added by now.
    """

    __slots__ = ("_rows", "gather", "stop")

    def __init__(self, vector: np.ndarray) -> None:
        self.stop = not vector[_NO_STOP]
        # Jobs can only join if all ranks have some that wait, and only a new one can have made a
        # set complete.
        self.gather = bool(
            not vector[_NO_TEXT] or (vector[_ALL_PENDING] and not vector[_NONE_ADDED])
        )
        self._rows = vector[_HEADER:].reshape(-1, _FIELDS)

    def job(self, row: int) -> JobVerdict:
        """Returns the outcome about the job of that row."""
        (
            waiting,
            low,
            negated,
            good,
            stream,
            unstream,
            prepared,
            limit,
            request,
            finite,
            received,
            at_start,
        ) = self._rows[row].tolist()
        return JobVerdict(
            waiting=bool(waiting),
            same_point=low == -negated,
            good=bool(good),
            stream=stream if stream == -unstream else None,
            prepared=prepared,
            limit=None if limit == _NEUTRAL else limit,
            request=JobRequest(request),
            finite=bool(finite),
            received_commit=bool(received),
            at_start=AtStart(at_start),
        )

    def changed_rows(self, before: Verdict | None) -> list[int]:
        """Returns the rows that differ from an earlier verdict; all rows if their number has
        changed.
        """
        if before is None or len(before._rows) != len(self._rows):
            return list(range(len(self._rows)))
        return (self._rows != before._rows).any(axis=1).nonzero()[0].tolist()


def tally(ballots: Sequence[np.ndarray]) -> Verdict:
    """Returns the verdict on these ballots. For simulators and tests: no communication."""
    return Verdict(np.array(ballots).min(axis=0))
