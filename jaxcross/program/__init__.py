"""A train step as data. Knows neither MPI nor the rest of the package.

stages           `Traced.cut`, `cut` and `compile` as users see them; the only file that knows all
                 passes
trace            a step and its arguments -> a flat jaxpr; `flatten` splits and unrolls equations
                 that hold exchanges, each pass emits into an `emitter`
cut              a flat jaxpr -> a program: which equation runs in which segment; `assemble` builds
                 the segments, `carried` finds exchanges of what the step before has left
ir               the program: segments, exchanges, values; `text` prints and reads it, `verify`
                 checks it; the interface `Wire`
order            which segments must have run before each, and which values each may overwrite
compile          a program -> XLA executables, shared by segments of equal `digest`; `lowered`: what
                 a wire makes of a collective segment
execution        one step in flight
hand_over        arrays from the accelerator to the host's CPU device, and back
host_work        which work between two exchanges stays on the host of an accelerator

conditional      conditionals that exchange, split or decided by the host; `decision` counts ranks
                 per branch
lockstep         loops that exchange with a different number of iterations on each rank; `equality`
                 proves numbers equal
labels           identifies each exchange of a step, so that ranks can compare their order;
                 `provenance`, `array_parts`
mismatch         the error texts for ranks that are about to make different exchanges
rank_lists       mpi4jax's own calls: whether the ranks' lists fit together; `unit`
nonfinite        which exchange made the first value that is not finite
op_cost          which equations are cheap, and which values are cheaper to recompute than to keep
graph            the maker and the readers of each variable; `jaxpr_utils` answers simple questions
                 about a jaxpr
wire_types       random keys and small integers as types that MPI has; `buffers`: many arrays in one
shard_map        a step that is a `jax.shard_map`; `solver`: linear solvers whose operator exchanges
step_checks      checks what `crossover` is given
aliasing         arguments that share a buffer, which XLA refuses to take twice
mini_steps       exchanges that `optax.MultiSteps` makes for nothing; `repeated_sums`: those that
                 micro-batches repeat
mean_of_means    losses that are divided by a rank's own count; `own_derivatives`: optimizers that
                 differentiate
"""
