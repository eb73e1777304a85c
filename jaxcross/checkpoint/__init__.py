"""Exact resume: saves each job's state, data position and plan, so a killed run can carry on.

session        the checkpoints of one run, and the user's settings: where and how often to save
checkpointer   one job's checkpoints on one rank: restores the newest, writes new ones in a separate
               thread, deletes old ones
restore        finds the newest checkpoint that's complete on all ranks, and reads it
load           loads one job's newest or best state in any process
rank_local     which leaves are rank-local, as declared by a strategy's state (`RankLocal`) or named
               by the user
part           one rank's description of one checkpoint, parsed as untrusted data
job_list       the list of jobs in a folder of checkpoints, including those added during a run
folders        where the parts are on disk; they're written atomically
arrays         reads and writes arrays with orbax; no other file uses orbax
rank_gather    exchanges messages about one job's checkpoints between ranks
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
