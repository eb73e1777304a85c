"""A train step, wrapped by `crossover`.

crossover        the decorator, and the step that it returns: arguments in, results out
variant          a step for one set of argument types: its program, agreed by all ranks, and its executables
exchange_order   an error where ranks make the same exchanges in another order
unit_agreement   the same for programs that call mpi4jax, whose calls may differ by rank
cut_tuner        `cut="auto"`: tries cuts and keeps the fastest; `cut_budget` says for how long
timed_trial      one step on copies of its arguments, for the tuner
skip_nonfinite   `nonfinite="skip"`: a step that leaves its state as it was
nnx              steps that change Flax NNX objects in place
"""
