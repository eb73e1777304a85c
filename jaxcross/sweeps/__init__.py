"""Sweeps: many trials of one training function, a few at a time, each of them a job of a `Runner`.

run_sweep       `sweep`: checks, runs and resumes a whole sweep
search          where trials come from: `Grid`, `Choices`, `Draws`, `Optuna`; `study` asks Optuna
schedule        in which order a search receives results, and when which trial begins. Pure
coordinator     rank 0's side: asks, tells, prunes, and writes down what must survive a restart
trial           each rank's side of a trial: the function of its job, and the clean-up after the job
log             the trials of a sweep on disk
sweep_settings  settings that must be the same on all ranks, and whenever a sweep is restarted
sweep_rank      a rank of `jaxcross sweep`
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.sweeps.run_sweep import sweep
    from jaxcross.sweeps.search import Choices, Draws, Grid, Optuna
    from jaxcross.sweeps.trial import TrialObserver
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
