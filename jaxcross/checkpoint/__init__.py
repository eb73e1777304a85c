"""Exact resume: saves every job's state, data position and plan, so that a killed run can continue.

session        the checkpoints of one run, and the user's settings: folder, frequency, number kept
checkpointer   one job's checkpoints on one rank: restores, saves, deletes; the thread that writes
load           loads one job's newest or best state, in any process
restore        decides which of the checkpoints that are complete on all ranks to resume from, and
               reads it
rank_local     which leaves are rank-local, by their type or by name
part           one rank's description of one checkpoint; parsed as untrusted data
job_list       the jobs of a set of checkpoints, including those that joined during a run
folders        where parts are stored; they're written atomically, and deleted once no restart
               can need them
arrays         arrays on disk, stored by orbax; no other file uses orbax
rank_gather    gathers one job's texts from all ranks
"""

from jaxcross.checkpoint.load import load_checkpoint
from jaxcross.checkpoint.session import Checkpoints, Session

__all__ = ["Checkpoints", "Session", "load_checkpoint"]
