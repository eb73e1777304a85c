"""Steps that exchange nothing, like those between local SGD's exchanges, count as a job's steps."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross
from jaxcross.exchange import elastic_average, local_sgd

world = jaxcross.initialize()

TXS = {
    "local_sgd": lambda: local_sgd(optax.sgd(0.1, momentum=0.9), "batch", every=3),
    "elastic_average": lambda: elastic_average(optax.sgd(0.1), "batch", every=3, alpha=0.4),
}
BATCHES = [jnp.float32(10 * n + world.rank) for n in range(7)]


def make(tx):
    def train_step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.sum((p - batch) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": jnp.sum(params)}

    params = jnp.arange(4.0)
    return jaxcross.crossover(train_step, axes="batch"), (params, tx.init(params))


def trains(job, tx, seen, fails):
    step, start = make(tx())
    evaluate = jaxcross.crossover(lambda params: jnp.mean(params), axes="batch")
    state = job.restore(start, mode="local")
    for n, batch in enumerate(job.batches(BATCHES)):
        if fails and job.step == 4:
            raise ValueError("no more")
        state, metrics = step(state, batch)
        with warnings.catch_warnings(action="ignore"):  # it has no exchange
            evaluate(state[0])
        job.log(metrics)
        seen.append((job.step, float(batch)))
        if n == 3:
            job.save(state)  # after a step that exchanges nothing
    return state


def run(tx, folder=None, fails=False):
    seen, runner = [], jaxcross.Runner(world, checkpoints=folder and jaxcross.Checkpoints(folder))
    job = runner.add("a", trains, {"tx": tx, "seen": seen, "fails": fails})
    try:
        report = runner.run()
    except jaxcross.JobError:
        assert fails
        return seen, job, None
    assert not fails
    return seen, job, report


def same(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


for name, tx in TXS.items():
    seen, job, report = run(tx)
    assert seen == [(n + 1, float(batch)) for n, batch in enumerate(BATCHES)]
    assert [step for step, _ in job.history] == [*range(1, 8)]
    (row,) = report.summary()["jobs"]
    assert row["steps"] == 7
    assert row["bytes_per_step"] == 4 * 4 * 2 / 7, (
        name,
        row["bytes_per_step"],
    )  # four floats in two of seven steps
    step, alone = make(tx())
    for batch in BATCHES:
        alone, _ = step(alone, batch)
    assert same(job.state, alone)
    folder = f"{sys.argv[1]}/{name}"
    first, *_ = run(tx, folder, fails=True)
    then, resumed, _ = run(tx, folder)
    assert first + then == seen, (first, then)
    assert same(resumed.state, alone)
print(f"rank {world.rank}: local steps count", flush=True)
