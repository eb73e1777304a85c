"""A job under `jax.enable_x64(True)` over real exchanges: how it is restored, cut, and fails."""

import pytest

SCRIPT = """
from functools import partial

import jaxcross

world = jaxcross.initialize(stall_timeout_s=60)

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def fails(x):
    if world.rank == 1 and x[0] >= 2:
        raise ValueError("the callback failed")
    return x


@jaxcross.crossover(axes="batch")
def step(state, batch):
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    seen = jax.pure_callback(fails, shape, batch.astype(jnp.float32))
    return {**state, "w": state["w"] - state["lr"] * jax.lax.psum(seen + 0 * batch, "batch")}


def wide(job, steps):
    with jax.enable_x64(True):
        lr = jnp.asarray(0.1 * (1 + world.rank))
        state = job.restore({"w": jnp.ones(2) + world.rank, "lr": lr}, mode="broadcast")
        assert state["w"].dtype == state["lr"].dtype == jnp.float64 and (state["w"] == 1).all()
        assert state["lr"] == 0.1 and state["lr"].weak_type and not state["lr"].committed
        for batch in job.batches([np.full(2, float(n)) for n in range(steps)]):
            assert batch.dtype == jnp.float64
            state = step(state, batch)
        return state


def narrow(job):
    state = job.restore({"p": jnp.ones(2, jnp.bfloat16), "lr": jnp.asarray(0.1)}, mode="broadcast")
    return state["p"] - state["lr"] * state["p"]


runner = jaxcross.Runner(world)
jobs = [runner.add(name, wide, {"steps": steps}) for name, steps in (("good", 2), ("bad", 4))]
narrow = runner.add("narrow", narrow)
failure = "(?s)^Job `bad` failed on rank 1 in step 3, segment 0 .*the callback failed"
with pytest.raises(jaxcross.JobError, match=failure):
    runner.run()
good, bad = jobs
assert (good.status, good.step, bad.status, bad.step) == ("ended", 2, "failed", 2)
assert good.state["w"].dtype == jnp.float64 and (np.asarray(good.state["w"]) == 1 - 0.1 * 2).all()
assert narrow.state.dtype == jnp.bfloat16


@partial(jaxcross.crossover, axes="batch", cut="auto", donate_argnums=0)
def searched(w, batch, rate):
    return [x - rate * jax.lax.psum(batch, "batch") for x in w]


def sole(job):
    with jax.enable_x64(True):
        return searched([np.ones(2), jnp.ones(2)], np.ones(2), 0.1)


runner = jaxcross.Runner(world)
sole = runner.add("sole", sole)
runner.run()
assert all(x.dtype == jnp.float64 and (x == 1 - 0.1 * 2).all() for x in sole.state)
print("end", flush=True)
"""


@pytest.mark.integration
def test_a_job_keeps_64_bits_and_fails_alone(mpirun, quick_compiler) -> None:
    finished = mpirun(2, SCRIPT, env=quick_compiler)
    assert finished.check().stdout.count("end") == 2, finished.stdout + finished.stderr


INITIAL = """
import jaxcross

world = jaxcross.initialize(stall_timeout_s=60)

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@jaxcross.crossover(axes="batch")
def step(state, batch):
    key, own = jax.random.split(state["dropout"])
    kept = jnp.where(jax.random.bernoulli(own, 0.5, batch.shape), batch, 0)
    return {"w": state["w"] + jax.lax.psum(kept, "batch"), "dropout": key}, {"kept": kept.sum()}


def start(rank):
    return {"w": jnp.zeros(64), "dropout": jax.random.key(rank)}


def plain(batch, steps):
    states = [start(rank) for rank in range(world.size)]
    for _ in range(steps):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
        stacked, _ = jax.vmap(step.step, axis_name="batch", in_axes=(0, None))(stacked, batch)
        states = [jax.tree.map(lambda x: x[rank], stacked) for rank in range(world.size)]
    return states[world.rank]


batch = np.arange(64, dtype=np.float32)
job = jaxcross.Job("dropout", step, start(world.rank), [batch] * 3, rank_local="dropout")
jaxcross.run([job])
wanted = plain(batch, 3)
assert (job.state["w"] == wanted["w"]).all() and 0 < job.state["w"].sum() < 6 * batch.sum()
assert (jax.random.key_data(job.state["dropout"]) == jax.random.key_data(wanted["dropout"])).all()

with pytest.raises(jaxcross.ExchangeError) as caught:
    jaxcross.run([jaxcross.Job("checked", step, start(world.rank), [batch])])
for word in (
    "['dropout']", "job.restore(state, rank_local=...)", "jaxcross.Job(..., rank_local=...)"
):
    assert word in str(caught.value), caught.value
print("end", flush=True)
"""


@pytest.mark.integration
def test_plain_loop_keeps_each_ranks_own_dropout_key(mpirun, quick_compiler):
    """Matches `vmap` over the ranks. Without `rank_local`, the error says what to write."""
    assert mpirun(2, INITIAL, env=quick_compiler).check().stdout.splitlines() == ["end"] * 2
