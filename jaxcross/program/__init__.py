"""Represents a train step as data: traces it, cuts it into segments and compiles them.

Nothing in this folder depends on MPI: the *wire*, which makes the exchanges, is passed in from
outside, and is only ever used through its interface (`ir.Wire`). Apart from `jaxcross.errors` and a
few private helpers, these modules don't import anything from the rest of the package.

stages             the stages of a step as users see them: `Traced`, `cut` and `compile`
trace              traces a step and its arguments into a flat jaxpr; `flatten` inlines, splits and
                   unrolls the equations that contain exchanges, and all of these passes write their
                   equations into an `emitter`
cut                cuts a flat jaxpr into a program: decides how many segments there are (`cut=`),
                   and which equation goes where; `assemble` builds the segments and packs small
                   exchanges; `carried` finds exchanges that need nothing but the step's inputs
ir                 defines a program: its segments, exchanges and values, and the interface `Wire`;
                   `text` parses a printed program, and `verify` checks one
order              which segments must run before each segment, and which values it may overwrite
compile            compiles a program to XLA executables, which segments with equal keys share
                   (`digest`); `lowered` is what a wire turns a collective segment into
execution          one step in flight
hand_over          copies arrays from the accelerator to the host's CPU device, and back
host_work          if there's an accelerator, decides which work between two exchanges stays on the
                   host

conditional        handles conditionals that contain exchanges: either the host decides them, or
                   they're split; `decision` counts how many ranks took each branch
lockstep           handles loops that contain exchanges and might need a different number of
                   iterations on each rank; `equality` proves that values are equal on all ranks
exchange_labels    identifies the exchanges of a step, so that ranks can compare their order;
                   `value_marks` marks each value by what it's computed from and what reads it
mismatch           the error texts for ranks that are about to make different exchanges
mpi4jax_lists      checks whether the ranks' lists of mpi4jax calls match up; `mpi4jax_unit` puts
                   these calls into one segment
nonfinite          finds exchanged values that aren't finite (`interleave/vote.py` then decides for
                   all ranks whether to skip the step)
op_cost            which operations are cheap, and which values are cheaper to recompute than to
                   keep
graph              which equation computes each variable, and which equations read it;
                   `jaxpr_utils` answers simple questions about a jaxpr
wire_types         exchanges random keys and small integers as types that MPI supports
shared_buffers     packs many arrays into a single buffer and unpacks them again
shard_map_step     traces a step that is a `jax.shard_map`
step_checks        checks what is passed to `crossover`; copies arguments that share a buffer
suspect_exchanges  finds exchanges that are legal but probably mistakes, such as means of means
"""

from typing import TYPE_CHECKING

from jaxcross._lazy import on_first_use

if TYPE_CHECKING:  # what jaxcross's other folders use
    from jaxcross.program import mpi4jax_lists, shared_buffers, stages
    from jaxcross.program.compile import ExecutableCache, SingleFlightCache
    from jaxcross.program.conditional import Predicate
    from jaxcross.program.cut import BUCKET_BYTES, Cut, checked_bytes, checked_cut
    from jaxcross.program.digest import program_digest
    from jaxcross.program.exchange_labels import describe, find_swapped, label_text, order_of
    from jaxcross.program.execution import Compiled, Execution
    from jaxcross.program.ir import (
        Aval,
        Exchange,
        Program,
        Segment,
        hash_62,
        human_bytes,
        without_sources,
    )
    from jaxcross.program.jaxpr_utils import holds
    from jaxcross.program.lowered import Lowered, Traceable, compile_with_arguments, struct_of
    from jaxcross.program.mismatch import (
        BARRIER_REMEDY,
        branch_call_mismatch,
        order_mismatch,
        signature_mismatch,
        step_mismatch,
        without_calls,
    )
    from jaxcross.program.nonfinite import NonFinite, is_finite, refuse_to_skip
    from jaxcross.program.step_checks import check_step, copy_shared
    from jaxcross.program.suspect_exchanges import (
        means_of_means,
        own_derivatives,
        repeated_exchanges,
        repeated_sums,
    )
    from jaxcross.program.trace import Traced, check_arrays, step_name
else:  # otherwise a type checker would accept any misspelt name, because of `__getattr__`
    __getattr__, __dir__, __all__ = on_first_use(__name__)
