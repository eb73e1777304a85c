"""Train steps wrapped by `crossover`.

step                `crossover` and the `Step` it returns, which runs the function's steps
signature           binds a call's static arguments and compares the types of the others
variant             a step traced for one set of argument types, with its programs and executables;
                    `StepRecord` is the state shared by all variants of a step
prepare             gets a variant's executables for a job or a standalone step: lets the ranks
                    agree, cuts, compiles
exchange_agreement  checks that all ranks are about to perform the same exchanges in order
mpi4jax_agreement   the same for programs that call mpi4jax, where calls may differ by rank
advice              warns about steps that are legal but probably not what the user meant
cut_tuner           `cut="auto"` for a step that runs alone: times several cuts and keeps the
                    fastest (alongside other jobs, program/cut.py chooses the cut)
cut_budget          limits how long this search may take
timed_trial         times a step on copies of its arguments, as a whole or by segment
profile             how long each segment of a step takes, as a basis for plans
commit_flag         `nonfinite="skip"`: a step that keeps its old state if the ranks vote to skip it
nnx                 steps that update Flax NNX objects in place
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.step import nnx
    from jaxcross.step.exchange_agreement import agree_once
    from jaxcross.step.profile import Profile, ProfiledCut, segment_times
    from jaxcross.step.step import Axes, Step, crossover
    from jaxcross.step.timed_trial import gather_failures, summary, time_segments
    from jaxcross.step.variant import StepRecord, Variant, check_profiles
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
