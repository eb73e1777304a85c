"""One rank of a sweep with pruning that may be killed.

    sweep_killed.py FOLDER TRIALS RESULT [RANK COUNT]

The rank RANK exits without a message once its trials have logged or saved COUNT times in total. If
the sweep completes, rank 0 writes the file RESULT. The environment variable `METRIC` is either
`loss`, which the training loop logs, or `eval/loss`, which is the result of an evaluation that also
stops trials early.
"""

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optuna

import jaxcross

WORLD = jaxcross.initialize(stall_timeout_s=120)
FOLDER, TRIALS, RESULT, *KILL = sys.argv[1:]
METRIC = os.environ["METRIC"]
DOOMED, COUNT = (int(KILL[0]), int(KILL[1])) if KILL else (-1, 0)
NUMBERS, LOCK = itertools.count(1), threading.Lock()


@jaxcross.crossover(axes="batch", donate_argnums=0)
def step(state, batch):
    def loss(w):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, grad = jax.value_and_grad(loss)(state["w"])
    value, grad = jax.lax.pmean((value, grad), "batch")
    momentum = 0.9 * state["momentum"] + grad
    return {**state, "w": state["w"] - state["lr"] * momentum, "momentum": momentum}, {
        "loss": value
    }


def data():
    rng = np.random.default_rng(WORLD.rank)
    while True:
        x = rng.normal(size=(4, 8)).astype(np.float32)
        yield {"x": x, "y": x.sum(1) + 0.1 * rng.normal(size=4).astype(np.float32)}


def reached():
    with LOCK:
        if WORLD.rank == DOOMED and next(NUMBERS) == COUNT:
            os.kill(os.getpid(), signal.SIGKILL)


@jaxcross.crossover(axes="batch")
def score(state, batch):
    return jax.lax.pmean(jnp.mean((batch["x"] @ state["w"] - batch["y"]) ** 2), "batch")


def evaluate(job, state):
    reached()
    scores = [score(state, batch) for batch in job.batches(data(), 3)]
    reached()
    return {"loss": sum(scores) / len(scores)}


def train(job, lr, steps):
    state = job.restore({"w": jnp.zeros(8), "momentum": jnp.zeros(8), "lr": jnp.float32(lr)})
    if METRIC == "eval/loss":
        job.every(4, lambda state: evaluate(job, state))
        job.stop_early(METRIC, mode="min", patience=2)
    for batch in job.batches(data(), steps):
        state, metrics = step(state, batch)
        job.state = state
        if job.step % 4 == 0:
            reached()
            job.log(metrics)
        if job.step % 8 == 0:
            reached()
            job.save(state)
    return state


study = optuna.create_study(
    direction="minimize",
    sampler=optuna.samplers.TPESampler(seed=3, n_startup_trials=3),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
)
space = {"lr": optuna.distributions.FloatDistribution(1e-3, 0.3, log=True), "steps": [12, 20, 28]}
result = jaxcross.sweep(
    train,
    jaxcross.Optuna(study, space),
    trials=int(TRIALS),
    metric=METRIC,
    concurrent=3,
    folder=FOLDER,
    keep=None,
)
if WORLD.rank == 0:
    facts = [
        [t.number, t.params, t.status, t.step, t.value, t.digest, t.values] for t in result.trials
    ]
    Path(RESULT).write_text(json.dumps({"best": result.best.number, "trials": facts}))
