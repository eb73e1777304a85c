"""The training steps, states and batches of rivals that use JAX, and a count of compilations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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


def he_params(shapes: Any, kernels: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """Returns the first parameters of a ResNet of these shapes, the same as PyTorch begins with.

    `kernels` gets the shapes of the kernels in the order of the layers, and returns the kernels.
    Each block's own layers come before its projection.
    """
    leaves, tree = jax.tree.flatten_with_path(shapes)
    names = [tuple(key.key for key in path) for path, _ in leaves]
    order = sorted(
        (place for place, name in enumerate(names) if name[-1] == "kernel"),
        # The first layer's name comes after those of all others, and that of the last one is right.
        key=lambda place: (names[place][0] != "conv_init", [_numbered(n) for n in names[place]]),
    )
    made = dict(zip(order, kernels([leaves[place][1].shape for place in order]), strict=True))

    def fill(place: int) -> Any:
        name, leaf = names[place], leaves[place][1]
        if place in made:
            return jnp.asarray(made[place])
        # The last norm of a block has a scale of 0, so that the block begins as the identity.
        norms = [n[1] for n in names if n[0] == name[0] and n[1].startswith("BatchNorm_")]
        ends = bool(norms) and name[1] == max(norms)
        return jnp.full(leaf.shape, name[-1] == "scale" and not ends, leaf.dtype)

    return tree.unflatten([fill(place) for place in range(len(leaves))])


def _numbered(name: str) -> tuple[str, int]:
    """Returns a key by which `Block_10` comes after `Block_9`."""
    word, _, number = name.rpartition("_")
    return (word, int(number)) if number.isdigit() else (name, 0)


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
