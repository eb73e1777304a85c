"""A sweep on handwritten digits: Optuna proposes learning rates and widths and prunes poor trials.

    python examples/mnist_sweep.py
    jaxcross launch -n 2 examples/mnist_sweep.py

The digits are the 1,797 images of 8x8 pixels that ship with scikit-learn. If you interrupt the
sweep and start it again, it continues where it left off.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optuna
from sklearn.datasets import load_digits

import jaxcross

SGD = optax.inject_hyperparams(optax.sgd)(
    learning_rate=0.0, momentum=0.9
)  # rates are data: all trials share one executable
IMAGES, LABELS = load_digits(return_X_y=True)
ORDER = np.random.default_rng(0).permutation(len(LABELS))  # identical across ranks
IMAGES, LABELS = IMAGES[ORDER].astype(np.float32) / 16, LABELS[ORDER].astype(np.int32)
TRAIN, TEST = slice(297, None), slice(0, 297)


def logits(params, images):
    return jax.nn.relu(images @ params["in"]) @ params["out"] + params["bias"]


@jaxcross.crossover(axes="batch", donate_argnums=0)
def train_step(state, batch):
    def loss_fn(params):
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(params, batch["x"]), batch["y"]
        ).mean()

    params, opt_state = state
    grads = jax.lax.pmean(jax.grad(loss_fn)(params), "batch")
    updates, opt_state = SGD.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), {}


@jax.jit
def accuracy(state):
    return jnp.mean(jnp.argmax(logits(state[0], IMAGES[TEST]), -1) == LABELS[TEST])


def batches(size=128):
    world, rng = jaxcross.current_world(), np.random.default_rng(1)
    while True:
        chosen = rng.choice(len(LABELS[TRAIN]), size, replace=False)[world.rank :: world.size]
        yield {"x": IMAGES[TRAIN][chosen], "y": LABELS[TRAIN][chosen]}


def train(job, lr, width):
    keys = jax.random.split(jax.random.key(0))
    weights = {
        "in": jax.random.normal(keys[0], (64, width)) / 8,
        "out": jax.random.normal(keys[1], (width, 10)) / 8,
    }
    params = {**weights, "bias": jnp.zeros(10)}
    opt_state = SGD.init(params)
    opt_state.hyperparams["learning_rate"] = jnp.float32(lr)
    state = job.restore((params, opt_state))
    for batch in job.batches(batches(), args.steps):
        state, _ = train_step(state, batch)
        if job.step % 25 == 0:
            job.log({"accuracy": accuracy(state)})  # may end the trial here
            job.save(state)
    return state


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--trials", type=int, default=16)
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--folder", default="mnist-sweep")
args = parser.parse_args()
world = jaxcross.initialize()
study = optuna.create_study(
    direction="maximize", sampler=optuna.samplers.TPESampler(seed=0)
)  # prunes trials that are worse than the median
space = {"lr": optuna.distributions.FloatDistribution(1e-4, 1, log=True), "width": [32, 64]}
result = jaxcross.sweep(
    train,
    jaxcross.Optuna(study, space),
    metric="accuracy",
    trials=args.trials,
    concurrent=4,
    folder=args.folder,
)
if world.rank == 0:
    print(result)
