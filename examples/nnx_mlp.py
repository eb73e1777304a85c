"""A Flax NNX multilayer perceptron in both NNX styles, as two jobs in crossover with equal results.

    python examples/nnx_mlp.py
    mpirun -n 2 python examples/nnx_mlp.py

Each job is an ordinary loop around an ordinary NNX step. The only difference is that the step is
wrapped in `jaxcross.crossover` instead of `nnx.jit`. Both jobs learn the same parameters, bit for
bit.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jaxcross

CLASSES, FEATURES = 4, 16


class MLP(nnx.Module):
    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(FEATURES, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(hidden, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.first(x))))


def create(hidden):
    model = MLP(hidden, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def update(model, optimizer, batch):
    """Does the training step of both styles. Changes `model` and `optimizer` in place."""

    def loss_fn(model):
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, lax.pmean(grads, "batch"))
    return {"loss": lax.pmean(loss, "batch")}


def functional(job, hidden, data):
    """Trains in functional style: the state is an argument and a result, which the step merges and
    splits.
    """
    graphdef, state = nnx.split(create(hidden))

    @jaxcross.crossover(axes="batch", donate_argnums=0)
    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        metrics = update(model, optimizer, batch)
        return nnx.state((model, optimizer)), metrics

    for batch in job.batches(data):
        state, metrics = train_step(state, batch)
        job.log(metrics)
    return state


def objects(job, hidden, data):
    """Trains in NNX's own style: the step changes module and optimizer in place."""
    train_step = jaxcross.crossover(update, axes="batch")
    model, optimizer = create(hidden)
    for batch in job.batches(data):
        job.log(train_step(model, optimizer, batch))
    return nnx.state((model, optimizer))


def examples(rng, count):
    """Yields batches of points that are scattered around one centre per class."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    y = rng.integers(CLASSES, size=count)
    return {
        "x": (centres[y] + 0.8 * rng.normal(size=(count, FEATURES))).astype(np.float32),
        "y": y.astype(np.int32),
    }


def batches(steps, batch_size, world):
    rng = np.random.default_rng((1, world.rank))  # every rank draws different examples
    return (examples(rng, batch_size) for _ in range(steps))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="examples a rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--accuracy", type=float, default=0.9, help="that both jobs must reach")
    args = parser.parse_args()
    world = jaxcross.initialize()

    with jaxcross.Runner(world) as runner:
        jobs = [
            runner.add(
                job.__name__,
                job,
                {"hidden": args.hidden, "data": batches(args.steps, args.batch_size, world)},
            )
            for job in (functional, objects)
        ]
        report = runner.run()

    test = examples(np.random.default_rng(2), 500)
    logits = []
    for job in jobs:
        model, optimizer = create(args.hidden)
        nnx.update((model, optimizer), job.state)
        logits.append(nnx.view(model, deterministic=True)(jnp.asarray(test["x"])))
    assert jnp.array_equal(*logits), "the two idioms must learn the same bits"
    accuracy = float(jnp.mean(jnp.argmax(logits[0], -1) == test["y"]))
    if world.rank == 0:
        print(report)
        print(f"test accuracy {accuracy:.3f} in both idioms", flush=True)
    assert accuracy >= args.accuracy, accuracy


if __name__ == "__main__":
    main()
