"""The vote, which is the one control message between ranks: an all-reduce of a short int64 vector.

Each rank casts its `Ballot`, and all ranks receive the same `Verdict`. The reduction is a minimum,
so every question is phrased such that the minimum over ranks answers it. "Is this true on all
ranks?" is a bit. "Is this number equal on all ranks?" is the number and its negation. "How far is
the slowest rank?" is a count. "What is the strongest request?" is the request's place in the order
of requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

# The largest int64. It never decides a minimum, so it means "no opinion".
_NEUTRAL = np.iinfo(np.int64).max
# The columns of a job's row: waiting, point, -point, good, stream, -stream, prepared, limit,
# request, finite, received_commit, at_start. Two numbers come with their negation, because the
# minimum of -x is minus the maximum of x. So x is equal on all ranks exactly if the two minima
# differ only in sign.
_FIELDS = 12
# The header. A minimum of 1 means, in this order: no rank requests that all jobs stop; all ranks
# have pending jobs; no rank has added one since the last vote; no rank has a text to deliver.
_HEADER = 4
_NO_STOP, _ALL_PENDING, _NONE_ADDED, _NO_TEXT = range(_HEADER)


class JobRequest(IntEnum):
    """A request about a job.

    If ranks make different requests, the smallest value wins: a stop first, then a pause.
    """

    STOP = 0
    PAUSE = 1
    RESUME = 2
    NONE = 3


class AtStart(IntEnum):
    """A job's progress towards its first step. If ranks differ, the smallest value wins."""

    EXCUSED = 0  # the other jobs need not wait for it
    LATE = 1  # nor for this one, which takes too long
    COMING = 2
    HERE = 3  # the job has called its first step


def point_hash(*parts: object) -> int:
    """Returns a number that's equal on two ranks if `parts` has the same `repr` on both."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    # Below 2**62, so that it differs from `_NEUTRAL` and its negation is an int64.
    return int.from_bytes(digest, "little") >> 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBallot:
    """One rank's vote on one job.

    Attributes:
        point: Hash of the action that the job's thread waits to take on all ranks (call a step with
            exchanges, end, ...). None if the thread isn't waiting.
        good: The job hasn't failed on this rank. It's acted upon at a step's commit or between
            steps.
        stream: Number of the stream of batches that the job reads, or -1 for none.
        prepared: How many batches of that stream have been ready on this rank so far.
        limit: The number of batches in that stream, if it's known yet.
        request: A request about the job made on this rank. It's cast in one vote only.
        finite: The step's exchanged values are finite on this rank, as far as they were checked.
        received_commit: This rank has received the results of the last committed step, or will
            never need them.
        at_start: Whether the job has reached its first step on this rank.
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
    """One rank's vote: a few bits about the whole run, and one row per job.

    The ballot is kept from vote to vote, and only changed rows are rewritten. So the host's work
    for a vote depends on how much has changed, rather than on the number of jobs.
    """

    __slots__ = ("_rows", "_vector")

    def __init__(self, rows: int) -> None:
        self._vector = np.ones(_HEADER, np.int64)
        self._vector[_ALL_PENDING] = False
        self._rows = self._vector[_HEADER:].reshape(0, _FIELDS)
        self.grow(rows)

    def grow(self, rows: int) -> None:
        """Makes room for `rows` jobs.

        All ranks call this between the same two votes, so that their vectors match.
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
        """Sets this rank's vote on the job in that row, for this vote and later ones."""
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
        """Sets whether this rank requests a gathering of announcements.

        Args:
            has_pending: Jobs on this rank are waiting until all ranks have added them.
            has_added: One of these jobs was added since the last vote.
            has_texts: This rank has a text for all ranks.
        """
        self._vector[_ALL_PENDING] = has_pending
        self._vector[_NONE_ADDED] = not has_added
        self._vector[_NO_TEXT] = not has_texts

    def cast(self) -> np.ndarray:
        """Returns a copy of the vector to be reduced. Its length is identical across ranks."""
        return self._vector.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """A vote's outcome for one job. Identical across ranks.

    Attributes:
        waiting: The job waits on every rank.
        same_point: The job waits at the same point on every rank. Meaningful only if `waiting`.
        good: The job has failed on no rank.
        stream: The stream that every rank reads, or None if ranks read different ones.
        prepared: How many batches of that stream are ready on every rank.
        limit: The smallest known length of that stream, or None.
        request: The strongest request of any rank.
        finite: No rank found exchanged values that aren't finite.
        received_commit: Every rank has received the results of the last committed step, or will
            never need them.
        at_start: Whether the job has reached its first step on every rank, or some rank excuses it.
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
    """A vote's outcome: the minimum of all ranks' vectors. Identical across ranks.

    Attributes:
        stop: Some rank requests that all jobs stop.
        gather: The ranks need to gather announcements, either for a text or for jobs that all ranks
            may have added by now.
    """

    __slots__ = ("_rows", "gather", "stop")

    def __init__(self, vector: np.ndarray) -> None:
        self.stop = not vector[_NO_STOP]
        # A job can join only if all ranks have pending jobs, and only a new one can have completed
        # the set.
        self.gather = bool(
            not vector[_NO_TEXT] or (vector[_ALL_PENDING] and not vector[_NONE_ADDED])
        )
        self._rows = vector[_HEADER:].reshape(-1, _FIELDS)

    def job(self, row: int) -> JobVerdict:
        """Returns the outcome for the job in that row."""
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
        """Returns the rows that differ from an earlier verdict, or all if their number changed."""
        if before is None or len(before._rows) != len(self._rows):
            return list(range(len(self._rows)))
        return (self._rows != before._rows).any(axis=1).nonzero()[0].tolist()


def tally(ballots: Sequence[np.ndarray]) -> Verdict:
    """Returns the verdict on these ballots without communication, for simulators and tests."""
    return Verdict(np.array(ballots).min(axis=0))
