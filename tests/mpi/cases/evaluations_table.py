"""Every rank: a real job with evaluations on all ranks or one, early stopping, and a best state."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxcross

WORLD = jaxcross.initialize(stall_timeout_s=60)


@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(w, x):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - x[:, 0]) ** 2))(w)
    loss, grads = jax.lax.pmean((loss, grads), "batch")
    return w - 0.1 * grads, {"loss": loss}


@jaxcross.crossover(axes="batch")
def evaluate(w, x):
    return {"error": jax.lax.pmean(jnp.mean((x @ w - x[:, 0]) ** 2), "batch")}


def data():
    rng = np.random.default_rng(WORLD.rank)
    for _ in range(200):
        yield rng.normal(size=(8, 4)).astype(np.float32)


def start(folder, breaks_at):
    held_out = np.random.default_rng(99 + WORLD.rank).normal(size=(8, 4)).astype(np.float32)
    jobs = [jaxcross.Job(name, train_step, jnp.zeros(4), data()) for name in "ab"]
    for job in jobs:

        def scored(w, job=job):
            if (job.name, job.step) == breaks_at:
                raise KeyError("broken")
            return evaluate(w, held_out)

        job.every(5, scored)
        job.every(10, lambda w: float(w[0]), rank=WORLD.size - 1, name="alone")
        job.stop_early("eval/error", mode="min", patience_steps=10, min_delta=1e-2)
    kept = folder and jaxcross.Checkpoints(folder, every=4, keep=1, best="eval/error", mode="min")
    try:
        report = jaxcross.run(
            jobs, world=WORLD, checkpoints=kept, metrics=folder and f"{folder}-metrics"
        )
    except jaxcross.JobError as error:
        assert breaks_at and f"step {breaks_at[1]}" in str(error), error
        return None
    assert all(summary.how == "stopped early" for summary in report.jobs), report
    return [
        (job.step, np.asarray(job.state).tobytes(), summary.metrics)
        for job, summary in zip(jobs, report.jobs, strict=True)
    ]


def main():
    folder = sys.argv[1]
    whole = start(None, None)
    assert 15 < whole[0][0] < 200
    assert start(folder, ("a", 15)) is None
    mine = start(folder, None)
    assert mine[0] == whole[0] and mine[1][:2] == whole[1][:2], (
        mine,
        whole,
    )  # `b` had ended, so it logs nothing more
    best, step = jaxcross.load_checkpoint(folder, "a", jnp.zeros(4), best=True)
    texts = WORLD.control.allgather_text(f"{step} {np.asarray(best).tobytes().hex()} {mine[0][0]}")
    assert len(set(texts)) == 1 and step <= mine[0][0]
    print(f"passed on rank {WORLD.rank}", flush=True)


main()
