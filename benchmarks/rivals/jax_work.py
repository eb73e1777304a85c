"""The training steps, states and batches of rivals that use JAX, and a count of compilations."""

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
"""The distance between the seeds of two ranks' batches."""


def workload(spec: Spec) -> workloads.Workload:
    """Returns a job's model and training step, the same as in the other benchmarks."""
    if spec.model == "transformer":
        return workloads.transformer(**spec.sizes())
    return workloads.resnet(spec.model, **spec.sizes())


def batch_of(work: workloads.Workload, job: int, rank: int) -> Any:
    return work.batch(DISTINCT * rank + job)


def state_of(work: workloads.Workload, seed: int) -> Any:
    """Returns a state like `work.state(seed)`, filled by NumPy.

    Compiling the model's own initialisation would take as long as compiling the step.
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
    """Counts XLA's compilations, and their seconds, from its creation on."""

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
    """One job's plain training loop, which keeps its state between commands."""

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def run(self, steps: int) -> None:
        metrics = None
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))

    def timed(self, steps: int) -> list[float]:
        """Returns the seconds of each step. Waits for a step's results before the next one."""
        raw = []
        for _ in range(steps):
            start = time.perf_counter()
            self.run(1)
            raw.append(time.perf_counter() - start)
        return raw
