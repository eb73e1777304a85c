"""The subcommands of `jaxcross`, one a file: `add_parser(subparsers)` and `run(args)`.

demo          two jobs, one after the other and in crossover
launch        starts ranks on this machine or on `hosts`; `supervise` is the parent of each `rank`,
              and `end_with` ends them if the launcher is killed; `restart` decides whether a run
              that ended is started again, and `relaunch` does it; `run_end` says how a run ended
estimate      predicts from the first step of a script what several jobs gain
plan          which jobs share ranks, from their profiles; `plan_launch` writes files that start the
              groups
top           shows a run from another terminal; `live_table` draws it there and under `launch`
doctor        checks the installation; `doctor_hosts` checks other machines and the network between
              them; `post_mortem` tells how a run ended
data          writes and describes data sets
"""
