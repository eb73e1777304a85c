"""A train step, wrapped by `crossover`.

step                `crossover`, and the `Step` that it returns: arguments in, results out
signature           the arguments of a call: static ones bound, types compared
variant             a step for one set of argument types: its trace, its programs, their
                    executables; `StepRecord`: state that all variants of a step share
prepare             a variant's executables for a job or a standalone step: agreed by all ranks,
                    cut, compiled
exchange_agreement  a check that all ranks are about to make the same exchanges in the same order
mpi4jax_agreement   the same for programs that call mpi4jax, whose calls may differ by rank
advice              warnings about steps that are legal but probably not what was meant
cut_tuner           `cut="auto"` of a step that runs alone: tries cuts and keeps the fastest;
                    alongside other jobs, program/cut.py chooses
cut_budget          how much time the search for a cut may take
timed_trial         one step on copies of its arguments, timed as a whole or by segment
profile             a step's seconds per segment, as a record that plans are made from
commit_flag         `nonfinite="skip"`: a step that leaves its state unchanged if the vote says so
nnx                 steps that change Flax NNX objects in place
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
