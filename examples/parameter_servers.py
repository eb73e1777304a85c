"""Two parameter-server jobs in crossover: one exchanges with the servers while the other computes.

    mpirun -n 2 python examples/parameter_servers.py
    mpirun -n 2 python examples/parameter_servers.py --staleness 0 2

Each rank is a worker, and at the same time the server for its part of the parameters. A worker may
be up to `--staleness` steps ahead of the slowest one before it has to wait. With `inf`, which is
the default for both jobs, workers never wait for each other, so training is asynchronous. With 0, a
job gives the same result every time, bit for bit, and the example checks that crossover doesn't
change this result.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcross

CLASSES, FEATURES = 4, 16


def init(hidden):
    first, last = jax.random.split(jax.random.key(0))
    return {
        "first": jax.random.normal(first, (FEATURES, hidden)) / FEATURES**0.5,
        "last": jax.random.normal(last, (hidden, CLASSES)) / hidden**0.5,
    }


def logits(params, x):
    return jnp.tanh(x @ params["first"]) @ params["last"]


@jax.jit
@jax.value_and_grad
def loss_and_gradient(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch["x"]), batch["y"]
    ).mean()


def examples(rng, count):
    """Yields batches of points that are scattered around one centre per class."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    y = rng.integers(CLASSES, size=count)
    return {
        "x": (centres[y] + 0.8 * rng.normal(size=(count, FEATURES))).astype(np.float32),
        "y": y.astype(np.int32),
    }


def train(job, staleness, args, rank):
    rng = np.random.default_rng((1, rank))  # every rank draws different examples
    with jaxcross.ParameterServer(
        init(args.hidden), optax.sgd(args.lr), staleness=staleness
    ) as server:
        params = server.params
        for _ in range(args.steps):
            loss, grads = loss_and_gradient(params, examples(rng, args.batch_size))
            params = server.push_pull(grads)
            job.log({"loss": loss})
    return server.params


def run(world, policy, args):
    with jaxcross.Runner(world, policy) as runner:
        jobs = [
            runner.add(
                f"{n}, staleness {staleness:g}",
                train,
                {"staleness": staleness, "args": args, "rank": world.rank},
            )
            for n, staleness in enumerate(args.staleness)
        ]
        report = runner.run()
    return report, [job.state for job in jobs]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--staleness", type=float, nargs="+", default=[float("inf")] * 2, help="one a job"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="examples a rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--accuracy", type=float, default=0.9, help="that every job must reach")
    args = parser.parse_args()
    world = jaxcross.initialize()
    say = print if world.rank == 0 else lambda *_: None

    _, alone = run(world, jaxcross.Sequential(), args)
    report, together = run(world, jaxcross.RoundRobin(), args)
    say(report)
    test = examples(np.random.default_rng(2), 500)
    for staleness, before, after in zip(args.staleness, alone, together, strict=True):
        accuracy = float(jnp.mean(jnp.argmax(logits(after, test["x"]), -1) == test["y"]))
        if staleness == 0:
            assert jax.tree.all(jax.tree.map(jnp.array_equal, before, after)), (
                "without staleness, runs are equal"
            )
        say(f"staleness {staleness:g}: test accuracy {accuracy:.3f}")
        assert accuracy >= args.accuracy, accuracy


if __name__ == "__main__":
    main()
