"""The subcommands of `jaxcross`, one per file, with an `add_parser(subparsers)` and a `run(args)`.

demo          trains two jobs, one after the other and in crossover
launch        starts ranks on this machine or on `hosts`; `rank_supervisor` is the parent of each
              `rank` and handles its output, and `end_with` stops the ranks if the launcher is
              killed; `restart_decision` judges how a run ended and whether to restart it, and
              `restart_loop` acts on that
estimate      times a script's first step to predict what running several jobs would gain
plan          decides from profiles which jobs share ranks; `plan_launch` writes files that start
              the groups
contention    measures how much computations and exchanges slow each other down, by running
              `contention_rank` on every rank
sweep         trains with every combination of values, a few at a time
top           follows a run from another terminal; `live_table` draws the table, also for `launch`
doctor        checks the installation; `doctor_hosts` checks other machines and the network between
              them; `post_mortem_table` shows how a run ended
data          writes and describes data sets
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.commands import end_with
    from jaxcross.commands.launch import (
        NO_MPIRUN,
        crowded,
        find_mpirun,
        mpirun_command,
        python_program,
        shared_accelerator,
        supervised,
    )
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
