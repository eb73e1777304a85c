"""JAX's side of a case: its train steps, states and batches, and the count of what XLA compiled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import workloads

from rivals.cases import Spec

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
DISTINCT = 1000
"""Batches of different ranks come from seeds this far apart."""


def workload(spec: Spec) -> workloads.Workload:
    """The train step of a job, as the other benchmarks have it."""
    if spec.model == "transformer":
        return workloads.transformer(**spec.sizes())
    return workloads.resnet(spec.model, **spec.sizes())


def batch_of(work: workloads.Workload, job: int, rank: int) -> Any:
    return work.batch(DISTINCT * rank + job)


def state_of(work: workloads.Workload, seed: int) -> Any:
    """A state like `work.state(seed)`, without compiling the initialisation, which takes as long as
    the step's.
    """
    random = np.random.default_rng(seed)

    def fill(path: Any, leaf: Any) -> Any:
        part, name = path[0].idx, str(getattr(path[-1], "key", path[-1]))
        if part == 0 and len(leaf.shape) > 1:
            scale = math.prod(leaf.shape[:-1]) ** -0.5
            return jnp.asarray(random.standard_normal(leaf.shape, np.float32) * scale)
        ones = name == "var" or (part == 0 and name == "scale")
        return jnp.asarray(np.full(leaf.shape, ones, leaf.dtype))  # NumPy compiles nothing

    return jax.tree.map_with_path(fill, jax.eval_shape(lambda: work.state(seed)))


class Compilations:
    """How many programs XLA compiled since it was made, and for how many seconds."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
            self.seconds += duration_secs

    def facts(self) -> dict[str, Any]:
        return {"compilations": self.count, "compile_s": self.seconds}


class Loop:
    """One job's plain training loop: keeps its state from one command to the next."""

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def run(self, steps: int) -> None:
        metrics = None
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))

    def timed(self, steps: int) -> list[float]:
        """Seconds of each step, waiting for each."""
        raw = []
        for _ in range(steps):
            start = time.perf_counter()
            self.run(1)
            raw.append(time.perf_counter() - start)
        return raw
