"""An interleaver that a test feeds with events one by one, as if its rank were alone."""

from __future__ import annotations

from jaxcross.interleave import messages as m
from jaxcross.interleave.vote import tally


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
