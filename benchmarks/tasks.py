"""Two small training tasks on real data that Python packages ship. Measures nothing itself.

`digits` is a small convolutional network on the 1,797 handwritten digits of scikit-learn (UCI's
optical recognition set). `text` is a one-layer Transformer that predicts English prose character by
character. The prose is the text of the topics in Python's own `help()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from workloads import Transformer

TEST_IMAGES = 500
LENGTH, TEST_TEXTS = 32, 128


class Task(NamedTuple):
    """A model with training and test data.

    Attributes:
        model: Gives one row of logits per label.
        batch: Maps a key and a size to inputs and labels, which it draws from the training data.
        test: Inputs and labels that aren't used for training.
    """

    model: nn.Module
    batch: Callable[[Any, int], tuple[jax.Array, jax.Array]]
    test: tuple[jax.Array, jax.Array]

    def init(self, key: jax.Array) -> Any:
        return self.model.init(key, self.test[0][:1])

    def loss(self, params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits: Any = self.model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def evaluate(self, params: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the loss and the accuracy on the test data."""
        logits: Any = self.model.apply(params, self.test[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, self.test[1]).mean()
        return loss, jnp.mean(jnp.argmax(logits, -1) == self.test[1])


def convolve(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Any, **options: Any
) -> jax.Array:
    """Computes a size-preserving convolution with stride 1 as a matrix product of shifted copies.

    We simulate ranks with `vmap`, so each rank has its own kernel. An ordinary convolution then
    becomes a grouped one, which XLA's CPU backend computes with slow plain loops.
    """
    (high, wide), (height, width) = kernel.shape[:2], x.shape[1:3]
    padded = jnp.pad(x, ((0, 0), (high // 2, high // 2), (wide // 2, wide // 2), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(high) for j in range(wide)]
    return jnp.concatenate(shifted, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


class ConvNet(nn.Module):
    """Maps images of shape `[batch, 8, 8, 1]` to ten logits."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3), conv_general_dilated=convolve)(x))
            batch, height, width, _ = x.shape
            x = x.reshape(batch, height // 2, 2, width // 2, 2, features).mean((2, 4))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def digits() -> Task:
    from sklearn.datasets import load_digits  # takes a second to import

    found: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    image = jnp.asarray(found.images[order, :, :, None] / 16, jnp.float32)
    label = jnp.asarray(found.target[order], jnp.int32)

    def batch(key: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        chosen = jax.random.randint(key, (size,), TEST_IMAGES, len(label))
        return image[chosen], label[chosen]

    return Task(ConvNet(), batch, (image[:TEST_IMAGES], label[:TEST_IMAGES]))


def text() -> Task:
    prose = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(prose.encode("ascii", "replace"), np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(codes, LENGTH + 1)
    held_out = len(codes) * 9 // 10  # the last tenth
    test = jnp.asarray(windows[np.linspace(held_out, len(windows) - 1, TEST_TEXTS, dtype=int)])
    train = jnp.asarray(codes[:held_out])

    def batch(key: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        starts = jax.random.randint(key, (size, 1), 0, held_out - LENGTH)
        window = train[starts + jnp.arange(LENGTH + 1)]
        return window[:, :-1], window[:, 1:]

    return Task(Transformer(layers=1, width=64, vocabulary=128), batch, (test[:, :-1], test[:, 1:]))
