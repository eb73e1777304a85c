"""The vote: a small all-reduce that settles whatever the ranks have to decide together.

Each rank casts a `Ballot`, a short int64 vector. The elementwise minimum of all ballots is the
`Verdict`, which all ranks receive, so they all come to the same decisions. We make do with a single
reduction, because each additional reduction would cost a round trip. So every question has to be
phrased in such a way that a minimum answers it:

- "Is this true on all ranks?" is a bit: the minimum is 1 only if it's true on all of them.
- "Is this number equal on all ranks?" takes two columns, the number and its negation. The minimum
  of -x is minus the maximum of x, so the number is the same on all ranks if the two minima differ
  only in sign.
- "How far is the slowest rank?" is a count.
- "What is the strongest request?" is an enum, in which stronger requests have smaller values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

# The largest int64. It never affects a minimum, so it stands for "this rank has nothing to say".
_NEUTRAL = np.iinfo(np.int64).max
# The number of columns in a job's row of the ballot: waiting, point, -point, good, stream, -stream,
# prepared, limit, request, finite, received_commit, at_start. With the negations of `point` and
# `stream`, the minima show whether the values are equal on all ranks.
_FIELDS = 12
# The ballot begins with this many bits about the run as a whole. A minimum of 1 means, in this
# order: no rank requests that all jobs stop; all ranks have jobs waiting to join; no rank has added
# a job since the last vote; no rank has a text to deliver.
_HEADER = 4
_NO_STOP, _ALL_PENDING, _NONE_ADDED, _NO_TEXT = range(_HEADER)


class JobRequest(IntEnum):
    """A request about a job.

    If ranks make different requests at the same time, the smallest value wins, so a stop takes
    precedence over a pause.
    """

    STOP = 0
    PAUSE = 1
    RESUME = 2
    NONE = 3


class AtStart(IntEnum):
    """A job's progress towards its first step. If ranks differ, the smallest value wins."""

    EXCUSED = 0  # it waits for other jobs, so they must not wait for it
    LATE = 1  # it takes too long, so the other jobs no longer wait for it
    COMING = 2
    HERE = 3  # the job has called its first step


def point_hash(*parts: object) -> int:
    """Returns a number that's equal on two ranks if `parts` has the same `repr` on both."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    # The shift keeps the hash below 2**62, so it can't collide with `_NEUTRAL`, and its negation is
    # a valid int64.
    return int.from_bytes(digest, "little") >> 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBallot:
    """One rank's vote on one job.

    Attributes:
        point: A hash of what the job's thread is waiting to do together with all ranks (call a step
            with exchanges, end, ...). None if the thread isn't waiting for other ranks.
        good: Whether the job is fine on this rank. A failure takes effect at a step's commit or
            between two steps.
        stream: Number of the stream of batches that the job reads, or -1 for none.
        prepared: How many batches of that stream this rank has prepared so far.
        limit: The number of batches in that stream, if it's known yet.
        request: A request about the job that was made on this rank. Cast in a single vote only.
        finite: Whether the values that the step has exchanged are finite on this rank, as far as
            they were checked.
        received_commit: Whether this rank has received the results of the last committed step, or
            never will, because one of the step's segments failed here.
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

    Most rows don't change between two votes, so we keep the vector and only rewrite the rows that
    have changed. That way, the host's work per vote depends on how much has changed rather than on
    the number of jobs.
    """

    __slots__ = ("_rows", "_vector")

    def __init__(self, rows: int) -> None:
        self._vector = np.ones(_HEADER, np.int64)
        self._vector[_ALL_PENDING] = False
        self._rows = self._vector[_HEADER:].reshape(0, _FIELDS)
        self.grow(rows)

    def grow(self, rows: int) -> None:
        """Makes room for `rows` jobs.

        All ranks call this between the same two votes, so their vectors always have the same
        length.
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
        """Sets this rank's vote on the job in a row, for the next vote and all later ones."""
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
        """Requests, in the next vote and all later ones, that all jobs stop."""
        self._vector[_NO_STOP] = False

    def set_announcements(self, *, has_pending: bool, has_added: bool, has_texts: bool) -> None:
        """Sets whether this rank requests a gathering of announcements.

        Args:
            has_pending: Whether jobs on this rank are waiting for all ranks to add them.
            has_added: Whether one of these jobs was added since the last vote.
            has_texts: Whether this rank has a text for all ranks.
        """
        self._vector[_ALL_PENDING] = has_pending
        self._vector[_NONE_ADDED] = not has_added
        self._vector[_NO_TEXT] = not has_texts

    def cast(self) -> np.ndarray:
        """Returns a copy of the vector to be reduced, which has the same length on all ranks."""
        return self._vector.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """A vote's outcome for one job. Identical across ranks.

    Attributes:
        waiting: Whether the job is waiting on every rank.
        same_point: Whether the job is waiting at the same point on every rank. Meaningful only if
            `waiting`.
        good: Whether the job is fine on every rank.
        stream: The stream that every rank reads, or None if ranks read different ones.
        prepared: How many batches of that stream every rank has prepared.
        limit: The smallest known length of that stream, or None.
        request: The strongest request that any rank has made.
        finite: Whether all exchanged values are finite, as far as ranks have checked.
        received_commit: Whether every rank has received the results of the last committed step, or
            never will, because one of the step's segments failed there.
        at_start: Whether the job has reached its first step on every rank, or some rank has excused
            it.
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
        stop: Whether some rank requests that all jobs stop.
        gather: Whether the ranks have to gather their announcements, because some rank has a text
            or because a job may have been added on all ranks by now.
    """

    __slots__ = ("_rows", "gather", "stop")

    def __init__(self, vector: np.ndarray) -> None:
        self.stop = not vector[_NO_STOP]
        # The ranks have to gather announcements if some rank has a text, or if another job might be
        # able to join. A job joins once all ranks have added it. For that to be possible now, all
        # ranks must have jobs waiting to join, and some rank must have added a job since the last
        # vote.
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
    """Returns the verdict on these ballots without communicating, for simulators and tests."""
    return Verdict(np.array(ballots).min(axis=0))
