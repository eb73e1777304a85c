"""Rival: the whole step under plain `jax.jit`, with one mpi4jax all-reduce per gradient leaf.

Each process runs one job, and each job has its own MPI world. The program also measures c, i.e. the
same step without its exchange.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import mpi4jax
from mpi4py import MPI

from rivals import jax_work
from rivals.cases import WARM_UP
from rivals.serving import arguments, own_jobs, serve


def main() -> int:
    args = arguments(__doc__)
    ((number, spec),) = own_jobs(args)
    comm = MPI.COMM_WORLD.Dup()
    compilations = jax_work.Compilations()
    work = jax_work.workload(spec)

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm) / comm.size, tree)

    exchanging = jax.jit(work.make(mean), donate_argnums=0)
    alone = jax.jit(work.make(lambda tree: tree), donate_argnums=0)
    loop = jax_work.Loop(
        exchanging, jax_work.state_of(work, number), jax_work.batch_of(work, number, comm.rank)
    )

    def prepare(variant: str) -> dict[str, Any]:
        loop.run(WARM_UP)
        return compilations.facts()

    def run(steps: int, variant: str) -> None:
        loop.run(steps)

    def compute(job: int, steps: int) -> dict[str, Any]:
        loop.step = alone
        try:
            loop.run(1)
            comm.Barrier()
            return {"raw": loop.timed(steps)}
        finally:
            loop.step = exchanging

    return serve(args, comm.rank, {"prepare": prepare, "run": run, "compute": compute})


if __name__ == "__main__":
    raise SystemExit(main())
