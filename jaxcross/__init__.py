"""Several distributed JAX training jobs share one accelerator; one job's exchange hides behind
another's computation.

    crossover        a train step -> the same step over MPI, cut into compute and collective
                     segments
    Runner           several jobs, taking turns on this rank's device
    fuse             tiny jobs of one step become one program, where that is measured to be faster
    sweep            many trials of one training function, a few at a time
    Checkpoints      exact resume: a run that was killed goes on as if it had not been
    exchange         gradient exchanges as optax transformations
    tensor           layers of one model sharded over several ranks: 1-D, 2-D, 2.5-D
    ParameterServer  asynchronous and stale-synchronous training
    program          trace, cut, compile: the step as data
    data             ImageNet-format records, sharded, resumable, decoded once
    estimate         how much faster several jobs of a step would run, from a few steps of one
    plan             decisions before a run: which jobs share ranks, how they take turns, how much
                     compression
    report           what happened, as a table, JSON, a trace and a picture

Importing jaxcross starts neither MPI nor a device; `initialize` does.

Folders: a step is compiled by `step`, `program`, `wire`; a loop is run by `jobs`, `runtime`,
`interleave`. Below both are `world` and `health`. A step uses `exchange`, `tensor`, `server`; a run
uses `data`, `checkpoint`, `report`, `plan`. Tools are `commands` and `lab`. `_jax_compat` is the
only file with private names of JAX. Each folder lists its files.
"""

from typing import TYPE_CHECKING, Any

from jaxcross.errors import CutError, ExchangeError, InternalError, JobError

if TYPE_CHECKING:
    from jaxcross import exchange, plan, tensor
    from jaxcross.checkpoint import Checkpoints, load_checkpoint
    from jaxcross.interleave.policy import RoundRobin, Sequential, Weighted
    from jaxcross.jobs.plain_job import Job
    from jaxcross.jobs.plain_loop import run
    from jaxcross.jobs.runner import Runner
    from jaxcross.runtime.emulated_link import Link
    from jaxcross.server import ParameterServer
    from jaxcross.step.crossover import crossover
    from jaxcross.step.estimate import estimate
    from jaxcross.step.fuse import fuse
    from jaxcross.sweeps.sweep import sweep
    from jaxcross.world import World, current_world, initialize

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "CutError",
    "ExchangeError",
    "InternalError",
    "Job",
    "JobError",
    "Link",
    "ParameterServer",
    "RoundRobin",
    "Runner",
    "Sequential",
    "Weighted",
    "World",
    "crossover",
    "current_world",
    "estimate",
    "exchange",
    "fuse",
    "initialize",
    "load_checkpoint",
    "plan",
    "run",
    "sweep",
    "tensor",
]

_HOMES = {
    "Checkpoints": "checkpoint",
    "Job": "jobs.plain_job",
    "Link": "runtime.emulated_link",
    "ParameterServer": "server",
    "RoundRobin": "interleave.policy",
    "Runner": "jobs.runner",
    "Sequential": "interleave.policy",
    "Weighted": "interleave.policy",
    "World": "world",
    "crossover": "step.crossover",
    "current_world": "world",
    "estimate": "step.estimate",
    "fuse": "step.fuse",
    "initialize": "world",
    "load_checkpoint": "checkpoint",
    "run": "jobs.plain_loop",
    "sweep": "sweeps.sweep",
}


if not TYPE_CHECKING:  # a checker would take every misspelt name for one that this function knows

    def __getattr__(name: str) -> Any:
        """Loads a public name on first use, so that `jaxcross --help` need not wait for JAX."""
        from importlib import import_module

        if name in ("exchange", "plan", "tensor"):
            return import_module(f"jaxcross.{name}")
        if name in _HOMES:
            return getattr(import_module(f"jaxcross.{_HOMES[name]}"), name)
        raise AttributeError(f"module `jaxcross` has no attribute `{name}`")
