"""Every rank: keeps all results of 50 steps, and compares them with copies at the end.

The results must never change, although MPI reuses its receive buffers; the arrays are large enough
to be received into such buffers (arenas). Two jobs alternate, both of which donate their states,
skip steps whose gradients aren't finite, and save checkpoints while they run. The exchanges of the
job `delayed` also run during the computation of its next step.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross
from jaxcross import exchange

WORLD = jaxcross.initialize(stall_timeout_s=60)
STEPS, WIDTH = 50, 160  # a matrix has 100 kB
BAD = (7, 20)
KEPT: dict[str, list[tuple[object, list[bytes]]]] = {}


def make(tx):
    @jaxcross.crossover(axes="batch", donate_argnums=(0, 1))
    def step(w, opt, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        updates, opt = tx.update(grads, opt, w)
        # The result of an all-gather is MPI's receive buffer itself. Small sums are sent together
        # in one message, so their results are copied out of that message's buffer.
        every, total = jax.lax.all_gather(grads, "batch"), jax.lax.psum(grads, "batch")
        seen = {"loss": jax.lax.pmean(loss, "batch"), "every": every, "total": total, "more": w + 1}
        return optax.apply_updates(w, updates), opt, seen

    return step, tx.init(jnp.eye(WIDTH))


def train(job, step, opt, bad):
    w, opt = job.restore((jnp.eye(WIDTH) * 0.5, opt))
    job.nonfinite = "skip" if bad else "ignore"
    rng, kept = np.random.default_rng(WORLD.rank), KEPT.setdefault(job.name, [])
    for n in range(STEPS):
        x = rng.normal(size=(4, WIDTH)).astype(np.float32)
        w, opt, seen = step(w, opt, x * np.nan if n in bad else x)
        kept.append((seen, [np.array(v).tobytes() for v in jax.tree.leaves(seen)]))
        job.save((w, opt))
    kept.append(((w, opt), [np.array(v).tobytes() for v in jax.tree.leaves((w, opt))]))


def main():
    folder = sys.argv[1]
    runner = jaxcross.Runner(WORLD, checkpoints=jaxcross.Checkpoints(folder, every=3))
    for name, tx in {
        "mean": optax.chain(exchange.mean("batch"), optax.sgd(0.1, momentum=0.9)),
        "delayed": exchange.delayed_mean(optax.sgd(0.1, momentum=0.9), "batch"),
    }.items():
        step, opt = make(tx)
        runner.add(name, train, {"step": step, "opt": opt, "bad": BAD if name == "mean" else ()})
    runner.run()
    for name, kept in KEPT.items():
        for n, (values, then) in enumerate(kept):
            now = [np.asarray(v).tobytes() for v in jax.tree.leaves(values)]
            assert now == then, f"{name}: what step {n} returned has changed"
    assert len(KEPT["mean"]) == len(KEPT["delayed"]) == STEPS + 1
    used = WORLD.arena.nbytes
    assert (used > 0) == (WORLD.over == "mpi4py"), used
    print(f"rank {WORLD.rank}: kept", flush=True)


main()
