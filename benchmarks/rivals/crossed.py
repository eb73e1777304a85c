"""jaxcross: all jobs of the case in one process a host, one after the other or in crossover.

Also measures `c`, the steps without their exchange; `m`, their own collective segments without
their computation; and the tax, what an exchange takes of a core on which a step computes.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxcross
from jaxcross.program import stages
from jaxcross.step.cut_tuner import SEGMENT_COUNTS
from jaxcross.world.sched_slice import ask_for_short_slices

# before the imports that make JAX arrays
world = jaxcross.initialize(stall_timeout_s=900)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402

from rivals import jax_work  # noqa: E402
from rivals.cases import WARM_UP, Spec, parameters  # noqa: E402
from rivals.serving import arguments, own_jobs, serve, softirq_s  # noqa: E402

AXIS = "batch"
VARIANTS: dict[str, dict[str, Any]] = {
    "sequential": {"policy": jaxcross.Sequential},
    "crossover": {"policy": jaxcross.RoundRobin},
    "crossover-cut": {"policy": jaxcross.RoundRobin, "cut": 4},
    "crossover-bf16": {"policy": jaxcross.RoundRobin, "wire": "bfloat16"},
    "crossover-shares": {"policy": jaxcross.Weighted, "cut": 4, "others": "whole"},
    "crossover-shares-bf16": {
        "policy": jaxcross.Weighted,
        "cut": 4,
        "others": "whole",
        "wire": "bfloat16",
    },
    "wait-free": {"policy": jaxcross.Sequential, "cut": "auto"},
    "wait-free-bf16": {"policy": jaxcross.Sequential, "cut": "auto", "wire": "bfloat16"},
}


def exchange(wire: str) -> Callable[[Any], Any]:
    """The mean over ranks; gradients as `wire`, metrics as they are."""
    mean = jaxcross.exchange.mean(AXIS, wire_dtype=None if wire == "float32" else jnp.dtype(wire))
    return lambda tree: (mean.update(tree[0], optax.EmptyState())[0], lax.pmean(tree[1], AXIS))


class Jobs:
    """The case's jobs with their states; like jobs share their steps, which are made when they are
    first wanted.
    """

    def __init__(self, specs: list[tuple[int, Spec]]) -> None:
        self.specs = [spec for _, spec in specs]
        self.work = {spec: jax_work.workload(spec) for spec in set(self.specs)}
        self.states = [jax_work.state_of(self.work[spec], number) for number, spec in specs]
        self.batches = [
            jax_work.batch_of(self.work[spec], number, world.rank) for number, spec in specs
        ]
        self.steps: dict[Any, Any] = {}
        self.alone: dict[Spec, Any] = {}
        self.collectives: dict[Any, Collectives] = {}
        self.finest: Any = None

    def step(self, spec: Spec, wire: str = "float32", cut: Any = "whole") -> Any:
        key = spec, wire, cut
        if key not in self.steps:
            step = self.work[spec].make(exchange(wire))
            self.steps[key] = jaxcross.crossover(step, axes=AXIS, cut=cut, donate_argnums=0)
        return self.steps[key]

    def run(
        self, steps: int, policy: Any, wire: str = "float32", cut: Any = "whole", others: Any = None
    ) -> dict[str, Any]:
        """`others` is the cut of all but the largest jobs, where that is another one; shares are
        then by pieces.
        """
        largest = max(map(parameters, self.specs))
        cuts = [
            cut if others is None or parameters(spec) == largest else others for spec in self.specs
        ]
        chosen = (
            policy()
            if others is None
            else policy(tuple(1.0 if each == others else float(each) for each in cuts))
        )
        with jaxcross.Runner(world, chosen) as runner:
            for number, (spec, each) in enumerate(zip(self.specs, cuts, strict=True)):
                runner.add(
                    f"job{number}",
                    self._train,
                    {"number": number, "step": self.step(spec, wire, each), "steps": steps},
                )
            report = runner.run()
        jax.block_until_ready(self.states)
        account = report.summary()
        return {
            "steady_s_per_job_step": account["s_per_step"],
            "hidden_share_from_trace": account["hidden_share"],
            "account": account,
        }

    def _train(self, job: jaxcross.JobContext, *, number: int, step: Any, steps: int) -> None:
        # the state is the one that all ranks had at the end of the command before: it is not
        # compared again
        state, self.states[number] = self.states[number], None
        for batch in job.batches(itertools.repeat(self.batches[number], steps)):
            state, metrics = step(state, batch)
            job.log(metrics)
        self.states[number] = state

    def exchanges(self, number: int, wire: str) -> Collectives:
        spec = self.specs[number]
        if (spec, wire) not in self.collectives:
            step = self.step(spec, wire)
            arguments = self.states[number], self.batches[number]
            program = stages.cut(step.trace(*arguments))
            compiled = stages.compile(program, jax.tree.leaves(arguments), cache=world.executables)
            self.collectives[spec, wire] = Collectives(compiled)
        return self.collectives[spec, wire]

    def forget_cuts(self) -> None:
        """Steps that cut themselves search anew: the link has another rate."""
        self.steps = {key: step for key, step in self.steps.items() if key[2] != "auto"}

    def buckets(self) -> dict[str, Any]:
        """What wait-free backpropagation has to beat, by the finest cut that `auto` tries,
        whichever it has chosen.

        `raw`: seconds of its first compute segment, alone, after which the first gradients can
        travel; `last_share`: bytes of its last exchange over all.
        """
        (spec,) = self.specs
        arguments = self.states[0], self.batches[0]
        if self.finest is None:
            program = stages.cut(self.step(spec).trace(*arguments), cut=max(SEGMENT_COUNTS))
            self.finest = stages.compile(
                program, jax.tree.leaves(arguments), cache=world.executables
            )
        compiled = self.finest
        raw = []
        for _ in range(4):
            execution = compiled.execution(jax.tree.leaves(arguments))
            start = time.perf_counter()
            execution.run(0)
            execution.wait_outputs(0)
            raw.append(time.perf_counter() - start)
        sent = [segment.nbytes for segment in compiled.program.collectives]
        return {"raw": raw[1:], "last_share": sent[-1] / sum(sent)}

    def pieces(self) -> dict[str, Any]:
        """How many exchange segments `auto` has chosen."""
        (spec,) = self.specs
        return {"pieces": len(self.step(spec, cut="auto").latest_program.collectives)}

    @contextlib.contextmanager
    def computing(self, number: int) -> Iterator[jax_work.Loop]:
        """The step without its exchange, on the job's own state and its warm memory, as the other
        rivals have it.
        """
        spec = self.specs[number]
        if spec not in self.alone:
            self.alone[spec] = jax.jit(self.work[spec].make(lambda tree: tree), donate_argnums=0)
        loop = jax_work.Loop(self.alone[spec], self.states[number], self.batches[number])
        self.states[number] = None  # the first step donates it
        # Two of them, after another program of this process, get memory anew: 2.4 s instead of 0.9.
        loop.run(3)
        world.control.allgather_text("")
        yield loop
        self.states[number] = loop.state


class Collectives:
    """The collective segments of a program, on zeros."""

    def __init__(self, compiled: Any) -> None:
        self._calls = [
            (r.call, [compiled.program.values[v] for v in r.segment.inputs])
            for r in compiled.runnables
            if r.device is not None
        ]

    def timed(self, times: int) -> tuple[list[float], list[float]]:
        """Seconds, and this thread's CPU seconds, of each exchange. Waits for the other rank, which
        does the same.
        """
        raw, cpu = [], []
        for _ in range(times):
            operands = [[jnp.zeros(a.shape, a.dtype) for a in avals] for _, avals in self._calls]
            jax.block_until_ready(operands)
            world.control.allgather_text("")  # both ranks begin together
            start, cpu_start = time.perf_counter(), time.thread_time()
            for (call, _), args in zip(self._calls, operands, strict=True):
                jax.block_until_ready(call(*args))
            raw.append(time.perf_counter() - start)
            cpu.append(time.thread_time() - cpu_start)
        return raw, cpu


def taxed(loop: jax_work.Loop, collectives: Collectives, exchanges: int) -> dict[str, Any]:
    """Steps without exchange, in this thread, while another one exchanges as often as it is told.

    `taxed_c`: seconds of the steps that ended before the exchanges did; `taxed_m`, `tax`: seconds
    of each exchange, and what it takes of the core: its thread's CPU seconds, XLA's executable and
    MPI's polling included, and the kernel's for packets, which it takes from whoever computes.
    Where the kernel counts by ticks, packets that it handles on top of the exchange's thread are in
    both; what the computation loses of the caches is in neither, but in `taxed_c`.
    """
    result: list[tuple[list[float], list[float]]] = []
    failure: list[Exception] = []

    def beside() -> None:
        ask_for_short_slices()  # as the exchange lane does
        try:
            result.append(collectives.timed(exchanges))
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=beside, name="exchange-beside")
    before, took = softirq_s(), []
    thread.start()
    while thread.is_alive():
        took += loop.timed(1)
    thread.join()
    if failure:
        raise failure[0]
    packets_s = (softirq_s() - before) / exchanges
    exchange_s, cpu_s = result[0]
    return {"taxed_c": took[:-1], "taxed_m": exchange_s, "tax": [packets_s + own for own in cpu_s]}


def main() -> int:
    args = arguments(__doc__)
    compilations = jax_work.Compilations()
    jobs = Jobs(own_jobs(args))

    def prepare(variant: str) -> dict[str, Any]:
        jobs.run(WARM_UP, **VARIANTS[variant])
        return compilations.facts()

    def run(steps: int, variant: str) -> dict[str, Any]:
        return jobs.run(steps, **VARIANTS[variant])

    def alone(job: int, times: int, wire: str) -> dict[str, Any]:
        collectives = jobs.exchanges(job, wire)
        collectives.timed(1)
        return {"raw": collectives.timed(times)[0]}

    def compute(job: int, steps: int) -> dict[str, Any]:
        with jobs.computing(job) as loop:
            return {"raw": loop.timed(steps)}

    def beside(job: int, exchanges: int, wire: str) -> dict[str, Any]:
        collectives = jobs.exchanges(job, wire)
        with jobs.computing(job) as loop:
            return taxed(loop, collectives, exchanges)

    return serve(
        args,
        world.rank,
        {
            "prepare": prepare,
            "run": run,
            "compute": compute,
            "exchange": alone,
            "taxed": beside,
            "forget_cuts": jobs.forget_cuts,
            "buckets": jobs.buckets,
            "pieces": jobs.pieces,
        },
    )


if __name__ == "__main__":
    raise SystemExit(main())
