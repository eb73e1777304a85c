"""A train step as data. Knows neither MPI nor who runs it.

trace          a step and its arguments -> a flat jaxpr; `flatten` splits and unrolls what holds exchanges
cut            a flat jaxpr -> a program: which equation runs in which segment; `assemble` builds the segments
ir             the program: segments, exchanges, values; `text` prints and reads it, `verify` checks it
compile        a program -> XLA executables, shared by like segments (`digest`)
execution      one step in flight

conditional    conditionals that exchange, split or decided by the host; `decision` counts who takes which branch
lockstep       loops that exchange and may end after another number of iterations on each rank; `equality` knows which
labels         what each exchange is of, so that ranks can compare their order; `provenance`, `parts`
mismatch       the error where ranks are about to make different exchanges
rank_lists     mpi4jax's own calls: whether the ranks' lists fit together; `unit`
nonfinite      which exchange made the first value that is not finite
op_cost        which equations are light, and which values cheaper to make twice than to keep
graph          who makes and who reads each variable; `jaxpr_utils` asks simple questions of a jaxpr
carried        random keys and small integers as what MPI can carry; `buffers`: many arrays in one
shard_map      a step that is a `jax.shard_map`; `solver`: linear solvers whose operator exchanges
accepted       what `crossover` takes as a step; `bound`: an executable whose constants are fixed
unshared       arguments that share a buffer, which XLA refuses to take twice
mini_steps     exchanges that `optax.MultiSteps` makes for nothing
"""
