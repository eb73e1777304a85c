"""Compares named steps of `shard_map_table` on four ranks with four XLA devices of rank 0."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
from mpi4py import MPI

import jaxcross
from tests.support.shard_map_table import AXES, assert_part, cases, mapped, parts, wanted

world = jaxcross.initialize(stall_timeout_s=60)
rows = cases(sys.argv[1:])
want = {what: wanted(row, check) for what, row, check in rows} if world.rank == 0 else None
want = MPI.COMM_WORLD.bcast(want)
mesh = jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES))
for what, row, check in rows:
    step = jaxcross.crossover(jax.jit(mapped(row, check, mesh)), axes=AXES)
    assert_part(step(*parts(row.args, row.in_specs, world.rank)), want[what], row, world.rank, what)
print(f"rank {world.rank}: {len(rows)} hold", flush=True)
