"""Training functions that share a device under a `Runner`."""

from collections.abc import Iterator
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jaxcross

world = jaxcross.initialize()


@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(w: jax.Array, x: jax.Array, lr: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    loss, grad = jax.lax.pmean((loss, grad), "batch")
    return w - lr * grad, {"loss": loss}


def data() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(world.rank)
    while True:
        yield rng.normal(size=(8, 16)).astype(np.float32)


def evaluate(w: jax.Array) -> dict[str, float]:
    return {"norm": float(jnp.linalg.norm(w))}


def train(job: jaxcross.JobContext, lr: float, steps: int = 100) -> jax.Array:
    job.nonfinite = "skip"
    job.every(20, evaluate, name="eval")
    job.stop_early("eval/norm", mode="min", patience=3)
    w = job.restore(jnp.ones((16, 1)), mode="broadcast", check_replicas=50)
    assert_type(w, jax.Array)
    for x in job.batches(data(), steps):
        w, metrics = train_step(w, x, lr)
        job.state = w
        job.log(metrics)
    return w


with jaxcross.Runner(
    world,
    jaxcross.Weighted((2, 1), depth=2, start="as_ready"),
    memory="80GB",
    metrics="metrics",
    events="events",
    progress=10.0,
) as runner:
    assert_type(runner, jaxcross.Runner)
    small = runner.add("small", train, {"lr": 0.1})
    assert_type(small, jaxcross.JobContext)
    runner.add("large", train, {"lr": 0.4, "steps": 200})
    runner.register("train", train)
    report = runner.run()

assert_type(report, jaxcross.report.Report)
print(report, report.jobs[0].steps)
report.to_json("report.json")
for job in runner.jobs:
    if job.done.wait() and job.error is not None:
        print(job.name, job.status, job.step, job.history[-1:], job.error)
