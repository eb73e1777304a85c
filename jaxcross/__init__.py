"""Several distributed JAX training jobs share one accelerator.

While one job exchanges gradients, another one computes, so exchanges hide behind computation.

    crossover        turns a train step into the same step over MPI, cut into compute and
                     collective segments
    Runner           runs several jobs that share this rank's device
    fuse             combines tiny jobs with the same step into one program, if that's faster
    sweep            trains a function with many parameters, a few trials at a time
    Checkpoints      exact resume: a run that was killed continues as if nothing had happened
    exchange         gradient exchanges as optax transformations
    tensor           layers of one model that are sharded over several ranks: 1-D, 2-D, 2.5-D
    ParameterServer  asynchronous and stale-synchronous training
    program          tracing, cutting and compiling: the step as data
    data             ImageNet-format records, sharded, resumable, decoded once
    estimate         predicts how much faster several jobs would run together, from a few steps of
                     one job
    plan             decides which jobs share ranks, how they share them, and how much to compress
    report           what happened in a run, as a table, JSON, a trace and a picture
    testing          runs a step on all ranks in one process, without MPI, and checks its results
    lab              emulates several hosts and slow links on one machine

`%load_ext jaxcross` adds `%%ranks` to a notebook, which runs a cell on several ranks.

Importing jaxcross starts neither MPI nor a device; that only happens when you call `initialize`.

The package's folders fall into two groups. The core compiles steps (`step`, `program` and `wire`),
runs the training loops (`jobs`, `runtime` and `interleave`), and provides what both of these need
(`world`, `health`, `checkpoint` and `report`). The other folders build on the core: `exchange`,
`tensor` and `server` are used in steps; `data`, `plan`, `gains` and `sweeps` are used for runs;
`commands`, `notebook` and `lab` contain tools. Each folder's docstring lists its files, and its
`__init__` provides the names that other folders use. JAX's private names are only used in
`_jax_compat`.
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:  # the only list of public names
    from jaxcross import data as data
    from jaxcross import errors as errors
    from jaxcross import exchange as exchange
    from jaxcross import lab as lab
    from jaxcross import plan as plan
    from jaxcross import program as program
    from jaxcross import report as report
    from jaxcross import tensor as tensor
    from jaxcross import testing as testing
    from jaxcross._link import Link as Link
    from jaxcross.checkpoint import Checkpoints as Checkpoints
    from jaxcross.checkpoint import load_checkpoint as load_checkpoint
    from jaxcross.errors import CutError as CutError
    from jaxcross.errors import ExchangeError as ExchangeError
    from jaxcross.errors import JobError as JobError
    from jaxcross.errors import MissingExtraError as MissingExtraError
    from jaxcross.gains import estimate as estimate
    from jaxcross.gains import fuse as fuse
    from jaxcross.interleave import Instrument as Instrument
    from jaxcross.interleave import Policy as Policy
    from jaxcross.interleave import RoundRobin as RoundRobin
    from jaxcross.interleave import Sequential as Sequential
    from jaxcross.interleave import Span as Span
    from jaxcross.interleave import Turns as Turns
    from jaxcross.interleave import Weighted as Weighted
    from jaxcross.jobs import Fusion as Fusion
    from jaxcross.jobs import Job as Job
    from jaxcross.jobs import JobContext as JobContext
    from jaxcross.jobs import Runner as Runner
    from jaxcross.jobs import run as run
    from jaxcross.notebook import load_ipython_extension as load_ipython_extension
    from jaxcross.notebook import unload_ipython_extension as unload_ipython_extension
    from jaxcross.report import SweepResult as SweepResult
    from jaxcross.server import ParameterServer as ParameterServer
    from jaxcross.step import Step as Step
    from jaxcross.step import crossover as crossover
    from jaxcross.sweeps import Choices as Choices
    from jaxcross.sweeps import Draws as Draws
    from jaxcross.sweeps import Grid as Grid
    from jaxcross.sweeps import Optuna as Optuna
    from jaxcross.sweeps import sweep as sweep
    from jaxcross.world import Control as Control
    from jaxcross.world import World as World
    from jaxcross.world import current_world as current_world
    from jaxcross.world import initialize as initialize
else:  # with `__getattr__`, a type checker would accept every misspelt name
    __getattr__, __dir__, __all__ = on_first_use(__name__)
