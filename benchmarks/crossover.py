"""How much faster are several jobs in crossover than one after the other, on two hosts and a real slow link?

    python benchmarks/crossover.py [--rate 500mbit] [--json FILE] [--smoke]

Rivals alternate in one run, on the same two jobs, ranks, cores and link:
  fused       `jax.jit` of the whole step, gradients averaged leaf by leaf with mpi4jax; one job after the other
  sequential  jaxcross, one job after the other
  crossover   jaxcross, the jobs in turn

Starts the two hosts (network namespaces, a shaped link) and the ranks itself. Seconds are those of one job-step: wall
time over steps of all jobs. The states at the end of `sequential` and `crossover` must be equal to the bit.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import workloads
from hosts import on_hosts, parser_of_hosts
from workloads import spread, write_json

RIVALS = ("fused", "sequential", "crossover")


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.add_argument("--jobs", type=int, default=2, help="default %(default)s")
    options.add_argument("--steps", type=int, default=8, help="of each job, a repeat (default %(default)s)")
    options.add_argument("--repeats", type=int, default=3, help="default %(default)s")
    options.add_argument("--cut", default="whole", help="of jaxcross's steps (default %(default)s)")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result = on_hosts(__file__, args.rate)
    for rival in RIVALS:
        row = result["s_per_job_step"][rival]
        print(f"{rival:11} {row['median']:.3f} s a job-step  ({row['min']:.3f} to {max(row['raw']):.3f})")
    medians = {r: result["s_per_job_step"][r]["median"] for r in RIVALS}
    result["speedup_over_fused"] = medians["fused"] / medians["crossover"]
    result["speedup_over_sequential"] = medians["sequential"] / medians["crossover"]
    print(f"crossover over fused {result['speedup_over_fused']:.2f}x, over sequential "
          f"{result['speedup_over_sequential']:.2f}x; bound {result['bound_s_per_job_step']:.3f} s, "
          f"efficiency {result['efficiency']:.3f}; {result['bytes_crossed'] / 1e6:.0f} MB on the link")  # fmt: skip
    write_json(args.json, __doc__, result)
    return 0


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize()

    import jax
    import mpi4jax
    import numpy as np
    from jax import lax
    from mpi4py import MPI

    size = dict(batch_size=2, image_size=32, classes=8) if args.smoke else dict(batch_size=4, image_size=224)
    steps, repeats = (2, 1) if args.smoke else (args.steps, args.repeats)
    work = workloads.resnet("resnet8" if args.smoke else "resnet50", **size)
    comm = MPI.COMM_WORLD.Dup()

    def mpi_mean(tree: Any) -> Any:
        return jax.tree.map(lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=comm) / world.size, tree)

    cut = int(args.cut) if args.cut.isdigit() else args.cut
    fused = jax.jit(work.make(mpi_mean), donate_argnums=0)
    crossed = jaxcross.crossover(
        work.make(lambda tree: lax.pmean(tree, "batch")), axes="batch", cut=cut, donate_argnums=0
    )
    initial = [jax.tree.map(np.asarray, work.state(seed)) for seed in range(args.jobs)]
    batches = [work.batch(100 * world.rank + seed) for seed in range(args.jobs)]
    finals: dict[str, list[Any]] = {}
    accounts = []

    def fresh() -> list[Any]:
        return [jax.block_until_ready(jax.tree.map(jax.numpy.asarray, state)) for state in initial]

    def run_fused(steps: int) -> None:
        for state, batch in zip(fresh(), batches, strict=True):
            for _ in range(steps):
                state, metrics = fused(state, batch)
            jax.block_until_ready((state, metrics))

    def run_jaxcross(name: str, steps: int) -> None:
        policy = jaxcross.RoundRobin() if name == "crossover" else jaxcross.Sequential()
        jobs = [
            jaxcross.Job(f"job{n}", crossed, state, itertools.repeat(batch, steps))
            for n, (state, batch) in enumerate(zip(fresh(), batches, strict=True))
        ]
        report = jaxcross.run(jobs, policy=policy, world=world)
        finals[name] = [jax.tree.map(np.asarray, job.state) for job in jobs]
        if name == "crossover":
            accounts.append(report.summary())

    raw: dict[str, list[float]] = {rival: [] for rival in RIVALS}
    for repeat in range(-1, repeats):
        for rival in RIVALS:
            comm.Barrier()
            start = time.perf_counter()
            count = 2 if repeat < 0 else steps  # the first round compiles, and gets memory that later ones keep
            run_fused(count) if rival == "fused" else run_jaxcross(rival, count)
            comm.Barrier()
            if repeat >= 0:
                raw[rival].append((time.perf_counter() - start) / (steps * args.jobs))
            if world.rank == 0:
                print(f"repeat {repeat}: {rival} {(time.perf_counter() - start):.1f} s", flush=True)
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), finals["sequential"], finals["crossover"])
    if not all(jax.tree.leaves(same)):
        raise SystemExit("sequential and crossover end in different states")
    if world.rank == 0:
        account = accounts[-1]
        Path(args.worker).write_text(json.dumps({
            "jobs": args.jobs, "steps": steps, "ranks": world.size, **size, "cut": args.cut,
            "s_per_job_step": {name: spread(values) for name, values in raw.items()},
            "bound_s_per_job_step": account["bound_s"] / args.jobs, "efficiency": account["efficiency"],
            "hidden_share": account["hidden_share"], "account": account, "equal_to_the_bit": True,
        }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
