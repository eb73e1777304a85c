"""One rank of benchmarks/kill_resume.py: three jobs that may kill themselves at a given moment.

    KILL='{"rank": 0, "at": "sync", "count": 3}' mpirun -n 2 python
        benchmarks/kill_resume_worker.py FOLDER

All jobs save checkpoints, are evaluated, and keep their best states. Each job has something that's
difficult to restore:

- The first job has rank-local residuals (top-k), reads Grain's iterator, and stops early.
- The second job has dropout, and reads a generator.
- The third job uses streaming DiLoCo with 8 bits, so in almost every state a fragment of its model
  is still to be exchanged.

The process can be killed at a step, a save, an fsync, a deletion, or a moment inside orbax's
writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross
from jaxcross import _files
from jaxcross.checkpoint import arrays, folders

WORLD = jaxcross.initialize(stall_timeout_s=120)
STEPS, EVERY, KEEP, EVALUATE = 24, 3, 2, 4


class Killer:
    """Ends this process at, or `delay_s` after, the `count`-th event of one kind.

    It uses SIGKILL or, for an `interrupt` at a step, SIGINT like Ctrl-C.
    """

    def __init__(self, text: str) -> None:
        plan = json.loads(text)
        mine = plan.get("rank") == WORLD.rank
        self.lock = threading.Lock()
        self.reference = plan.get("at") == "reference"
        self.at, self.left, self.delay_s = (
            plan.get("at") if mine else None,
            plan.get("count"),
            plan.get("delay_s", 0.0),
        )

    def reached(self, what: str) -> None:
        if what != self.at and (what, self.at) != ("step", "interrupt"):
            return
        with self.lock:  # each job runs in a thread
            self.left -= 1
            now = self.left == 0
        if now and self.delay_s:
            threading.Timer(self.delay_s, self.die).start()
        elif now:
            self.die()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGINT if self.at == "interrupt" else signal.SIGKILL)

    def around(self, owner: Any, name: str, what: str) -> Any:
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.reached(what)
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, wrapped)


def network(tx: optax.GradientTransformation, dropout: float) -> tuple[Callable[..., Any], Any]:
    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        params, opt_state, key = state
        key, used = jax.random.split(key)
        used = jax.random.fold_in(used, jax.lax.axis_index("batch"))

        def loss_of(params: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["w1"])
            hidden *= jax.random.bernoulli(used, 1 - dropout, hidden.shape)
            return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), {
            "loss": jax.lax.pmean(loss, "batch")
        }

    rng = np.random.default_rng(
        1
    )  # NumPy, because JAX would compile each eager operation in every start
    params = {"w1": rng.normal(size=(8, 16)), "w2": rng.normal(size=(16, 1))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    return step, (params, jax.jit(tx.init)(params), jax.random.key(1))


def batch_of(seed: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([WORLD.rank, int(seed)])
    return {
        "x": rng.normal(size=(4, 8)).astype(np.float32),
        "y": rng.normal(size=(4, 1)).astype(np.float32),
    }


def from_grain() -> Any:
    return grain.MapDataset.range(STEPS + 8).shuffle(seed=3).map(batch_of).to_iter_dataset()


def from_generator() -> Iterator[Any]:
    rng = np.random.default_rng(5)
    while True:
        yield batch_of(rng.integers(10**6))


@jaxcross.crossover(axes="batch")
def score_of(w: Any) -> Any:
    return {"score": jax.lax.pmean(jnp.sum(jnp.sin(40 * w)), "batch")}


def train(
    job: Any, made: Any, data: Any, killer: Killer, digests: dict[int, str], patience: int
) -> Any:
    def evaluate(state: Any) -> Any:
        digests[job.step] = digest(state)
        return score_of(state[0]["w1"])

    step, state = made
    # Residuals differ between ranks and everything else is identical. The checkpoint finds out
    # which is which.
    state = job.restore(state, mode="local")
    job.every(EVALUATE, evaluate)
    job.every(
        EVALUATE, lambda state: float(state[0]["w2"][0, 0]), rank=WORLD.size - 1, name="alone"
    )
    job.stop_early("eval/score", mode="max", patience=patience, min_delta=1e3)
    for batch in job.batches(data, STEPS):
        killer.reached("step")
        state, metrics = step(state, batch)
        job.state = state
        job.log(metrics)
        if job.step % EVERY == 0:
            job.save(state)
    return state


def digest(state: Any) -> str:
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        content.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return content.hexdigest()


def best_of(folder: Path, job: str, state: Any) -> tuple[int, str]:
    best, step = jaxcross.load_checkpoint(folder, job, state, best=True, rank=WORLD.rank)
    return step, digest(best)


def main() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in a script's background, SIGINT would be ignored
    folder = Path(sys.argv[1])
    killer = Killer(os.environ.get("KILL", "{}"))
    compressed = optax.chain(
        jaxcross.exchange.top_k(0.25, axes="batch"), optax.sgd(0.05, momentum=0.9)
    )
    deltas = jaxcross.exchange.adasum("batch", optax.adam(0.01))  # each rank has different moments
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    streaming = jaxcross.exchange.streaming_diloco(
        optax.adam(0.01), outer, "batch", every=4, fragments=2, delay=2, bits=8
    )
    kept = folder / "checkpoints"
    checkpoints = (
        None
        if killer.reference
        else jaxcross.Checkpoints(kept, keep=KEEP, best="eval/score", mode="max")
    )
    runner = jaxcross.Runner(WORLD, checkpoints=checkpoints, metrics=folder / "metrics")
    digests: dict[str, dict[int, str]] = {
        "top-k": {},
        "dropout": {},
        "streaming": {},
    }  # digests of the evaluated states
    made = {
        "top-k": network(compressed, 0.0),
        "dropout": network(deltas, 0.5),
        "streaming": network(streaming, 0.0),
    }
    data = {"top-k": from_grain(), "dropout": from_generator(), "streaming": from_generator()}
    jobs = [
        runner.add(
            name,
            train,
            {
                "made": made[name],
                "data": data[name],
                "killer": killer,
                "digests": digests[name],
                "patience": n,
            },
        )
        for name, n in (
            ("top-k", 3),
            ("dropout", 99),
            ("streaming", 99),
        )  # the first job stops after step 16
    ]
    with (
        killer.around(folders, "sync", "sync"),
        killer.around(_files, "sync", "sync"),
        killer.around(folders.Folders, "delete", "delete"),
        killer.around(arrays, "write", "write"),
    ):
        runner.run()
    outcome = {
        job.name: {
            "digest": digest(job.state),
            "step": job.step,
            "how": job.status,
            "digests": digests[job.name],
            "history": {s: m["loss"].hex() for s, m in job.history if "loss" in m},
            "best": None if killer.reference else best_of(kept, job.name, made[job.name][1]),
        }
        for job in jobs
    }
    (folder / f"final-{WORLD.rank}.json").write_text(json.dumps(outcome))


main()
