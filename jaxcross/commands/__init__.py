"""The subcommands of `jaxcross`, one a file: `add_parser(subparsers)` and `run(args)`.

demo          two jobs, one after the other and in crossover
launch        starts ranks on this machine; `supervise` is the parent of each
doctor        checks the installation; `post_mortem` tells how a run ended
data          writes and describes data sets
"""
