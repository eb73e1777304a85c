"""Every rank: a job whose replicas are compared, its data, and the warnings that rank 0 logs."""

import logging
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross

WORLD = jaxcross.initialize(stall_timeout_s=60)
RANK, SIZE = WORLD.rank, WORLD.size
STEPS = 8


@contextmanager
def logged():
    """Collects the warnings that rank 0 logs in the block; other ranks log none.

    Leaves out the notice of `optax.MultiSteps`, which each rank logs when it traces such a step,
    and which has its own tests.
    """
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(
        lambda record: "in every mini-step of `optax.MultiSteps`" not in record.getMessage()
    )
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("jaxcross")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
    assert RANK == 0 or not lines, lines


def data(n=STEPS):
    rng = np.random.default_rng(RANK)
    for _ in range(n):
        yield {
            "x": rng.normal(size=(4, 6)).astype(np.float32),
            "y": rng.normal(size=(4, 2)).astype(np.float32),
        }


def make(tx, *, average=False, rate=1.0, seed=0):
    """An undecorated step, and its state: weights, a bias, and rank-local batch statistics."""

    def step(state, batch):
        params, statistics, opt_state = state
        loss, grads = jax.value_and_grad(
            lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)
        )(params)
        if average:
            grads = jax.lax.pmean(grads, "batch")
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: rate * u, updates))
        statistics = {"batch_stats": 0.9 * statistics["batch_stats"] + 0.1 * batch["x"].mean(0)}
        return (params, statistics, opt_state), {"loss": loss}

    params = {"b": jnp.zeros(2), "w": jax.random.normal(jax.random.key(seed), (6, 2))}
    return step, (params, {"batch_stats": jnp.zeros(6)}, tx.init(params))


def sgd():
    return optax.sgd(0.1, momentum=0.9)


def crossed(tx, **options):
    step, state = make(tx, **options)
    return jaxcross.crossover(step, axes="batch", donate_argnums=0), state


@cache
def _average(rate):
    return jaxcross.crossover(
        make(sgd(), average=True, rate=rate)[0], axes="batch", donate_argnums=0
    )


def averaged(*, rate=1.0, seed=0):
    """A step with averaged gradients, compiled once per process, and its initial state."""
    return _average(rate), make(sgd(), seed=seed)[1]


def alike(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def loop(job, step, state, n=STEPS, mode="check", rank_local=(), check_replicas=None):
    state = job.restore(state, mode=mode, rank_local=rank_local, check_replicas=check_replicas)
    for batch in job.batches(data(n)):
        state, metrics = step(state, batch)
        job.log(metrics)
    return state


def run(fn, *, checkpoints=None, **arguments):
    runner = jaxcross.Runner(WORLD, checkpoints=checkpoints)
    job = runner.add("a", fn, arguments)
    with logged() as lines:
        report = runner.run()
    return job, report, lines
