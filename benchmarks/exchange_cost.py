"""What does an exchange cost the link and the core, and would a second exchange lane fill the link better?

    python benchmarks/exchange_cost.py [--rate 500mbit] [--repeats 5] [--ways] [--limits none,64k,1m,4m] [--settings]

ResNet-50's 161 gradients, all-reduced as one program with sums joined as the library joins them, on two hosts with one
core each and a real link:
  alone        one exchange, nothing beside it
  at once      two exchanges, each in a thread and with communicators of its own, as two lanes would make them
  beside       exchanges beside ResNet-50's computation on the same core
  computation  the same step without exchange, alone and beside exchanges
`--ways`: beside, too, with the exchange's thread as it comes, with other slices than those of 0.25 ms that it asks for
in `beside`, at niceness 5, with two exchanges at once, and, last, as nobody may go back, with all others at niceness 1,
3 and 5.
`--limits`: alone and beside, too, with sums of up to these bytes joined (`none`: each is a message).
`--settings`: all of it again under each of the MPI's own settings, which only a new launch can change.

Rivals alternate in one run. fill: bytes on the wire over what the link carries in that time, as plain TCP measures it.
tax: the core's seconds an exchange takes from the computation, at most: its thread's CPU time, and the kernel's for
packets. The MPI is that of the environment; run it once in each.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import workloads
from hosts import on_hosts, parser_of_hosts
from rivals.serving import softirq_s
from workloads import spread, write_json

AXES = {"batch": 2}
BESIDE = 3
"""Exchanges that follow one another beside a computation."""
SETTINGS = {
    "mpich": [
        {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1"},
        *({"MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE": "none", "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": algorithm}
          for algorithm in ("recursive_doubling", "reduce_scatter_allgather", "ring")),
        {"FI_TCP_ZEROCOPY_SIZE": "65536"},
        {"FI_TCP_STAGING_SBUF_SIZE": "0"},
        {"FI_TCP_PREFETCH_RBUF_SIZE": "262144"},
    ],
    "openmpi": [
        {"OMPI_MCA_mpi_yield_when_idle": "1"},
        *({"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": algorithm}
          for algorithm in ("3", "4", "5")),  # recursive doubling, ring, segmented ring
        {"OMPI_MCA_btl_tcp_links": "2"},
        {"OMPI_MCA_btl_tcp_max_send_size": "1048576"},
        {"OMPI_MCA_btl_tcp_progress_thread": "1"},
    ],
}  # fmt: skip


def main() -> int:
    options = parser_of_hosts(__doc__)
    options.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    options.add_argument("--ways", action="store_true", help="of the exchange's thread to share its core")
    options.add_argument("--limits", default="", metavar="A,B", help="none, or bytes as 64k or 4m")
    options.add_argument("--settings", action="store_true", help="the MPI's own, each in a launch of its own")
    args = options.parse_args()
    if args.worker:
        return worker(args)
    result = launched(args, {})
    result["settings"] = []
    for setting in SETTINGS[result["mpi"]] if args.settings else ():
        print(" ".join(f"{name}={value}" for name, value in setting.items()))
        result["settings"].append({"environment": setting, **launched(args, setting)})
    write_json(args.json, __doc__, result)
    return 0


def launched(args: Any, environment: dict[str, str]) -> dict[str, Any]:
    """All measurements in one launch.

    Raises:
        RuntimeError: Fewer bytes crossed the link than the exchanges need.
    """
    result = on_hosts(__file__, args.rate, environment=environment)
    needed = 2 * result["bytes"] * result["exchanges"]  # each of two ranks sends its operand once
    if result["bytes_crossed"] < needed:
        raise RuntimeError(f"{result['bytes_crossed']} bytes crossed the link, the exchanges need {needed}.")
    there = min(result["tcp_bits_per_s"])
    for name, row in result["exchange"].items():
        row["fill"] = 8 * result["bytes"] / there / row["s"]["median"]
        print(f"exchange {name:26} {row['s']['median']:.3f} s, {row['cpu_s']['median']:.3f} s of its thread's CPU, "
              f"{row['softirq_s']['median']:.3f} s of the kernel's; fills {row['fill']:.1%} of the link")  # fmt: skip
    for name, row in result["computation_s"].items():
        print(f"computation {name:34} {row['median']:.3f} s")
    beside = result["exchange"]["beside"]
    result["tax_s"] = beside["cpu_s"]["median"] + beside["softirq_s"]["median"]
    print(f"{result['mpi']}: tax of an exchange {result['tax_s']:.3f} s")
    return result


def others_niceness(value: int) -> None:
    """Of all threads of this process but the caller. Less than it is needs a privilege."""
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            os.setpriority(os.PRIO_PROCESS, int(thread), value)


def bytes_of(limit: str) -> int:
    """`64k`, `4m` or `none` as a number."""
    return 0 if limit == "none" else int(limit[:-1]) << {"k": 10, "m": 20}[limit[-1]]


def worker(args: Any) -> int:
    import jaxcross

    world = jaxcross.initialize(lanes=2, watchdog_s=300)

    import jax
    import jax.numpy as jnp
    from jax import lax

    from jaxcross.wire import MpiWire, together
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
    limits = {f", sums up to {word}": bytes_of(word) for word in args.limits.split(",") if word}

    def compiled(lane: int, limit: int = together.SMALL_BYTES) -> Any:
        usual, together.SMALL_BYTES = together.SMALL_BYTES, limit
        try:
            return jax.jit(MpiWire(world, lane=lane).lower(jaxpr, AXES)).lower(*shapes).compile()
        finally:
            together.SMALL_BYTES = usual

    lanes = [compiled(0), compiled(1)]
    limited = {name: compiled(0, limit) for name, limit in limits.items()}
    ways: dict[str, Callable[[], Any]] = {}
    if args.ways:
        ways = {
            ", as it comes": lambda: None,
            **{f", slices of {us} us": partial(ask_for_short_slices, us * 1000) for us in (100, 500, 1000)},
            ", niceness 5": lambda: os.setpriority(os.PRIO_PROCESS, 0, 5),  # of this thread alone, on Linux
        }
    count = 0
    step = jax.jit(work.make(lambda tree: tree), donate_argnums=0)

    def exchange(call: Any, found: dict[str, list[float]]) -> None:
        nonlocal count
        operands = [jnp.ones(x.shape, x.dtype) for x in shapes]
        jax.block_until_ready(operands)
        start, cpu = time.perf_counter(), time.thread_time()
        jax.block_until_ready(call(*operands))
        found["s"].append(time.perf_counter() - start)
        found["cpu_s"].append(time.thread_time() - cpu)
        count += 1

    def compute(found: list[float]) -> None:
        nonlocal state
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        found.append(time.perf_counter() - start)

    def in_threads(*tasks: Callable[[], None], way: Callable[[], Any] = ask_for_short_slices) -> list[threading.Thread]:
        def run(task: Callable[[], None]) -> None:
            way()  # as the exchange lane does, or another
            task()

        threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
        world.control.allgather_text("")  # all ranks begin together
        for thread in threads:
            starter.submit(thread.start).result()
        return threads

    names = ["alone", "at once", "beside", *(f"beside{way}" for way in ways)]
    niceness = (1, 3, 5) if args.ways else ()
    names += [*(f"beside, the others' niceness {n}" for n in niceness), *(["beside, two at once"] if args.ways else [])]
    starter = ThreadPoolExecutor(1, "starter")  # a thread begins at the niceness of who starts it
    names += [f"{what}{limit}" for limit in limits for what in ("alone", "beside")]
    exchanges = {name: {"s": [], "cpu_s": [], "softirq_s": []} for name in names}
    computation: dict[str, list[float]] = {"alone": []}
    computation |= {name.replace("beside", "beside exchanges"): [] for name in names if name.startswith("beside")}

    def alone(suffix: str = "", call: Any = lanes[0]) -> None:
        found = exchanges[f"alone{suffix}"]
        before = softirq_s()
        for thread in in_threads(lambda: exchange(call, found)):
            thread.join()
        found["softirq_s"].append(softirq_s() - before)

    def at_once() -> None:
        found: dict[str, list[float]] = {"s": [], "cpu_s": []}
        before, start = softirq_s(), time.perf_counter()
        for thread in in_threads(lambda: exchange(lanes[0], found), lambda: exchange(lanes[1], found)):
            thread.join()
        per_exchange = {"s": (time.perf_counter() - start) / 2, "softirq_s": (softirq_s() - before) / 2}
        for name, value in {**per_exchange, "cpu_s": statistics.fmean(found["cpu_s"])}.items():
            exchanges["at once"][name].append(value)

    def beside(suffix: str = "", call: Any = lanes[0], way: Callable[[], Any] = ask_for_short_slices) -> None:
        found = exchanges[f"beside{suffix}"]
        before = softirq_s()
        (thread,) = in_threads(lambda: [exchange(call, found) for _ in range(BESIDE)] and None, way=way)
        took: list[float] = []
        while thread.is_alive():
            compute(took)
        computation[f"beside exchanges{suffix}"] += took[:-1]  # the last one was alone at its end
        found["softirq_s"].append((softirq_s() - before) / BESIDE)

    def two_beside() -> None:
        """Half as many exchanges a lane."""
        begin, before = time.perf_counter(), softirq_s()
        found: dict[str, list[float]] = {"s": [], "cpu_s": []}
        threads = in_threads(*(lambda call=call: [exchange(call, found) for _ in range(BESIDE)] for call in lanes))
        took: list[float] = []
        while any(thread.is_alive() for thread in threads):
            compute(took)
        computation["beside exchanges, two at once"] += took[:-1]
        made = exchanges["beside, two at once"]
        made["s"].append((time.perf_counter() - begin - took[-1]) / (2 * BESIDE))
        made["cpu_s"].append(statistics.fmean(found["cpu_s"]))
        made["softirq_s"].append((softirq_s() - before) / (2 * BESIDE))

    def computing() -> None:
        world.control.allgather_text("")
        for _ in range(2):
            compute(computation["alone"])

    for repeat in range(-1, repeats):  # the first round compiles and gets memory
        for measure in (alone, computing, at_once, beside):
            measure()
        for suffix, way in ways.items():
            beside(suffix, way=way)
        if args.ways:
            two_beside()
        for suffix, call in limited.items():
            alone(suffix, call)
            beside(suffix, call)
        if repeat < 0:
            for found in (*exchanges.values(), computation):
                for values in found.values():
                    values.clear()
    for n in niceness:
        starter.submit(others_niceness, n).result()
        for _ in range(repeats):
            beside(f", the others' niceness {n}")
    starter.shutdown()
    if world.rank == 0:
        Path(args.worker).write_text(json.dumps({
            "bytes": sum(x.nbytes for x in shapes), "leaves": len(shapes), "repeats": repeats, "exchanges": count,
            "exchange": {n: {k: spread(v) for k, v in found.items()} for n, found in exchanges.items()},
            "computation_s": {name: spread(values) for name, values in computation.items() if values},
        }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
