"""Rival: JAX's own data parallelism, i.e. the same step under `jax.shard_map`, over gloo.

Each process runs one job.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rivals import jax_work
from rivals.cases import RANKS, WARM_UP
from rivals.serving import arguments, own_jobs, serve

AXIS = "batch"


def main() -> int:
    args = arguments(__doc__)
    ((number, spec),) = own_jobs(args)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"h0:{args.port}", num_processes=RANKS, process_id=args.rank)
    compilations = jax_work.Compilations()
    work = jax_work.workload(spec)
    mesh = Mesh(jax.devices(), (AXIS,))
    everywhere, split = PartitionSpec(), PartitionSpec(AXIS)
    # `check_vma=False`, because each rank keeps its own BatchNorm statistics, as with the other
    # rivals, although `out_specs` claims that they're identical.
    mapped = jax.shard_map(
        work.make(lambda tree: lax.pmean(tree, AXIS)), mesh=mesh, in_specs=(everywhere, split),
        out_specs=everywhere, check_vma=False,
    )  # fmt: skip
    step = jax.jit(mapped, donate_argnums=0)
    alone = jax.jit(work.make(lambda tree: tree), donate_argnums=0)

    def place(tree: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, jax.device_get(x)), tree
        )

    def whole(x: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            x.shape, NamedSharding(mesh, everywhere), [x]
        )

    state = place(jax_work.state_of(work, number), everywhere)
    loop = jax_work.Loop(step, state, place(jax_work.batch_of(work, number, args.rank), split))

    def prepare(variant: str) -> dict[str, Any]:
        loop.run(WARM_UP)
        return compilations.facts()

    def run(steps: int, variant: str) -> None:
        loop.run(steps)

    def compute(job: int, steps: int) -> dict[str, Any]:
        # As with the other rivals, we compute with the job's own state and with memory that has
        # been touched before.
        own = jax.tree.map(lambda x: x.addressable_data(0), (loop.state, loop.batch))
        loop.state = None  # the first step donates it
        computing = jax_work.Loop(alone, *own)
        computing.run(1)
        raw = computing.timed(steps)
        loop.state = jax.tree.map(whole, computing.state)
        return {"raw": raw}

    return serve(args, args.rank, {"prepare": prepare, "run": run, "compute": compute})


if __name__ == "__main__":
    raise SystemExit(main())
