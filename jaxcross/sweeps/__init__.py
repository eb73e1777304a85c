"""Sweeps: many trials of one training function, a few at a time, each a job of a `Runner`.

sweep        `sweep`: checks, runs and resumes a whole sweep
search       where trials come from: `Grid`, `Choices`, `Draws`, `Optuna`; `study` asks Optuna
schedule     the order in which results become known, and when which trial begins. Pure
coordinator  rank 0's side: asks, tells, prunes, and writes down what must survive
trial        each rank's side of a trial: a job's function and what follows the job
log          the trials of a sweep on disk
settings     what all ranks, and all starts of one sweep, must have in common
script       a rank of `jaxcross sweep`
"""

from jaxcross.sweeps.search import Choices, Draws, Grid, Optuna

__all__ = ["Choices", "Draws", "Grid", "Optuna"]
