"""A script as the README shows it, whose jobs have worker processes.

workers.py [--unguarded] HOW
"""

import multiprocessing
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxcross

world = jaxcross.initialize(stall_timeout_s=300)

HOW = sys.argv[-1]
MAIN = __name__ == "__main__" or "--unguarded" in sys.argv
SIZE = 16
WORKERS = 1 if HOW in ("fork", "forkserver") else 2


@jaxcross.crossover(axes="batch")
def step(state, batch):
    return state + jax.lax.psum(batch.sum(), "batch"), {"sum": batch.sum()}


def scaled(index):
    """Runs in a worker, which knows its rank's number and may call `initialize`."""
    here = jaxcross.initialize()
    assert MAIN or (here is world and jax.default_backend() == "cpu")
    assert (here.rank, here.size, here.stall_timeout_s) == (world.rank, world.size, 300)
    assert here.rank_grid("batch").shape == (2,)
    return np.float32(index * (1 + world.rank))


if HOW == "grain":  # every worker imports this script, and importing Grain takes a second
    import grain
    from absl import flags

    flags.FLAGS(sys.argv[:1])

    class Scaled(grain.transforms.Map):
        def map(self, element):  # type: ignore[override]
            return scaled(element)

    def loader():
        return grain.DataLoader(
            data_source=range(SIZE),  # type: ignore[arg-type]
            sampler=grain.samplers.SequentialSampler(SIZE),
            shard_options=grain.sharding.ShardOptions(world.rank, world.size),
            operations=[Scaled(), grain.transforms.Batch(2)],
            worker_count=WORKERS,
        )


def train(job):
    state = job.restore(jnp.zeros(()))
    if HOW == "grain":
        for batch in job.batches(loader()):
            state, _ = step(state, batch)
        return state
    with multiprocessing.get_context(HOW).Pool(WORKERS) as pool:
        for batch in job.batches(pool.imap(scaled, range(world.rank, SIZE, world.size))):
            state, _ = step(state, batch)
    return state


if MAIN:
    with jaxcross.Runner(world) as runner:
        job = runner.add("a", train)
        runner.run()  # the line that workers must not come to
    assert float(job.state) == sum(range(0, SIZE, 2)) + 2 * sum(range(1, SIZE, 2)), job.state
    print("trained", flush=True)
