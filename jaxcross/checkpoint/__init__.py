"""Exact resume: every job's state, place in its data and plan on disk, so that a run that was killed goes on as if not.

settings   what the user says: where, how often, how many
leaves     a pytree -> named host arrays, and back
own        which leaves are each rank's own, by what they are
part       what one rank says of one checkpoint; parsed as data that nobody vouches for
members    which jobs the set has beside those that the command adds
folders    where parts lie; written atomically, deleted when no restart can need them
arrays     arrays on disk, by orbax: the only file that knows it
choice     which checkpoint all ranks can resume from
keeper     one job's checkpoints on one rank: agrees, restores, saves
session    the checkpoints of one run
"""

from jaxcross.checkpoint.session import Session
from jaxcross.checkpoint.settings import Checkpoints

__all__ = ["Checkpoints", "Session"]
