"""One rank of benchmarks/fine_tuning.py: trains LoRA adapters of one frozen base model.

`--case` is the number of adapters. Without `--job`, the process trains all of them in crossover, on
one copy of the base. With `--job N`, it trains only adapter N, on its own copy.
"""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import jaxcross

# before the imports that make JAX arrays
world = jaxcross.initialize(stall_timeout_s=900)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import lora  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from rivals.cases import WARM_UP  # noqa: E402
from rivals.serving import arguments, rest, serve, status_bytes  # noqa: E402

RANKS = (4, 8, 4, 8, 4, 8, 4, 8)
LEARNING_RATES = (1e-3, 1e-3, 3e-3, 3e-3, 1e-4, 1e-4, 3e-4, 3e-4)
SIZES = {"features": 1024, "layers": 12, "heads": 16, "length": 32}
TOY = {"features": 64, "layers": 1, "heads": 2, "length": 8}


class Adapters:
    """The base model, and the adapters that this process trains, with their steps and batches."""

    def __init__(self, numbers: range, smoke: bool) -> None:
        self.numbers = numbers
        self.sizes = TOY if smoke else SIZES
        self.tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.0)
        structures = {
            rank: nnx.split(self._model(rank, abstract=True), nnx.LoRAParam, ...)
            for rank in sorted({RANKS[n] for n in numbers})
        }
        self.steps = {
            rank: lora.make_step(structure, self.tx) for rank, (structure, *_) in structures.items()
        }
        self.shapes = {rank: adapter for rank, (_, adapter, _) in structures.items()}
        self.base_shapes = next(iter(structures.values()))[2]
        self.batches = {n: self._batch(n) for n in numbers}
        self.base: Any = None
        self.states: dict[int, Any] = {}

    def load(self, count: int) -> None:
        """Creates the base, and the states of the first `count` adapters.

        The values are random, because neither speed nor memory depends on them.
        """
        self.base = _filled(self.base_shapes, 0)
        for n in self.numbers[:count]:
            adapter = _filled(self.shapes[RANKS[n]], n)
            opt_state = self.tx.init(adapter)
            opt_state.hyperparams["learning_rate"] = jnp.float32(LEARNING_RATES[n])
            self.states[n] = (adapter, opt_state)

    def drop(self) -> None:
        self.base, self.states = None, {}
        gc.collect()

    def nbytes(self) -> dict[str, int]:
        count = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
        return {
            "base_bytes": count(self.base),
            "adapters_bytes": count(self.states),
            "gradient_bytes": sum(count(adapter) for adapter, _ in self.states.values()),
        }

    def run(self, steps: int) -> dict[str, list[float]]:
        """Trains all loaded adapters. Returns their losses."""
        with jaxcross.Runner(world, memory="1TB", progress=False) as runner:
            jobs = [
                runner.add(f"adapter-{n}", self._train, {"number": n, "steps": steps})
                for n in self.states
            ]
            runner.run()
        return {job.name: [float(metrics["loss"]) for _, metrics in job.history] for job in jobs}

    def _train(self, job: jaxcross.JobContext, *, number: int, steps: int) -> None:
        state, self.states[number] = self.states[number], None
        step = self.steps[RANKS[number]]
        for batch in job.batches(itertools.repeat(self.batches[number], steps)):
            state, metrics = step(state, self.base, batch)
            job.log(metrics)
        self.states[number] = state

    def _model(self, rank: int, *, abstract: bool) -> Any:
        def make() -> Any:
            model = lora.Decoder(**self.sizes, rngs=nnx.Rngs(0))
            lora.add_adapters(model, rank, nnx.Rngs(rank))
            return model

        return nnx.eval_shape(make) if abstract else make()

    def _batch(self, number: int) -> Any:
        random = np.random.default_rng((number, world.rank))
        ids = random.integers(0, lora.CHARACTERS, (1, self.sizes["length"] + 1))
        ids = ids.astype(np.int32)
        return jax.tree.map(jnp.asarray, {"ids": ids[:, :-1], "next": ids[:, 1:]})


def _filled(shapes: Any, seed: int) -> Any:
    """Arrays of these shapes with small random values. Compiles nothing."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(0.07 * (random.random(x.shape, np.float32) - np.float32(0.5))), shapes
    )


def main() -> int:
    args = arguments(__doc__)
    numbers = range(int(args.case)) if args.job is None else range(args.job, args.job + 1)
    adapters = Adapters(numbers, args.smoke)
    before = 0

    def drop() -> None:
        adapters.drop()
        rest()

    def prepare() -> None:
        """Compiles all steps, and notes the memory of a process that holds no base."""
        nonlocal before
        adapters.load(len(numbers))
        adapters.run(WARM_UP)
        drop()
        before = status_bytes("VmRSS") - world.arena.nbytes

    def load(count: int) -> dict[str, Any]:
        """Starts afresh. The first step gets its memory from the kernel, so it's made here."""
        adapters.load(count)
        nbytes = adapters.nbytes()
        adapters.run(1)
        return nbytes

    def run(steps: int) -> dict[str, Any]:
        losses = adapters.run(steps)
        return {"losses": losses, "needed_bytes": status_bytes("VmHWM") - before}

    return serve(args, world.rank, {"prepare": prepare, "load": load, "run": run, "drop": drop})


if __name__ == "__main__":
    raise SystemExit(main())
