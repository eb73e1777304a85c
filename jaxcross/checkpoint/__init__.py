"""Exact resume: saves every job's state, data position and plan, so that a killed run can continue.

session        the checkpoints of one run, and the user's settings: folder, frequency, number kept
checkpointer   one job's checkpoints on one rank: restores, saves, deletes; the thread that writes
load           loads one job's newest or best state, in any process
restore        decides which of the checkpoints that are complete on all ranks to resume from, and
               reads it
rank_local     which leaves are rank-local: declared by a strategy's state (`RankLocal`), or named
               by the user
part           one rank's description of one checkpoint; parsed as untrusted data
job_list       the jobs of a set of checkpoints, including those that joined during a run
folders        where parts are stored; they're written atomically, and deleted once no restart
               can need them
arrays         arrays on disk, stored by orbax; no other file uses orbax
rank_gather    gathers one job's texts from all ranks
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.checkpoint.checkpointer import JobCheckpointer, SavedProgress
    from jaxcross.checkpoint.folders import Folders, folder_name
    from jaxcross.checkpoint.load import load_checkpoint
    from jaxcross.checkpoint.rank_local import RankLocal, common_leaves, declared, named_leaves
    from jaxcross.checkpoint.session import Checkpoints, Session
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
