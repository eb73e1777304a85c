"""Represents a train step as data: traces it, cuts it into segments and compiles them.

The modules don't depend on MPI. Of the rest of the package, they use only `jaxcross.errors` and a
few private helper modules.

stages             `Traced`, `cut` and `compile` as users see them
trace              a step and its arguments -> a flat jaxpr; `flatten` inlines, splits and unrolls
                   the equations that hold exchanges; every pass emits its equations into an
                   `emitter`
cut                a flat jaxpr -> a program: which equation runs in which segment; `assemble`
                   builds the segments, `carried` finds exchanges that need only what the last step
                   left
ir                 the program: segments, exchanges, values, and the interface `Wire`; `text` prints
                   and parses it, `verify` checks it
order              which segments must run before each segment, and which values it may overwrite
compile            a program -> XLA executables, shared by segments of equal `digest`; `lowered`:
                   what a wire turns a collective segment into
execution          one step in flight
hand_over          copies arrays from the accelerator to the host's CPU device, and back
host_work          which work between two exchanges stays on the host if there is an accelerator

conditional        conditionals that exchange: decided by the host or split; `decision` counts the
                   ranks per branch
lockstep           loops that exchange and whose number of iterations differs between ranks;
                   `equality` proves values identical across ranks
exchange_labels    identifies each exchange of a step, so that ranks can compare their order;
                   `value_marks` follows each value to what it's computed from and what reads it
mismatch           the error texts for ranks that are about to make different exchanges
mpi4jax_lists      mpi4jax's own calls: whether the ranks' lists of them match up; `mpi4jax_unit`:
                   the one segment that they form
nonfinite          finds exchanged values that aren't finite, and applies a job's policy to them
op_cost            which equations are cheap, and which values are cheaper to recompute than to keep
graph              which equation makes each variable, and which ones read it; `jaxpr_utils` answers
                   simple questions about a jaxpr
wire_types         random keys and small integers as types that MPI has
shared_buffers     packs many arrays into one buffer and takes them out again
shard_map_step     a step that is a `jax.shard_map`
step_checks        checks what is passed to `crossover`; copies arguments that share a buffer
suspect_exchanges  exchanges that are legal but probably mistakes, such as means of means
"""
