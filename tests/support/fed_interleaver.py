"""An interleaver that gets its events from the test one by one, as if its rank were alone."""

from __future__ import annotations

from jaxcross.interleave import messages as m
from jaxcross.interleave.vote import Ballot, JobBallot, tally


def feed(interleaver, *events):
    out = []
    for event in events:
        out += interleaver.handle(event)
        interleaver.check()
    return out


def vote(interleaver, instructions):
    """Answers the vote among `instructions` as if this rank were alone."""
    ballot = next(i.ballot for i in instructions if isinstance(i, m.CastVote))
    return feed(interleaver, m.VoteDone(tally([ballot])))


def failed_elsewhere(instructions, jobs=1):
    """The verdict on the vote among `instructions` if job 0 has failed on another rank."""
    other = Ballot(jobs)
    other.set_job(0, JobBallot(good=False))
    mine = next(i.ballot for i in instructions if isinstance(i, m.CastVote))
    return m.VoteDone(tally([mine, other.cast()]))
