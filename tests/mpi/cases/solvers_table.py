"""Compares solvers whose operator exchanges with `vmap`, alone and in two jobs of one run.

Runs all of them, or those named on the command line.
"""

import sys

import jax
import numpy as np
from mpi4py import MPI

import jaxcross
from jaxcross.testing import vmap_oracle
from tests.support.solvers import RTOL, STEPS, rows, weights

world = jaxcross.initialize()
chosen = {name: step for name, step in STEPS.items() if name in (sys.argv[1:] or STEPS)}
assert {*sys.argv[1:]} <= chosen.keys(), "no such rows"
args = [(weights(), rows(rank)) for rank in range(world.size)]


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def solves(job, name):
    step = jaxcross.crossover(STEPS[name], axes="batch")
    for _ in job.batches(range(3)):
        result = step(*args[world.rank])
    return result


# Each oracle covers all ranks, so only one rank has to compile it.
mine = {
    name: [
        jax.tree.map(np.asarray, jax.tree.leaves(result))
        for result in vmap_oracle(step, {"batch": world.size}, args)
    ]
    for step_number, (name, step) in enumerate(chosen.items())
    if step_number % world.size == world.rank
}
wanted = {
    name: results[world.rank]
    for part in MPI.COMM_WORLD.allgather(mine)
    for name, results in part.items()
}
alone = {}
for name, step in chosen.items():
    alone[name] = jaxcross.crossover(step, axes="batch")(*args[world.rank])
    for a, b in zip(jax.tree.leaves(alone[name]), wanted[name], strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * np.max(np.abs(b)), err_msg=name)
runner = jaxcross.Runner(world)
jobs = {name: runner.add(name, solves, {"name": name}) for name in ("natural gradient", "by hand")}
runner.run()
assert all(same(job.state, alone[name]) for name, job in jobs.items()), "crossover is solo"
print(f"rank {world.rank}: solved", flush=True)
