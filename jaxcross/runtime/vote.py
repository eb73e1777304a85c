"""The vote: the one control message between ranks, an all-reduce (minimum) of a short int64 vector.

Each rank casts its `Ballot`; all receive the same `Verdict`. Every question is put so that the minimum over ranks
answers it: "all of us?" is a bit, "any of us not?" the same bit, "are we equal?" a number and its negation, "how far
is the slowest?" a count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NEUTRAL = np.iinfo(np.int64).max
_FIELDS = 8  # waiting, point, -point, good, stream, -stream, prepared, limit
_HEADER = 1  # go on (0: some rank wants to stop)


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
    """

    point: int | None = None
    good: bool = True
    stream: int = -1
    prepared: int = 0
    limit: int | None = None


class Ballot:
    """What one rank says: a wish to stop everything, and one row a job. Kept from vote to vote, and written only where
    there is news: a vote costs the host what has changed, however many jobs there are.
    """

    __slots__ = ("_rows", "_vector")

    def __init__(self, jobs: int) -> None:
        self._vector = np.ones(_HEADER + _FIELDS * jobs, np.int64)
        self._rows = self._vector[_HEADER:].reshape(jobs, _FIELDS)
        for job in range(jobs):
            self.say(job, JobBallot())

    def say(self, job: int, said: JobBallot) -> None:
        """From now on this rank says so about the job."""
        self._rows[job] = (
            said.point is not None,
            _NEUTRAL if said.point is None else said.point,
            _NEUTRAL if said.point is None else -said.point,
            said.good,
            said.stream,
            -said.stream,
            said.prepared,
            _NEUTRAL if said.limit is None else said.limit,
        )

    def stop(self) -> None:
        """From now on this rank wishes that all jobs stop."""
        self._vector[0] = False

    def cast(self) -> np.ndarray:
        """The vector that the minimum is taken of, as it is now. Same length on every rank that has the same jobs."""
        return self._vector.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """What all ranks say about one job.

    Attributes:
        waiting: The job waits on every rank.
        agreed: It waits at the same point on every rank. Only meaningful with `waiting`.
        good: It has failed on no rank.
        stream: The stream that every rank reads, or None if they read different ones.
        prepared: How many batches of it every rank has ready.
        limit: The least known length of it, or None.
    """

    waiting: bool
    agreed: bool
    good: bool
    stream: int | None
    prepared: int
    limit: int | None


class Verdict:
    """The outcome of a vote, the same on every rank: the minimum of all ranks' vectors."""

    __slots__ = ("_rows", "stop")

    def __init__(self, vector: np.ndarray) -> None:
        self.stop = not vector[0]
        self._rows = vector[_HEADER:].reshape(-1, _FIELDS)

    def job(self, job: int) -> JobVerdict:
        """What all ranks say about one job."""
        waiting, low, negated, good, stream, unstream, prepared, limit = self._rows[job].tolist()
        return JobVerdict(
            waiting=bool(waiting),
            agreed=low == -negated,
            good=bool(good),
            stream=stream if stream == -unstream else None,
            prepared=prepared,
            limit=None if limit == _NEUTRAL else limit,
        )

    def news(self, before: Verdict) -> list[int]:
        """The jobs about which it says something else than an earlier verdict."""
        return (self._rows != before._rows).any(axis=1).nonzero()[0].tolist()


def tally(ballots: Sequence[np.ndarray]) -> Verdict:
    """What ranks that cast these ballots would receive. For simulators and tests: no communication."""
    return Verdict(np.min(np.stack(ballots), axis=0))
