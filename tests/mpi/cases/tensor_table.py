"""The model of `tensor_case` on every mesh of four ranks: against `vmap`, which `tests/cpu` holds against the serial
model, and two jobs in crossover against each alone.

Prints `rank R: tensor done` if all meshes hold. Each mesh's oracle, which holds all ranks, is computed by one of them.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI
from tensor_case import Training, batch
from zoo import assert_close

import jaxcross
from jaxcross import tensor
from jaxcross.tensor import Mesh

STEPS = 2
world = jaxcross.initialize(watchdog_s=60)
rank = world.rank
MESHES = {
    "[2,2,1]": Mesh(side=2),
    "1-D on 4": Mesh(tensor=4),
    "[1,1,4]": Mesh(depth=4),
    "data 2 x 1-D on 2": Mesh(data=2, tensor=2),
}


def loop(job, step, training):
    state = training.state(rank)
    for n in range(STEPS):
        state, metrics = step(state, training.mesh.local_batch(batch(n), rank))
    return state, metrics


def same_bits(a, b, what):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), f"{what}{jax.tree_util.keystr(path)}"


def oracles():
    """Name of a mesh -> every rank's last state and its metrics, under `vmap`."""
    mine = {}
    for name in list(MESHES)[rank :: world.size]:
        states, told = Training(MESHES[name], layers=1).run(STEPS)
        mine[name] = jax.tree.map(np.asarray, list(zip(states, told[-1], strict=True)))
    return {name: ranks for part in MPI.COMM_WORLD.allgather(mine) for name, ranks in part.items()}


told = oracles()
for name, mesh in MESHES.items():
    print(f"rank {rank}: {name}", file=sys.stderr, flush=True)
    mesh.check_ranks(world.size)
    training = Training(mesh, layers=1)
    step = jaxcross.crossover(training.step, axes=mesh.axes)
    alone = loop(None, step, training)
    assert_close(alone, told[name][rank], 5e-5, f"{name} against vmap")

    gathered = jaxcross.crossover(functools.partial(tensor.gather, specs=training.specs, mesh=mesh), axes=mesh.axes)
    if mesh.inner:  # what nobody cuts, nobody gathers
        whole = tensor.unshard([params for (params, _), _ in told[name]], training.specs, mesh)
        assert_close(gathered(alone[0][0]), whole, 5e-5, f"{name}, gathered")

    spread = functools.partial(tensor.replica_spread, specs=training.specs, mesh=mesh)
    tensor.check_replicas(jaxcross.crossover(spread, axes=mesh.axes)(alone[0][0]))

    with jaxcross.Runner(world) as runner:
        jobs = [runner.add(f"{name} {n}", loop, step=step, training=training) for n in range(2)]
        runner.run()
    for job in jobs:
        same_bits(job.state, alone, f"{name}, job {job.name}")

grid = Training(Mesh(side=2))
broken = grid.params(rank)
if rank == 3:
    broken["last"]["scale"] = broken["last"]["scale"] + jnp.float32(0.5)
spread = functools.partial(tensor.replica_spread, specs=grid.specs, mesh=grid.mesh)
try:
    tensor.check_replicas(jaxcross.crossover(spread, axes=grid.mesh.axes)(broken))
except ValueError as error:
    assert "up to 0.5 apart" in str(error), error
else:
    raise AssertionError("unequal copies were not seen")
print(f"rank {rank}: tensor done", flush=True)
