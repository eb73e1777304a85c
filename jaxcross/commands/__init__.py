"""The subcommands of `jaxcross`, one per file. Each has `add_parser(subparsers)` and `run(args)`.

demo          trains two jobs, one after the other and in crossover
launch        starts ranks on this machine or on `hosts`; `rank_supervisor` is the parent of each
              `rank`, and `end_with` ends the ranks if the launcher is killed; `restart_decision`
              judges how a run ended and decides whether to restart it, and `restart_loop` does so
estimate      predicts from the first step of a script what several jobs would gain
plan          which jobs share ranks, from their profiles; `plan_launch` writes files that start the
              groups
contention    measures how much computations and exchanges slow each other down; `contention_rank`
              is one rank of the measurement
sweep         trains with all combinations of values, a few at a time
top           shows a run from another terminal; `live_table` draws it there and under `launch`
doctor        checks the installation; `doctor_hosts` checks other machines and the network between
              them; `post_mortem_table` shows how a run ended
data          writes and describes data sets
"""
