"""What does an exchange cost the link and the core, and would a second exchange lane fill the link better?

    python benchmarks/exchange_cost.py [--rate 500mbit] [--repeats 5] [--json FILE] [--smoke]

ResNet-50's 161 gradients, all-reduced leaf by leaf as one program, on two hosts with one core each and a real link:
  alone        one exchange, nothing beside it
  at once      two exchanges, each in a thread and with communicators of its own, as two lanes would make them
  beside       exchanges beside ResNet-50's computation on the same core
  computation  the same step without exchange, alone and beside exchanges

Rivals alternate in one run. fill: bytes on the wire over what the link carries in that time, as plain TCP measures it.
tax: the core's seconds an exchange takes from the computation: its thread's CPU time, and the kernel's for packets. The
MPI is that of the environment; run it once in each.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import workloads
from hosts import on_hosts, parser_of_hosts
from rivals.serving import softirq_s
from workloads import spread, write_json

AXES = {"batch": 2}


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result = on_hosts(__file__, args.rate)
    there = min(result["tcp_bits_per_s"])
    for name in ("alone", "at once", "beside"):
        row = result["exchange"][name]
        row["fill"] = 8 * result["bytes"] / there / row["s"]["median"]
        print(f"exchange {name:8} {row['s']['median']:.3f} s, {row['cpu_s']['median']:.3f} s of its thread's CPU, "
              f"{row['softirq_s']['median']:.3f} s of the kernel's; fills {row['fill']:.1%} of the link")  # fmt: skip
    for name, row in result["computation_s"].items():
        print(f"computation {name:16} {row['median']:.3f} s")
    beside = result["exchange"]["beside"]
    result["tax_s"] = beside["cpu_s"]["median"] + beside["softirq_s"]["median"]
    print(f"{result['mpi']}: tax of an exchange {result['tax_s']:.3f} s")
    write_json(args.json, __doc__, result)
    return 0


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize(lanes=2, watchdog_s=300)

    import jax
    import jax.numpy as jnp
    from jax import lax

    from jaxcross.wire import MpiWire
    from jaxcross.world.slices import ask_for_short_slices

    work = (
        workloads.resnet("resnet8", batch_size=2, image_size=32, classes=8)
        if args.smoke
        else workloads.resnet("resnet50", batch_size=4, image_size=224)
    )
    repeats = 2 if args.smoke else args.repeats
    state, batch = work.state(0), work.batch(world.rank)
    shapes = jax.tree.leaves(state[0])
    jaxpr = jax.make_jaxpr(lambda *xs: [lax.psum(x, "batch") for x in xs], axis_env=list(AXES.items()))(*shapes)
    lanes = [
        jax.jit(MpiWire(world, lane=lane).lower(jaxpr, AXES)).lower(*shapes).compile() for lane in range(2)
    ]  # fmt: skip
    step = jax.jit(work.make(lambda tree: tree), donate_argnums=0)

    def exchange(lane: int, found: dict[str, list[float]]) -> None:
        operands = [jnp.ones(x.shape, x.dtype) for x in shapes]
        jax.block_until_ready(operands)
        start, cpu = time.perf_counter(), time.thread_time()
        jax.block_until_ready(lanes[lane](*operands))
        found["s"].append(time.perf_counter() - start)
        found["cpu_s"].append(time.thread_time() - cpu)

    def compute(found: list[float]) -> None:
        nonlocal state
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        found.append(time.perf_counter() - start)

    def in_threads(*tasks: Callable[[], None]) -> list[threading.Thread]:
        def run(task: Callable[[], None]) -> None:
            ask_for_short_slices()  # as the exchange lane does
            task()

        threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
        world.control.allgather_text("")  # all ranks begin together
        for thread in threads:
            thread.start()
        return threads

    exchanges = {name: {"s": [], "cpu_s": [], "softirq_s": []} for name in ("alone", "at once", "beside")}
    computation: dict[str, list[float]] = {"alone": [], "beside exchanges": []}

    def alone() -> None:
        before = softirq_s()
        for thread in in_threads(lambda: exchange(0, exchanges["alone"])):
            thread.join()
        exchanges["alone"]["softirq_s"].append(softirq_s() - before)

    def at_once() -> None:
        found: dict[str, list[float]] = {"s": [], "cpu_s": []}
        before, start = softirq_s(), time.perf_counter()
        for thread in in_threads(lambda: exchange(0, found), lambda: exchange(1, found)):
            thread.join()
        per_exchange = {"s": (time.perf_counter() - start) / 2, "softirq_s": (softirq_s() - before) / 2}
        for name, value in {**per_exchange, "cpu_s": statistics.fmean(found["cpu_s"])}.items():
            exchanges["at once"][name].append(value)

    def beside() -> None:
        count = 3
        before = softirq_s()
        (thread,) = in_threads(lambda: [exchange(0, exchanges["beside"]) for _ in range(count)] and None)
        took: list[float] = []
        while thread.is_alive():
            compute(took)
        computation["beside exchanges"] += took[:-1]  # the last one was alone at its end
        exchanges["beside"]["softirq_s"].append((softirq_s() - before) / count)

    def computing() -> None:
        world.control.allgather_text("")
        for _ in range(2):
            compute(computation["alone"])

    for repeat in range(-1, repeats):  # the first round compiles and gets memory
        for measure in (alone, computing, at_once, beside):
            measure()
        if repeat < 0:
            for found in (*exchanges.values(), {"": computation["alone"]}, {"": computation["beside exchanges"]}):
                for values in found.values():
                    values.clear()
    if world.rank == 0:
        Path(args.worker).write_text(json.dumps({
            "bytes": sum(x.nbytes for x in shapes), "leaves": len(shapes), "repeats": repeats,
            "exchange": {n: {k: spread(v) for k, v in found.items()} for n, found in exchanges.items()},
            "computation_s": {name: spread(values) for name, values in computation.items() if values},
        }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
