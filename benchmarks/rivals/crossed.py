"""jaxcross: all jobs of the case in one process per host, one after the other or in crossover.

This program also calibrates the race. It measures c, i.e. the steps without their exchange; m, i.e.
the collective segments of the same steps without any computation; and the tax, i.e. the CPU time
that an exchange takes from a core on which a step is computing.
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

# This must come before the imports that create JAX arrays.
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
    """Averages over the ranks. Gradients are sent as `wire`, metrics in their own type."""
    mean = jaxcross.exchange.mean(AXIS, wire_dtype=None if wire == "float32" else jnp.dtype(wire))
    return lambda tree: (mean.update(tree[0], optax.EmptyState())[0], lax.pmean(tree[1], AXIS))


class Jobs:
    """The case's jobs with their states. Jobs with equal specs share a step, made on first use."""

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
        """Runs all jobs, and returns what the report says about them.

        `others` is a different cut for all jobs but the largest ones. If it's given, a job's share
        is its number of segments.
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
        # The job continues from the state in which the previous command left all ranks, so we don't
        # need `restore`, which would compare the state across ranks.
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
        """Discards the steps that choose their own cut, because the link's rate has changed."""
        self.steps = {key: step for key, step in self.steps.items() if key[2] != "auto"}

    def buckets(self) -> dict[str, Any]:
        """Measures the first and the last bucket of the finest cut that `cut="auto"` considers.

        No wait-free backpropagation can be faster than these two allow (`wait_free_s`). `raw` has
        the seconds of the first compute segment, run alone, after which the first gradients can be
        sent. `last_share` is the share of all exchanged bytes that the last exchange has.
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
        """Returns the number of exchange segments that `cut="auto"` has chosen."""
        (spec,) = self.specs
        return {"pieces": len(self.step(spec, cut="auto").latest_program.collectives)}

    @contextlib.contextmanager
    def computing(self, number: int) -> Iterator[jax_work.Loop]:
        """Yields a loop of the step without its exchange.

        The loop uses the job's own state and memory that has been touched before, as it does for
        the other rivals.
        """
        spec = self.specs[number]
        if spec not in self.alone:
            self.alone[spec] = jax.jit(self.work[spec].make(lambda tree: tree), donate_argnums=0)
        loop = jax_work.Loop(self.alone[spec], self.states[number], self.batches[number])
        self.states[number] = None  # the first step donates it
        # If another program ran in this process before, the first two steps allocate memory again
        # and take 2.4 s instead of 0.9 s. So we run three before measuring.
        loop.run(3)
        world.control.allgather_text("")
        yield loop
        self.states[number] = loop.state


class Collectives:
    """Runs only the collective segments of a program, with zeros as their inputs."""

    def __init__(self, compiled: Any) -> None:
        self._calls = [
            (r.call, [compiled.program.values[v] for v in r.segment.inputs])
            for r in compiled.runnables
            if r.device is not None
        ]

    def timed(self, times: int) -> tuple[list[float], list[float]]:
        """Returns the seconds and this thread's CPU seconds of each exchange.

        Collective: both ranks call this, and each waits for the other.
        """
        raw, cpu = [], []
        for _ in range(times):
            operands = [[jnp.zeros(a.shape, a.dtype) for a in avals] for _, avals in self._calls]
            jax.block_until_ready(operands)
            world.control.allgather_text("")  # so that both ranks begin together
            start, cpu_start = time.perf_counter(), time.thread_time()
            for (call, _), args in zip(self._calls, operands, strict=True):
                jax.block_until_ready(call(*args))
            raw.append(time.perf_counter() - start)
            cpu.append(time.thread_time() - cpu_start)
        return raw, cpu


def taxed(loop: jax_work.Loop, collectives: Collectives, exchanges: int) -> dict[str, Any]:
    """Computes steps in this thread while another thread runs a number of exchanges.

    Both threads share one core, as they do in crossover. We return three lists:

    - `taxed_c`: the seconds of each step that ended before the last exchange.
    - `taxed_m`: the seconds of each exchange.
    - `tax`: the CPU time that each exchange takes from the core. That's the CPU time of its thread,
      which includes XLA's executable and MPI's polling, plus the time in which the kernel handles
      packets, which it also takes from the computation.

    The tax is not exact. If the kernel counts CPU time by ticks, packets that it handles while the
    exchange's thread is running are counted twice. Conversely, the tax doesn't include the time
    that the computation loses because the exchange evicts its data from the caches; that only shows
    up in `taxed_c`.
    """
    result: list[tuple[list[float], list[float]]] = []
    failure: list[Exception] = []

    def beside() -> None:
        ask_for_short_slices()  # so that it's scheduled like the exchange lane
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
