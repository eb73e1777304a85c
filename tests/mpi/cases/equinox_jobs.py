"""Two jobs whose states hold Equinox modules: `equinox_jobs.py FOLDER RESULT STEPS KILL_AT`.

Each rank writes the arrays of its final states to RESULT. If KILL_AT isn't 0, rank 1 kills itself
in that step of the second job. FOLDER is for checkpoints; without it, each job's state is also
compared with that of other ways to train it.
"""

import os
import signal
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross
from jaxcross._pytree import is_key

world = jaxcross.initialize()
folder, result, steps, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
optimizer = optax.adamw(1e-2)


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    name: str

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(4, 2, 8, 2, activation=jax.nn.gelu, key=key)
        self.dropout = eqx.nn.Dropout(0.2)
        self.name = "net"

    def __call__(self, x, key):
        return self.dropout(self.mlp(x), key=key)


def loss_fn(model, batch, key):
    out = jax.vmap(model)(batch["x"], jax.random.split(key, len(batch["x"])))
    return jnp.mean((out - batch["x"][:, :2]) ** 2)


def step(state, batch):
    model, opt_state, key = state
    key, own = jax.random.split(key)
    own = jax.random.fold_in(own, jax.lax.axis_index("batch"))
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch, own)
    loss, grads = jax.lax.pmean((loss, grads), "batch")
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return (eqx.apply_updates(model, updates), opt_state, key), {"loss": loss}


train_step = jaxcross.crossover(step, axes="batch", donate_argnums=0)


def make_state(seed):
    model = Net(jax.random.key(seed))
    return model, optimizer.init(eqx.filter(model, eqx.is_array)), jax.random.key(seed)


def data(rank):
    rng = np.random.default_rng(rank)
    while True:
        yield {"x": rng.normal(size=(8, 4)).astype(np.float32)}


def train(job, seed):
    state = job.restore(make_state(seed), check_replicas=3)
    for batch in job.batches(data(world.rank), steps):
        job.state = state = train_step(state, batch)[0]
        if job.step % 3 == 0:
            job.save(state)
        if (job.name, job.step, world.rank) == ("b", kill_at, 1):
            os.kill(os.getpid(), signal.SIGKILL)
    return state


def arrays(state):
    leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    return [jax.random.key_data(x) if is_key(x) else x for x in leaves]


def check(state, seed):
    """Compares a job's state with a step outside of a run, and with `eqx.filter_jit`."""
    solo = make_state(seed)
    for _, batch in zip(range(steps), data(world.rank), strict=False):
        solo = train_step(solo, batch)[0]
    assert eqx.tree_equal(state, solo)
    assert state[0].mlp.activation is jax.nn.gelu and state[0].name == "net"
    assert state[0].dropout.p == 0.2 and state[0].dropout.inference is False

    @eqx.filter_jit
    def jitted(state, batches):  # all ranks at once
        params, static = eqx.partition(state, eqx.is_array)

        def of_rank(params, batch):
            return eqx.filter(step(eqx.combine(params, static), batch)[0], eqx.is_array)

        new = jax.vmap(of_rank, (None, 0), axis_name="batch")(params, batches)
        return eqx.combine(jax.tree.map(lambda x: x[0], new), static)

    other = make_state(seed)
    streams = [data(rank) for rank in range(world.size)]
    for _ in range(steps):
        other = jitted(other, jax.tree.map(lambda *x: np.stack(x), *map(next, streams)))
    for mine, theirs in zip(arrays(state), arrays(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=1e-5)


def skipped_step():
    def train_with_nan(job):
        job.nonfinite = "skip"
        state = job.restore(make_state(0))
        for n, batch in zip(range(4), data(world.rank), strict=False):
            batch["x"][:] = np.nan if (n, world.rank) == (2, 1) else batch["x"]
            job.state = state = train_step(state, batch)[0]
        return state

    with jaxcross.Runner(world) as runner:
        job = runner.add("nan", train_with_nan)
        runner.run()
    assert job.skipped == 1
    assert all(np.isfinite(x).all() for x in arrays(job.state))
    assert job.state[0].mlp.activation is jax.nn.gelu and job.state[0].dropout.p == 0.2


def unlike_functions():
    """The ranks would train different models, so the comparison of their states finds it."""
    activation = (jax.nn.relu, jax.nn.gelu)[world.rank]
    model = eqx.tree_at(lambda net: net.mlp.activation, Net(jax.random.key(0)), activation)
    for mode in ("check", "broadcast"):
        try:
            world.broadcast_or_check(model, mode=mode)
        except jaxcross.ExchangeError as error:
            assert "first at `.mlp.activation`: `jax." in str(error), error
        else:
            raise AssertionError(f"{mode} passed")


def synchronised_batch_norm():
    """Statistics and gradients are those of one batch norm over the examples of all ranks."""

    def make_step(axes, mean):
        def loss_fn(w, norm, state, x):
            apply = jax.vmap(norm, axis_name="examples", in_axes=(0, None), out_axes=(0, None))
            out, state = apply(x * w, state)
            return jnp.mean(jnp.exp(out)), state

        def normed_step(w, norm, state, x):
            (loss, state), grad = jax.value_and_grad(loss_fn, has_aux=True)(w, norm, state, x)
            return mean(loss), mean(grad), state

        return normed_step, eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axes, mode="batch")

    batches = [next(data(rank))["x"] for rank in range(world.size)]
    w = jnp.arange(1.0, 5.0)
    ours, made = make_step(("examples", "batch"), lambda x: jax.lax.pmean(x, "batch"))
    theirs, reference = make_step("examples", lambda x: x)
    mine = jaxcross.crossover(ours, axes="batch")(w, *made, batches[world.rank])
    other = eqx.filter_jit(theirs)(w, *reference, np.concatenate(batches))
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


checkpoints = jaxcross.Checkpoints(folder) if folder else None
with jaxcross.Runner(world, checkpoints=checkpoints) as runner:
    jobs = [runner.add(name, train, {"seed": seed}) for seed, name in enumerate("ab")]
    runner.run()
if not folder:
    unlike_functions()
    synchronised_batch_norm()
    for seed, job in enumerate(jobs):
        check(job.state, seed)
    assert len(train_step._roots) == 1, train_step._roots
    skipped_step()
np.savez(f"{result}-{world.rank}", *(x for job in jobs for x in arrays(job.state)))
