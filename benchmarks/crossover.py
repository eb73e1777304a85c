"""What does crossover gain with parameter servers, or with what `choose_compression` chooses?

    python benchmarks/crossover.py [--rate 500mbit] [--json FILE] [--smoke]

We train two ResNet-50 jobs on two hosts with a real slow link, one after the other and in
crossover. In one run, we do this with each of these exchanges:
  mean                `lax.pmean` of the gradients
  sharded_optimizer   each rank updates its shard of the parameters: reduce-scatter, update,
                      all-gather
  ParameterServer     real servers, driven by the host in a separate lane; each worker waits for all
                      others
  choose_compression  whatever `choose_compression(1.0, ...)` chooses if it's given the report of
                      the `mean` jobs that ran one after the other
The script itself starts the ranks and the two hosts, which are network namespaces with a shaped
link. Seconds are per job-step, i.e. the wall time divided by the number of steps of all jobs. The
final states must be the same in both orders, bit for bit.

c and m are the seconds per step that a job computes and exchanges. They come from the jobs that ran
one after the other. bound is max(sum c, sum m, max(c + m)) over the jobs, per job-step. This
benchmark compares jaxcross only with itself; for a comparison with other tools, see race.py.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import workloads
from hosts import on_hosts, parser_of_hosts
from workloads import spread, write_json

EXCHANGES = ("mean", "sharded_optimizer", "ParameterServer", "choose_compression")
ORDERS = ("sequential", "crossover")
JOBS = 2


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.add_argument(
        "--steps", type=int, default=8, help="steps per job and repeat (default %(default)s)"
    )
    options.add_argument("--repeats", type=int, default=3, help="default %(default)s")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result = on_hosts(__file__, args.rate)
    print("\n".join(result["why"]))
    for row in result["rows"]:
        sequential, crossover = (row[order]["median"] for order in ORDERS)
        print(
            f"{row['exchange']:18} sum m / sum c {row['ratio']:.2f}; {sequential:.3f} s a job-step "
            f"one by one, {crossover:.3f} in turn: {row['speedup']:.2f} times as fast, bound / T "
            f"{row['efficiency']:.2f}"
        )
    write_json(args.json, __doc__, result)
    return 0


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize()

    import jax
    import numpy as np
    import optax
    from jax import lax

    from jaxcross.plan import JobCost, choose_compression

    name, size = "resnet50", dict[str, Any](batch_size=4, image_size=224)
    if args.smoke:
        name, size = (
            "resnet8",
            dict[str, Any](batch_size=2, image_size=32, classes=8, stage_sizes=[1]),
        )
    steps, repeats = (2, 1) if args.smoke else (args.steps, args.repeats)
    plain = workloads.resnet(name, **size)
    assert plain.gradients is not None
    gradients = jax.jit(plain.gradients)
    batches = [plain.batch(100 * world.rank + job) for job in range(JOBS)]
    initial = [
        jax.tree.map(np.asarray, plain.state(job)[:2]) for job in range(JOBS)
    ]  # parameters, statistics
    policies = {"sequential": jaxcross.Sequential, "crossover": jaxcross.RoundRobin}
    why: list[str] = []

    def mean_of_all(values: Any) -> Any:
        return lax.pmean(values, "batch")

    def mean_of_loss(values: Any) -> Any:
        return values[0], lax.pmean(values[1], "batch")  # the optimizer exchanges the gradients

    def in_the_step(exchange: Any, optimizers: list[Any]) -> Any:
        step_of = {
            tx: jaxcross.crossover(
                workloads.resnet(name, **size, tx=tx).make(exchange), axes="batch", donate_argnums=0
            )
            for tx in optimizers
        }

        def train(job: Any, number: int, steps: int) -> Any:
            params, stats = jax.tree.map(jax.numpy.asarray, initial[number])
            state = job.restore((params, stats, optimizers[number].init(params)))
            for batch in job.batches(itertools.repeat(batches[number], steps)):
                state, metrics = step_of[optimizers[number]](state, batch)
                job.log(metrics)
            return state

        return train

    def through_servers(job: Any, number: int, steps: int) -> Any:
        params, stats = jax.tree.map(jax.numpy.asarray, initial[number])
        with jaxcross.ParameterServer(params, workloads.momentum(), staleness=0) as server:
            for _ in range(steps):
                (loss, stats), grads = gradients(server.params, stats, batches[number])
                server.push_pull(grads)
                job.log({"loss": loss})
            return server.params, stats

    def run(train: Any, order: str, steps: int) -> tuple[float, Any, list[Any]]:
        """Returns the seconds per job-step, the report, and the final states."""
        world.control.allgather_text("")
        start = time.perf_counter()
        with jaxcross.Runner(world, policies[order]()) as runner:
            jobs = [
                runner.add(f"job{n}", train, {"number": n, "steps": steps}) for n in range(JOBS)
            ]
            report = runner.run()
        world.control.allgather_text("")
        took_s = (time.perf_counter() - start) / (steps * JOBS)
        return took_s, report, [jax.tree.map(np.asarray, job.state) for job in jobs]

    shared = workloads.momentum()
    served = jaxcross.exchange.sharded_optimizer(workloads.momentum(), "batch", ranks=world.size)
    trains = {
        "mean": in_the_step(mean_of_all, [shared] * JOBS),
        "sharded_optimizer": in_the_step(mean_of_loss, [served] * JOBS),
        "ParameterServer": through_servers,
    }
    # The first run compiles and allocates memory that later runs reuse.
    for train in trains.values():
        run(train, "crossover", 2)
    costs = [
        JobCost(
            name=j.facts.name, compute_s=j.compute_s, exchange_s=j.exchange_s, params=initial[0][0]
        )
        for j in run(trains["mean"], "sequential", steps)[1].rounds.jobs
    ]
    chosen = choose_compression(1.0, costs, "batch", ranks=world.size, log=why.append)
    trains["choose_compression"] = in_the_step(
        mean_of_loss, [optax.chain(tx, workloads.momentum()) for tx in chosen]
    )
    run(trains["choose_compression"], "crossover", 2)

    raw: dict[str, dict[str, list[float]]] = {e: {order: [] for order in ORDERS} for e in EXCHANGES}
    measured: dict[str, list[Any]] = {e: [] for e in EXCHANGES}
    for repeat, exchange in itertools.product(range(repeats), EXCHANGES):
        finals = {}
        for order in ORDERS:
            took_s, report, finals[order] = run(trains[exchange], order, steps)
            raw[exchange][order].append(took_s)
            if order == "sequential":
                measured[exchange].append([(j.compute_s, j.exchange_s) for j in report.rounds.jobs])
            if world.rank == 0:
                print(
                    f"repeat {repeat}: {exchange}, {order}: {took_s:.3f} s a job-step", flush=True
                )
        same = jax.tree.map(
            lambda a, b: a.tobytes() == b.tobytes(), finals["sequential"], finals["crossover"]
        )
        if not all(jax.tree.leaves(same)):
            raise SystemExit(f"{exchange}: one after the other and in turn end in different states")
    if world.rank == 0:
        rows = [row_of(exchange, raw[exchange], measured[exchange]) for exchange in EXCHANGES]
        facts = {
            "model": name,
            "jobs": JOBS,
            "steps": steps,
            "repeats": repeats,
            "ranks": world.size,
            **size,
        }
        Path(args.worker).write_text(
            json.dumps({**facts, "why": why, "rows": rows, "equal_to_the_bit": True})
        )
    return 0


def row_of(
    exchange: str, raw: dict[str, list[float]], measured: list[list[tuple[float, float]]]
) -> dict[str, Any]:
    """Returns what both orders took, and what the jobs' c and m leave to gain.

    All numbers are medians over the repeats. Pure.
    """
    jobs = [
        [statistics.median(values) for values in zip(*job, strict=True)]
        for job in zip(*measured, strict=True)
    ]
    c_s, m_s = (sum(values) / len(jobs) for values in zip(*jobs, strict=True))
    bound_s = max(c_s, m_s, max(c + m for c, m in jobs) / len(jobs))
    sequential, crossover = (spread(raw[order]) for order in ORDERS)
    return {
        "exchange": exchange,
        "sequential": sequential,
        "crossover": crossover,
        "c_s": c_s,
        "m_s": m_s,
        "ratio": m_s / c_s,
        "bound_s": bound_s,
        "speedup": sequential["median"] / crossover["median"],
        "efficiency": bound_s / crossover["median"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
