"""Checkpoints: a killed run resumes, and its states can be loaded elsewhere."""

from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp

import jaxcross


class State(NamedTuple):
    w: jax.Array
    mask: jax.Array
    key: jax.Array


world = jaxcross.initialize()


@jaxcross.crossover(axes="batch")
def train_step(state: State, x: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    grad = jax.lax.pmean(state.w * state.mask * x, "batch")
    return state._replace(w=state.w - 0.1 * grad), {"grad": jnp.linalg.norm(grad)}


def make_state() -> State:
    return State(jnp.ones(4), jnp.ones(4), jax.random.key(world.rank))


def train(job: jaxcross.JobContext) -> State:
    state = job.restore(make_state(), rank_local=("mask", "key"), check_replicas=100)
    assert_type(state, State)
    for x in job.batches([jnp.ones(4)] * 1000):
        state, metrics = train_step(state, x)
        if job.step % 100 == 0:
            job.log(metrics)
            job.save(state)
    return state


kept = jaxcross.Checkpoints("checkpoints", every=100, keep=2, best="eval/norm", mode="min")
with jaxcross.Runner(world, checkpoints=kept) as runner:
    runner.add("by hand", train)
    try:
        runner.run()
    except jaxcross.JobError as error:
        print(error, error.cause_rank)

job = jaxcross.Job("plain", train_step, make_state(), [jnp.ones(4)] * 10, rank_local=("key",))
job.every(5, lambda state: {"norm": jnp.linalg.norm(state.w)})
jaxcross.run([job], checkpoints=jaxcross.Checkpoints("plain", every=5))

state, step = jaxcross.load_checkpoint("checkpoints", "by hand", make_state(), best=True)
assert_type(state, State)
assert_type(step, int)
