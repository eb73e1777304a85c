"""Decisions about a run before it starts, from what was measured of its jobs.

    profile       what one step of a job takes, segment by segment, alone
    contention    how much computations and exchanges slow each other down on a machine
    twin          a run predicted from these: the real interleaver on a virtual clock
    difference    where a run took longer than its prediction
    memory        how many bytes jobs need together, and how many a rank may use
    groups        which jobs share devices
    rates         in how many pieces and at which shares the jobs of a group run, so that none
                  starves
    plan          the whole decision as data: groups, pieces, shares, predicted speeds (`table`
                  prints it)
    make_plan     `make` makes a plan from profiles
    profiled_cut  `cut` chooses the cut of a step that runs alone, from its profiles
    jobs_file     the jobs of a plan, as a person writes them down (`bounded` reads files of a
                  limited size)
    compression   the least compression with which the exchanges of all jobs hide behind computation
    estimate      how much faster equal jobs run next to each other, from the cost of one step
                  (`step_cost`)

A plan needs no ranks, no device and no `World`. Only `compression` knows arrays: it traces steps by
their types.
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use
from jaxcross.plan.contention import MachineContention
from jaxcross.plan.difference import Difference
from jaxcross.plan.make_plan import make, predict_group
from jaxcross.plan.memory import JobMemory
from jaxcross.plan.plan import Plan, PlannedGroup, PlannedJob
from jaxcross.plan.profile import Profile
from jaxcross.plan.profiled_cut import ProfiledCut, cut
from jaxcross.plan.twin import Prediction, predict

if TYPE_CHECKING:
    from jaxcross.plan.compression import Candidate, JobCost, choose_compression
    from jaxcross.plan.estimate import Estimate, Gain
    from jaxcross.plan.step_cost import StepCost

__all__ = [
    "Candidate",
    "Difference",
    "Estimate",
    "Gain",
    "JobCost",
    "JobMemory",
    "MachineContention",
    "Plan",
    "PlannedGroup",
    "PlannedJob",
    "Prediction",
    "Profile",
    "ProfiledCut",
    "StepCost",
    "choose_compression",
    "cut",
    "make",
    "predict",
    "predict_group",
]

if not TYPE_CHECKING:  # what knows arrays is imported on first use: the rest runs without JAX
    __getattr__, *_ = on_first_use(__name__)


def __dir__() -> list[str]:
    return [*__all__]
