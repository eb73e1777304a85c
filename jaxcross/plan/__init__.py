"""Makes decisions ahead of a run, based on measurements of its jobs.

    machine_contention  how much computation and exchange slow each other down on a machine
    twin                predicts a run from that and from profiles of its jobs (step/profile.py):
                        the real interleaver on a virtual clock
    difference          explains where a run took longer than its prediction
    groups              which jobs share devices
    rates               into how many pieces to cut the jobs of a group, and which shares to give
                        them, so that none of them starves
    plan                the whole decision as data and as a table: groups, pieces, shares, predicted
                        speeds
    make_plan           `make` makes a plan from profiles
    profiled_cut        `cut` chooses the cut of a step that runs alone, based on its profiles
    jobs_file           the jobs of a plan, in a file that people write
    compression         the least compression that hides the exchanges of all jobs behind
                        computation
    speedup             how much faster equal jobs run alongside each other, from the cost of one
                        step

All of these decisions are based on profiles. A `Profile` says how long each segment (piece) of a
job's step takes when the job runs alone; it's defined in `step/profile`. Likewise, a `JobMemory`
says how much memory a job needs; it's defined in `jobs/memory`.

Plans can be made on any machine, since there's no need for ranks, a device or a `World`.
`compression` is the only module that imports JAX, because it has to trace a step from the shapes
and types of its arrays.
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use
from jaxcross.jobs import JobMemory
from jaxcross.plan.difference import Difference
from jaxcross.plan.machine_contention import MachineContention
from jaxcross.plan.make_plan import make, predict_group
from jaxcross.plan.plan import Plan, PlannedGroup, PlannedJob
from jaxcross.plan.profiled_cut import cut
from jaxcross.plan.twin import Prediction, predict
from jaxcross.step import Profile, ProfiledCut

if TYPE_CHECKING:  # modules that need JAX are imported on first use, so the rest runs without
    from jaxcross.plan.compression import Candidate, JobCost, choose_compression

    # for jaxcross's other folders; only those of `__all__` are public
    from jaxcross.plan.jobs_file import JobsFile, read_jobs
    from jaxcross.plan.machine_contention import TWO_CORES
    from jaxcross.plan.profiled_cut import Profiles, profiles_of_step
    from jaxcross.plan.speedup import Estimate, Gain, StepCost, estimate_of
else:
    __getattr__, *_ = on_first_use(__name__)

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


def __dir__() -> list[str]:
    return [*__all__]
