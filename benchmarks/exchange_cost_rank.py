"""One rank of benchmarks/exchange_cost.py: measures what exchange and computation cost each other.

The benchmark starts this script with its own arguments plus `--worker FILE`. Rank 0 writes the
numbers to FILE.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jaxcross

WORLD = jaxcross.initialize(stall_timeout_s=300)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import workloads  # noqa: E402
from exchange_cost import options  # noqa: E402
from jax import lax  # noqa: E402
from rivals import jax_work  # noqa: E402
from rivals.cases import jobs_of  # noqa: E402
from rivals.serving import softirq_s  # noqa: E402
from workloads import spread  # noqa: E402

from jaxcross.wire import MpiWire, coalesce  # noqa: E402
from jaxcross.wire.mpi_wire import WireLibrary  # noqa: E402
from jaxcross.world.sched_slice import ask_for_short_slices  # noqa: E402

AXES = {"batch": 2}
BESIDE = 3
"""Consecutive exchanges during a computation."""
NICENESS = (1, 3, 5)


class SleepingWorld:
    """A world whose communicators wait for a sum with a non-blocking call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(WORLD, name)

    def communicator(self, *args: Any, **options: Any) -> Any:
        return SleepingComm(WORLD.communicator(*args, **options))


class SleepingComm:
    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def Allreduce(self, x: Any, result: Any, op: Any) -> None:  # noqa: N802
        request, pause_s = self.comm.Iallreduce(x, result, op), 1e-5
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)


class Ways:
    """Measures an exchange, a computation, and both at once in several ways.

    The times are in `exchanges` and `computation`. Every measurement starts on all ranks together.
    The compiled exchanges take and return the gradients of `work`.
    """

    def __init__(self, work: workloads.Workload) -> None:
        self.state, self.batch = work.state(0), work.batch(WORLD.rank)
        self.shapes = jax.tree.leaves(self.state[0])
        sums = lambda *xs: [lax.psum(x, "batch") for x in xs]  # noqa: E731
        self.jaxpr = jax.make_jaxpr(sums, axis_env=list(AXES.items()))(*self.shapes)
        self.step = jax.jit(work.make(lambda tree: tree), donate_argnums=0)
        self.starter = ThreadPoolExecutor(
            1, "starter"
        )  # a new thread inherits the niceness of the thread that starts it
        self.usual = self.compiled()
        self.made = 0
        self.forget()

    def forget(self) -> None:
        """Discards what has been measured so far, because it was only a rehearsal."""
        self.exchanges: dict[str, dict[str, list[float]]] = defaultdict(
            lambda: {"s": [], "cpu_s": [], "softirq_s": []}
        )
        self.computation: dict[str, dict[str, list[float]]] = defaultdict(
            lambda: {"s": [], "ran_s": [], "round_s": []}
        )

    def compiled(
        self,
        limit: int = coalesce.SMALL_BYTES,
        *,
        over: WireLibrary = "mpi4jax",
        world: Any = WORLD,
    ) -> Any:
        """Returns all gradients' sums as one program, with sums of up to `limit` bytes joined."""
        usual, coalesce.SMALL_BYTES = coalesce.SMALL_BYTES, limit
        try:
            lowered = MpiWire(world, over=over).lower(self.jaxpr, AXES)
            return lowered.compile(self.shapes, name=over, host=jax.devices("cpu")[0], place=None)
        finally:
            coalesce.SMALL_BYTES = usual

    def exchange(self, call: Any, took: dict[str, list[float]]) -> None:
        operands = [jnp.ones(x.shape, x.dtype) for x in self.shapes]
        jax.block_until_ready(operands)
        start, cpu = time.perf_counter(), time.thread_time()
        jax.block_until_ready(call(*operands))
        took["s"].append(time.perf_counter() - start)
        took["cpu_s"].append(time.thread_time() - cpu)
        self.made += 1

    def compute(self, took: dict[str, list[float]], but: Sequence[threading.Thread] = ()) -> None:
        """Runs a step, and notes how long all threads except `but` had the core meanwhile."""
        before, start = ran_s(but), time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        took["s"].append(time.perf_counter() - start)
        took["ran_s"].append(sum(s - before.get(thread, 0) for thread, s in ran_s(but).items()))

    def in_thread(
        self, task: Callable[[], Any], way: Callable[[], Any] | None = None
    ) -> threading.Thread:
        """Starts the task on all ranks at once, in a thread that is prepared by `way`.

        If `way` is None, the thread is prepared like the exchange lane.
        """

        def run() -> None:
            (way or ask_for_short_slices)()
            task()

        thread = threading.Thread(target=run)
        WORLD.control.allgather_text("")
        self.starter.submit(thread.start).result()
        return thread

    def alone(self, suffix: str = "", call: Any = None) -> None:
        took = self.exchanges[f"alone{suffix}"]
        before = softirq_s()
        self.in_thread(lambda: self.exchange(call or self.usual, took)).join()
        took["softirq_s"].append(softirq_s() - before)

    def computing(self) -> None:
        WORLD.control.allgather_text("")
        for _ in range(2):
            self.compute(self.computation["alone"])

    def beside(
        self, suffix: str = "", call: Any = None, way: Callable[[], Any] | None = None
    ) -> None:
        took = self.exchanges[f"beside{suffix}"]
        before = softirq_s()
        several = lambda: [self.exchange(call or self.usual, took) for _ in range(BESIDE)]  # noqa: E731
        self._compute_while(self.in_thread(several, way), suffix)
        took["softirq_s"].append((softirq_s() - before) / BESIDE)

    def _compute_while(self, thread: threading.Thread, suffix: str) -> None:
        """Computes until the thread has ended.

        The last step ran partly alone, so it counts only if it's the only step.
        """
        took: dict[str, list[float]] = {"s": [], "ran_s": []}
        while not took["s"] or thread.is_alive():
            self.compute(took, [thread])
        found = self.computation[f"beside exchanges{suffix}"]
        for name, values in took.items():
            found[name] += values[:-1]
        found["round_s"].append(statistics.fmean(took["s"][:-1] or took["s"]))

    def yield_to_exchanges(self, niceness: int) -> None:
        """Raises the niceness of all threads except the starter.

        This can't be undone, because lowering the niceness requires a privilege.
        """

        def set_others() -> None:
            for thread in os.listdir("/proc/self/task"):
                if int(thread) != threading.get_native_id():
                    os.setpriority(os.PRIO_PROCESS, int(thread), niceness)

        self.starter.submit(set_others).result()

    def facts(self) -> dict[str, Any]:
        return {
            "bytes": sum(x.nbytes for x in self.shapes),
            "leaves": len(self.shapes),
            "exchanges": self.made,
            "exchange": {
                n: {k: spread(v) for k, v in took.items()} for n, took in self.exchanges.items()
            },
            **{
                f"computation_{key}": {
                    name: spread(took[key]) for name, took in self.computation.items() if took[key]
                }
                for key in ("s", "ran_s", "round_s")
            },
        }


def ran_s(but: Sequence[threading.Thread]) -> dict[int, float]:
    """Returns thread id -> seconds on a core, for all threads of this process except `but`."""
    others = {thread.native_id for thread in but}
    found = {}
    for thread in {int(name) for name in os.listdir("/proc/self/task")} - others:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found[thread] = (
                int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
            )
    return found


def main() -> int:
    args = options().parse_args()
    repeats = 2 if args.smoke else args.repeats
    (spec,) = jobs_of("one", args.smoke)
    ways = Ways(jax_work.workload(spec))
    limited = {f", sums up to {word}": ways.compiled(limit) for word, limit in args.limits.items()}
    if args.wires:
        limited[", mpi4py"] = ways.compiled(over="mpi4py")
        limited[", mpi4py that sleeps"] = ways.compiled(over="mpi4py", world=SleepingWorld())
    threads: dict[str, Callable[[], Any]] = {
        ", as it comes": lambda: None,
        **{
            f", slices of {us} us": partial(ask_for_short_slices, us * 1000)
            for us in (100, 500, 1000)
        },
        ", niceness 5": lambda: (ask_for_short_slices(), os.nice(5)),  # affects only this thread
    }
    for repeat in range(-1, repeats):
        for measure in (ways.alone, ways.computing, ways.beside):
            measure()
        for suffix, way in threads.items() if args.ways else ():
            ways.beside(suffix, way=way)
        for suffix, call in limited.items():
            ways.alone(suffix, call)
            ways.beside(suffix, call)
        if repeat < 0:  # the first round compiles and allocates memory
            ways.forget()
    for niceness in NICENESS if args.ways else ():
        ways.yield_to_exchanges(niceness)
        for _ in range(repeats):
            ways.beside(f", the others' niceness {niceness}")
    ways.starter.shutdown()
    if WORLD.rank == 0:
        Path(args.worker).write_text(json.dumps({**ways.facts(), "repeats": repeats}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
