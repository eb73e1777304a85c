"""jaxcross: the trials of `sweep_to_target.py`, one after the other or several in crossover."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxcross

# This must come before the imports that create JAX arrays.
world = jaxcross.initialize(stall_timeout_s=900)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import workloads  # noqa: E402
from jax import lax  # noqa: E402
from resnet import MODELS  # noqa: E402  (`workloads` makes it importable)

from rivals import digits, jax_work  # noqa: E402
from rivals.serving import arguments, serve, total_cpu_s  # noqa: E402

AXIS = "batch"


class Trials:
    """The training function of all trials, and what it found out in the latest sweep."""

    def __init__(self, sweep: digits.Sweep) -> None:
        self._sweep = sweep
        self._model = model = MODELS[sweep.model](
            num_classes=digits.CLASSES, num_filters=sweep.filters
        )
        # As values of the state rather than of the program, so that all trials share one executable
        self._tx = tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.0)
        work = workloads.resnet(
            sweep.model,
            batch_size=sweep.batch_size,
            image_size=sweep.image_size,
            classes=digits.CLASSES,
            tx=tx,
            num_filters=sweep.filters,
        )
        step = work.make(lambda tree: lax.pmean(tree, AXIS))
        self._step = jaxcross.crossover(step, axes=AXIS, donate_argnums=0)

        def accuracy(params: Any, stats: Any, batch: Any) -> Any:
            variables = {"params": params, "batch_stats": stats}
            right = model.apply(variables, batch["image"], train=False).argmax(-1) == batch["label"]
            return lax.pmean(right.mean(), AXIS)

        self._accuracy = jaxcross.crossover(accuracy, axes=AXIS)
        image = jnp.zeros((1, sweep.image_size, sweep.image_size, 3))
        self._shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), image))
        self.curves: dict[str, dict[str, Any]] = {}

    @property
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self._shapes["params"]))

    def start(self, rate: float, momentum: float) -> Any:
        """Returns the state in which a trial begins."""
        params = jax_work.he_params(self._shapes["params"], digits.kernels)
        stats = jax.tree.map_with_path(
            lambda path, leaf: jnp.full(leaf.shape, path[-1].key == "var", leaf.dtype),
            self._shapes["batch_stats"],
        )
        opt_state: Any = self._tx.init(params)
        opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        opt_state.hyperparams["momentum"] = jnp.float32(momentum)
        return params, stats, opt_state

    def train(self, job: Any, rate: float, momentum: float) -> Any:
        sweep = self._sweep
        found = self.curves[job.name] = {"begin": time.monotonic(), "curve": []}
        share = digits.held_out(sweep, world.rank, world.size)
        state = self.start(rate, momentum)
        data = digits.batches(sweep, world.rank, world.size)
        for batch in job.batches(data, sweep.limit):
            state, metrics = self._step(state, batch)
            if job.step == 1:
                found["first_step"] = time.monotonic()
            if job.step % sweep.every == 0:
                params, stats, _ = state
                accuracy = float(self._accuracy(params, stats, share))
                job.log({"score": sweep.score(job.step, accuracy)})
                found["curve"].append((job.step, float(metrics["loss"]), accuracy))
                if accuracy >= sweep.target:
                    break
        found["end"] = time.monotonic()
        return state

    def run(self, concurrent: int) -> dict[str, Any]:
        """Runs the whole sweep."""
        self.curves.clear()
        grid = jaxcross.Grid({"rate": self._sweep.rates, "momentum": self._sweep.momenta})
        result = jaxcross.sweep(self.train, grid, metric="score", mode="min", concurrent=concurrent)
        failed = [trial.error for trial in result.trials if trial.status != "finished"]
        if failed or result.best is None:
            raise RuntimeError(f"{len(failed)} trials did not finish. The first: {failed[:1]}")
        return {
            "parameters": self.parameters,
            "total_cpu_s": total_cpu_s(),
            "best": result.best.number,
            "trials": [
                {
                    "params": trial.params,
                    "steps": trial.step,
                    "score": trial.value,
                    "digest": trial.digest,
                    **self.curves[trial.name],
                }
                for trial in result.trials
            ],
            "account": [report.summary() for report in result.reports],
        }


def main() -> int:
    args = arguments(__doc__)
    trials = Trials(digits.sweep_of(args.smoke))
    return serve(args, world.rank, {"sweep": trials.run})


if __name__ == "__main__":
    raise SystemExit(main())
