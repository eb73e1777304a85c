"""The vote: the one control message between ranks, an all-reduce (minimum) of a short int64 vector.

Each rank casts a `Ballot`; all receive the same `Verdict`. Every question is put so that the minimum over ranks
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says: a wish to stop everything, and one entry a job."""

    stop: bool = False
    jobs: tuple[JobBallot, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a vote, the same on every rank."""

    stop: bool
    jobs: tuple[JobVerdict, ...]


def encode(ballot: Ballot) -> np.ndarray:
    """The vector that the minimum is taken of. Same length on every rank that has the same jobs."""
    vector = np.empty(_HEADER + _FIELDS * len(ballot.jobs), np.int64)
    vector[0] = not ballot.stop
    for row, job in zip(vector[_HEADER:].reshape(-1, _FIELDS), ballot.jobs, strict=True):
        row[:] = (
            job.point is not None,
            _NEUTRAL if job.point is None else job.point,
            _NEUTRAL if job.point is None else -job.point,
            job.good,
            job.stream,
            -job.stream,
            job.prepared,
            _NEUTRAL if job.limit is None else job.limit,
        )
    return vector


def decode(vector: np.ndarray) -> Verdict:
    """The verdict that the minimum of all ranks' vectors stands for."""
    return Verdict(
        stop=not vector[0],
        jobs=tuple(
            JobVerdict(
                waiting=bool(waiting),
                agreed=bool(low == -negated),
                good=bool(good),
                stream=int(stream) if stream == -unstream else None,
                prepared=int(prepared),
                limit=None if limit == _NEUTRAL else int(limit),
            )
            for waiting, low, negated, good, stream, unstream, prepared, limit in vector[_HEADER:]
            .reshape(-1, _FIELDS)
            .tolist()
        ),
    )


def tally(ballots: Sequence[Ballot]) -> Verdict:
    """What ranks that cast these ballots would receive. For simulators and tests: no communication."""
    return decode(np.min(np.stack([encode(ballot) for ballot in ballots]), axis=0))
