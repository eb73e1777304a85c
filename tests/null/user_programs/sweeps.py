"""Sweeps over a grid, a list, random draws, and an Optuna study."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optuna

import jaxcross

world = jaxcross.initialize()


@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(w: jax.Array, lr: jax.Array) -> jax.Array:
    return w - lr * jax.lax.pmean(w, "batch")


def train(job: jaxcross.JobContext, lr: float, width: int = 4) -> jax.Array:
    w = job.restore(jnp.ones(width))
    for _ in job.batches([jnp.zeros(1)] * 20):
        w = train_step(w, jnp.float32(lr))
        job.log({"norm": jnp.linalg.norm(w)})
    return w


def draw(rng: np.random.Generator) -> dict[str, float]:
    return {"lr": float(10 ** rng.uniform(-3, 0))}


def suggest(trial: optuna.Trial) -> dict[str, float]:
    return {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True)}


pruner = optuna.pruners.MedianPruner()
grid = jaxcross.Grid({"lr": [0.1, 0.2], "width": [4, 8]})
result = jaxcross.sweep(train, grid, metric="norm", mode="min", folder="grid", keep=2)
assert_type(result, jaxcross.SweepResult)
if result.best is not None:
    print(result.best.params["lr"], result.best.value)
for trial in result.ranked:
    print(trial.number, trial.name, trial.status, trial.error)

choices = jaxcross.Choices([{"lr": 0.1}, {"lr": 0.2, "width": 8}], pruner=pruner)
jaxcross.sweep(train, choices, metric="norm", mode="min", concurrent=3, world=world)
jaxcross.sweep(train, jaxcross.Draws(draw, seed=1), metric="norm", mode="min", trials=8)
jaxcross.sweep(train, jaxcross.Draws({"lr": [0.1, 0.2]}), metric="norm", mode="min", trials=1)
study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=0))
asked = jaxcross.Optuna(study, suggest, pruner=pruner)
jaxcross.sweep(train, asked, metric="norm", trials=16, memory="16GB", events="events")
