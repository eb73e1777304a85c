"""Plain training loops under `run`, tiny jobs fused into one, and a comparison of two runs."""

from collections.abc import Sequence
from typing import assert_type

import jax
import jax.numpy as jnp

import jaxcross
from jaxcross.report import Comparison, Report, TensorBoard

world = jaxcross.initialize()


@jaxcross.crossover(axes="batch")
def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return w - 0.1 * jax.lax.pmean(w * x, "batch"), {"w": w[0]}


def make_jobs() -> list[jaxcross.Job]:
    jobs = [
        jaxcross.Job(
            f"job-{n}",
            train_step,
            jnp.full(4, float(n)),
            [jnp.ones(4)] * 50,
            steps=40,
            nonfinite="raise",
            mode="check",
            check_replicas=10,
        )
        for n in range(4)
    ]
    for job in jobs:
        job.every(10, lambda w: {"mean": jnp.mean(w)})
        job.stop_early("eval/mean", mode="min", patience_steps=20)
    return jobs


def timed(policy: jaxcross.Policy) -> Report:
    sinks: Sequence[jaxcross.Instrument] = [TensorBoard("logs")] if world.rank == 0 else []
    return jaxcross.run(make_jobs(), policy=policy, instruments=sinks, memory=16 * 10**9)


comparison = Comparison.of([timed(jaxcross.Sequential())], [timed(jaxcross.RoundRobin())])
print(comparison.headline, comparison.speedup)

fusion = jaxcross.fuse(make_jobs(), when="faster")
assert_type(fusion, jaxcross.Fusion)
report = jaxcross.run(fusion, world=world, metrics="metrics", progress=False)
assert_type(report, Report)
print(report.rounds.s_per_step, fusion.reasons)
