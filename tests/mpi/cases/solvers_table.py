"""Solvers whose operator exchanges, over MPI: what `vmap` gives, alone and in two jobs of one run."""

import jax
import numpy as np

import jaxcross
from jaxcross.testing import vmap_oracle
from tests.support.solvers import RTOL, STEPS, rows, weights

world = jaxcross.initialize()
args = [(weights(), rows(rank)) for rank in range(world.size)]


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def solves(job, name):
    step = jaxcross.crossover(STEPS[name], axes="batch")
    for _ in job.batches(range(3)):
        result = step(*args[world.rank])
    return result


alone = {}
for name, step in STEPS.items():
    alone[name] = jaxcross.crossover(step, axes="batch")(*args[world.rank])
    wanted = vmap_oracle(step, {"batch": world.size}, args)[world.rank]
    for a, b in zip(jax.tree.leaves(alone[name]), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * np.max(np.abs(b)), err_msg=name)
runner = jaxcross.Runner(world)
jobs = {name: runner.add(name, solves, name=name) for name in ("natural gradient", "by hand")}
runner.run()
assert all(same(job.state, alone[name]) for name, job in jobs.items()), "crossover is solo"
print(f"rank {world.rank}: solved", flush=True)
