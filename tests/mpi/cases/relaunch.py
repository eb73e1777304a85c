"""A job of a run that is restarted: `relaunch.py FOLDER STRATEGY`. Files in FOLDER make it fail.

If there's a file `kill-<rank>-<step>`, that rank is killed before that step, but only once. If
there's a file `hold-<step>`, all ranks create the file `holds` and wait before that step until the
first file is deleted. A file `raise-<step>` makes the job raise an exception at that step.
"""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross

world = jaxcross.initialize(heartbeat_timeout_s=8)
FOLDER, STRATEGY = Path(sys.argv[1]), sys.argv[2]
STEPS = 40
top_k = jaxcross.exchange.top_k(0.25, axes="batch")
exchange = top_k if STRATEGY == "top_k" else jaxcross.exchange.mean(axes="batch")
tx = optax.chain(exchange, optax.sgd(0.05, momentum=0.9))


@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p - batch["y"]) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": jax.lax.pmean(loss, "batch")}


def data():
    rng = np.random.default_rng(world.rank)
    while True:
        x = rng.normal(size=(8, 4)).astype(np.float32)
        yield {"x": x, "y": x.sum(1, keepdims=True)}


def meet_fate(step):
    """Logs the time of the step, waits while the step is held, and dies if FOLDER says so."""
    with (FOLDER / f"times-{world.rank}").open("a") as stream:
        print(time.time(), step, world.size, file=stream)
    while (FOLDER / f"hold-{step}").exists():
        (FOLDER / "holds").touch()
        signal.sigtimedwait((), 0.05)
    kill = FOLDER / f"kill-{world.rank}-{step}"
    if kill.exists():
        kill.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (FOLDER / f"raise-{step}").exists():
        raise ValueError("a bad example")


def train(job):
    params = jnp.zeros((4, 1))
    state = job.restore((params, tx.init(params)))
    for batch in job.batches(data(), STEPS):
        meet_fate(job.step)
        state, metrics = train_step(state, batch)
        job.log(metrics)
        if job.step % 5 == 0:
            job.save(state)
    return state


with jaxcross.Runner(world, checkpoints=jaxcross.Checkpoints(FOLDER / "checkpoints")) as runner:
    job = runner.add("a", train)
    runner.run()
bits = [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(job.state)]
(FOLDER / f"final-{world.rank}").write_text(f"{job.step} {bits}")
