"""Decisions about a run before it starts, from what was measured of its jobs.

    profile       what one step of a job takes, segment by segment, alone
    contention    how much computations and exchanges slow each other down on a machine
    twin          a run predicted from these: the real interleaver on a virtual clock
    groups        which jobs share devices
    compression   the least compression with which the exchanges of all jobs hide behind computation

A plan needs no ranks, no device and no `World`. Only `compression` knows arrays: it traces steps by their types.
"""

from typing import TYPE_CHECKING, Any

from jaxcross.plan.contention import MachineContention
from jaxcross.plan.groups import Grouping, Load, group
from jaxcross.plan.profile import Profile
from jaxcross.plan.twin import Prediction, predict

if TYPE_CHECKING:
    from jaxcross.plan.compression import Candidate, JobCost, choose_compression

__all__ = [
    "Candidate",
    "Grouping",
    "JobCost",
    "Load",
    "MachineContention",
    "Prediction",
    "Profile",
    "choose_compression",
    "group",
    "predict",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Loads what knows arrays on first use: the rest runs without JAX."""
        if name in ("Candidate", "JobCost", "choose_compression"):
            from importlib import import_module

            return getattr(import_module("jaxcross.plan.compression"), name)
        raise AttributeError(f"module `jaxcross.plan` has no attribute `{name}`")
