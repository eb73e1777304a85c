"""A learning-rate sweep on handwritten digits: three jobs in crossover end in the states they reach alone, to the bit.

    python examples/mnist_sweep.py
    mpirun -n 2 python examples/mnist_sweep.py

The digits are the 1,797 images of 8x8 pixels that scikit-learn ships (UCI's optical recognition set): nothing is
downloaded. Each job is an ordinary loop.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from sklearn.datasets import load_digits

import jaxcross

TEST_IMAGES = 297
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.9)  # rates are data: one executable


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x)))


NET = Net()  # one for all jobs: a step is compiled for the functions that its state holds


def load():
    """Training and test set: `{"image": [n, 8, 8, 1], "label": [n]}`, the same shuffle on every rank."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    image, label = digits.images[order, :, :, None].astype(np.float32) / 16, digits.target[order].astype(np.int32)
    train = {"image": image[TEST_IMAGES:], "label": label[TEST_IMAGES:]}
    return train, {"image": image[:TEST_IMAGES], "label": label[:TEST_IMAGES]}


def batches(data, steps, batch_size, world):
    """This rank's share of `steps` random batches of `batch_size` images over all ranks."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        chosen = rng.choice(len(data["label"]), batch_size, replace=False)[world.rank :: world.size]
        yield jax.tree.map(lambda array, chosen=chosen: array[chosen], data)


@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads = lax.pmean((loss, grads), "batch")
    return state.apply_gradients(grads=grads), {"loss": loss}


@jax.jit
def accuracy(state, data):
    return jnp.mean(jnp.argmax(state.apply_fn({"params": state.params}, data["image"]), -1) == data["label"])


def sweep(world, policy, rates, steps, batch_size):
    """Trains one job for each learning rate; returns the report and the final states."""
    data, _ = load()

    def train(job, lr):
        params = NET.init(jax.random.key(0), data["image"][:1])["params"]
        state = TrainState.create(apply_fn=NET.apply, params=params, tx=SGD)
        state.opt_state.hyperparams["learning_rate"] = jnp.float32(lr)  # type: ignore[attr-defined]
        state = job.restore(state)
        for batch in job.batches(batches(data, steps, batch_size, world)):
            state, metrics = train_step(state, batch)
            job.log(metrics)
        return state

    with jaxcross.Runner(world, policy=policy) as runner:
        jobs = {lr: runner.add(f"lr-{lr}", train, lr=lr) for lr in rates}
        report = runner.run()
    return report, {lr: job.state for lr, job in jobs.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, nargs="+", default=[0.003, 0.03, 0.1])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=128, help="images over all ranks")
    parser.add_argument("--accuracy", type=float, default=0.95, help="that the best job must reach on the test images")
    args = parser.parse_args()
    world = jaxcross.initialize()
    say = print if world.rank == 0 else lambda *_: None

    _, alone = sweep(world, jaxcross.Sequential(), args.lr, args.steps, args.batch_size)
    report, together = sweep(world, jaxcross.RoundRobin(), args.lr, args.steps, args.batch_size)
    say(report)
    _, test = load()
    scores = {lr: float(accuracy(state, test)) for lr, state in together.items()}
    for lr, score in scores.items():
        pairs = zip(jax.tree.leaves(alone[lr]), jax.tree.leaves(together[lr]), strict=True)
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs), f"lr {lr}: states differ"
        say(f"lr {lr}: test accuracy {score:.3f}, in crossover and alone the same bits")
    assert max(scores.values()) >= args.accuracy, scores


if __name__ == "__main__":
    main()
