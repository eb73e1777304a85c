"""Sweeps: train a function with many different parameters, each trial as a job of a `Runner`.

run_sweep       the `sweep` function: checks, runs and resumes a whole sweep
search          the searches to choose from: `Grid`, `Choices`, `Draws`, `Optuna`
study           asks Optuna for trials
schedule        the order in which a search receives results, and when each trial begins. Pure
coordinator     rank 0's side: asks the search, reports results, prunes, and logs for a restart
trial           each rank's side: the function of a trial's job, and the clean-up after it
log             the log of the trials on disk
sweep_settings  the settings, which must be the same on all ranks and, mostly, after a restart
sweep_rank      the process that `jaxcross sweep` starts on each rank
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.sweeps.run_sweep import sweep
    from jaxcross.sweeps.search import Choices, Draws, Grid, Optuna
    from jaxcross.sweeps.trial import TrialObserver
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
