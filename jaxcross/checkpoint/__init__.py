"""Exact resume: every job's state, place in its data and plan on disk, so that a run that was killed goes on as if not.

settings       what the user says: where, how often, how many
checkpointer   one job's checkpoints on one rank: agrees, restores, saves
session        the checkpoints of one run, and the thread that writes (`writer`)
restore        which checkpoint all ranks can resume from (`select`), and its leaves
rank_local     which leaves are each rank's own, by what they are
part           what one rank says of one checkpoint; parsed as data that nobody vouches for
job_list       which jobs the set has beside those that the command adds
layout         where parts are; written atomically, deleted when no restart can need them
arrays         arrays on disk, by orbax: the only file that knows it
rank_gather    one job's texts, gathered from all ranks
"""

from jaxcross.checkpoint.session import Session
from jaxcross.checkpoint.settings import Checkpoints

__all__ = ["Checkpoints", "Session"]
