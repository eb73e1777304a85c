"""Reads ImageNet records through a cache, and decodes them once for two jobs."""

from collections.abc import Iterator
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jaxcross
from jaxcross.data import Batches, Cache, SharedDecode, eval_batches, synthesise, train_batches

world = jaxcross.initialize()
folder = synthesise("data", images=64, classes=4, width=64, height=48)
cache = Cache("/local/cache", disk_bytes=10**9, memory_bytes=10**8)


@jaxcross.crossover(axes="batch")
def train_step(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    mean = jax.lax.pmean(jnp.mean(batch["image"]), "batch")
    return w + mean, {"mean": mean}


def stream() -> Batches:
    return train_batches(
        folder,
        batch_size=8,
        image_size=32,
        rank=world.rank,
        size=world.size,
        seed=0,
        epochs=2,
        cache=cache,
    )


def evaluate(w: jax.Array) -> dict[str, float]:
    total = 0.0
    for batch in eval_batches(folder, batch_size=8, image_size=32, split="train"):
        assert_type(batch, dict[str, np.ndarray])
        total += float(batch["image"].mean())
    return {"mean": total}


def scaled(batches: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    for batch in batches:
        yield {**batch, "image": batch["image"] / 2}


shared = SharedDecode(stream(), window=4)
jobs = [
    jaxcross.Job("whole", train_step, jnp.zeros(()), shared.reader()),
    jaxcross.Job("scaled", train_step, jnp.zeros(()), scaled(shared.reader())),
]
jobs[0].every(10, evaluate, rank=0)
try:
    jaxcross.run(jobs)
except jaxcross.MissingExtraError as error:
    print(error)
print(shared.decoded, shared.served, cache.statistics())
