"""Exact resume: state, position in the data and plan of every job on disk, so that a killed run can
go on.

settings       the user's settings: where, how often, how many
checkpointer   one job's checkpoints on one rank: agrees, restores, saves
session        the checkpoints of one run, and the thread that writes (`writer`)
load           one job's newest or best state, for any process
restore        decides which checkpoint to resume from, and reads it; `select`: those complete on
               all ranks
rank_local     which leaves are each rank's own, by what they are
part           what one rank says of one checkpoint; parsed as untrusted data
job_list       the jobs of the set that the command does not add itself
layout         where parts are; written atomically, deleted when no restart can need them
arrays         arrays on disk, by orbax: the only file that knows it
rank_gather    one job's texts, gathered from all ranks
"""

from jaxcross.checkpoint.load import load_checkpoint
from jaxcross.checkpoint.session import Session
from jaxcross.checkpoint.settings import Checkpoints

__all__ = ["Checkpoints", "Session", "load_checkpoint"]
