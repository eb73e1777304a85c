"""Gradient accumulation in a run: the bytes of twelve steps, equal results of every way to
accumulate, and the log.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import jaxcross
from jaxcross.exchange import accumulate, mean, top_k
from jaxcross.testing import over_ranks

world = jaxcross.initialize()

STEPS, K, SIZE = 12, 4, 1 << 10
GRADIENTS = (
    4 * SIZE * 2 * (world.size - 1) // world.size
)  # bytes that a rank receives when they are all-reduced
SGD = optax.sgd(0.1, momentum=0.9)


def before(grads, params):
    del params
    return jax.lax.pmean(grads, "batch")


# Each way with the number of exchanges it makes in twelve steps.
WAYS = {
    "accumulate": (accumulate(optax.chain(mean("batch"), SGD), every=K), 3),
    "MultiSteps": (optax.MultiSteps(optax.chain(mean("batch"), SGD), K), 12),
    "pmean before": (optax.chain(optax.stateless(before), accumulate(SGD, every=K)), 12),
}


def make(tx):
    def train_step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.sum((p - batch) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    return train_step


def batch(n, rank):
    return jnp.float32(10 * n + rank)


def trains(job, tx):
    step, params = STEPS_OF[job.name], jnp.linspace(-1, 1, SIZE)
    state = job.restore((params, tx.init(params)), mode="local")
    for n in job.batches(range(STEPS)):
        state, _ = step(state, batch(n, world.rank))
    return state


def run(*names):
    """Runs these jobs together. Returns their states, and the bytes that each has received."""
    runner = jaxcross.Runner(world)
    jobs = {name: runner.add(name, trains, {"tx": TXS[name]}) for name in names}
    rows = {row["name"]: row for row in runner.run().summary()["jobs"]}
    assert all(rows[name]["steps"] == STEPS for name in names)
    return {name: job.state for name, job in jobs.items()}, {
        n: r["bytes_per_step"] * STEPS for n, r in rows.items()
    }


def oracle(tx):
    """The states of all ranks under `vmap`."""
    step, params = make(tx), jnp.linspace(-1, 1, SIZE)
    states = [(params, tx.init(params))] * world.size
    call = over_ranks(step, {"batch": world.size})
    for n in range(STEPS):
        states = [
            state for state, _ in call([(s, batch(n, rank)) for rank, s in enumerate(states)])
        ]
    return [jax.tree.map(np.asarray, jax.tree.leaves(state)) for state in states]


def same(a, b):
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


logged = []
logging.getLogger("jaxcross").addFilter(lambda record: logged.append(record.getMessage()) or True)

TXS = {name: tx for name, (tx, _) in WAYS.items()}
TXS["top_k"] = accumulate(
    optax.chain(top_k(0.25, "batch", skip=lambda path, leaf: False), SGD), every=K
)
STEPS_OF = {name: jaxcross.crossover(make(tx), axes="batch") for name, tx in TXS.items()}
alone = {}
for name, (_, exchanges) in WAYS.items():
    states, received = run(name)
    alone |= states
    assert received[name] == exchanges * GRADIENTS, (name, received, GRADIENTS)
    np.testing.assert_allclose(states[name][0], alone["accumulate"][0], rtol=1e-5, atol=1e-5)
alone |= run("top_k")[0]
# Each oracle covers all ranks, so only one rank has to compile it.
mine = {name: oracle(tx) for name, tx in [*TXS.items()][world.rank :: world.size]}
wanted = {
    name: states[world.rank]
    for part in MPI.COMM_WORLD.allgather(mine)
    for name, states in part.items()
}
for name in TXS:
    for a, b in zip(jax.tree.leaves(alone[name]), wanted[name], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
together, _ = run(*TXS)
assert all(same(together[name], alone[name]) for name in TXS), "crossover is solo"

# Each step was compiled once. Compiling `MultiSteps` again logs the notice again, hence two.
STEPS_OF["MultiSteps"] = jaxcross.crossover(make(TXS["MultiSteps"]), axes="batch")
run("MultiSteps")
notices = [text for text in logged if "`jaxcross.exchange.accumulate(optimizer, every=k)`" in text]
assert len(notices) == 2 and len(set(notices)) == 1, logged
assert (
    "in every mini-step of `optax.MultiSteps`, at " in notices[0]
    and "(make.<locals>.train_step)" in notices[0]
)
print(f"rank {world.rank}: accumulated", flush=True)
