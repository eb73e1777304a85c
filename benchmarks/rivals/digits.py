"""The sweep of `sweep_to_target.py`: its trials, images, first weights and target. No framework.

JAX and PyTorch train from the same weights on the same batches, which is why NumPy makes both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

SIDE = 8
"""Pixels of a digit, in each direction, before it's enlarged."""
HELD_OUT = 288
"""Images on which accuracy is measured. The other 1,509 are for training."""
CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What every way of running the sweep has in common.

    Attributes:
        model: A ResNet of `examples/resnet.py`.
        filters: The number of filters in its first layer.
        image_size: Pixels in each direction, a multiple of 8 and one more. If it's a power of two
            and one more, all layers with a stride get images of an odd size, which Flax and PyTorch
            pad alike. Otherwise, they'd pad different sides.
        batch_size: Images per rank and step.
        every: Steps between two evaluations.
        target: The accuracy on the held-out images at which a trial ends.
        limit: The number of steps after which a trial ends without having reached the target.
        rates: Learning rates to try.
        momenta: Values of momentum to try, each with every learning rate.
    """

    model: str = "resnet8"
    filters: int = 96
    image_size: int = 33
    batch_size: int = 32
    every: int = 8
    target: float = 0.93
    limit: int = 64
    rates: Sequence[float] = (0.01, 0.03, 0.1, 0.3)
    momenta: Sequence[float] = (0.0, 0.5, 0.9)

    def trials(self) -> list[dict[str, float]]:
        """Returns the parameters of all trials, in the order of `jaxcross.Grid`."""
        return [
            {"rate": rate, "momentum": momentum}
            for rate, momentum in itertools.product(self.rates, self.momenta)
        ]

    def score(self, step: int, accuracy: float) -> float:
        """Returns how late a trial ends. The smallest score wins.

        It's the number of steps plus the share of images that are still wrong. So if two trials
        reach the target after as many steps, the more accurate one wins, and a trial that never
        reaches the target is behind all that do.
        """
        return step + (1.0 - accuracy)


def sweep_of(smoke: bool) -> Sweep:
    if not smoke:
        return Sweep()
    return Sweep(
        model="resnet8",
        filters=8,
        image_size=17,
        batch_size=16,
        every=2,
        target=0.3,
        limit=6,
        rates=(0.05, 0.2),
        momenta=(0.0, 0.9),
    )


@cache
def _digits() -> tuple[Any, Any]:
    """Returns all images, with values from -1 to 1, and their labels, in a fixed random order."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = images[order].reshape(-1, SIDE, SIDE).astype(np.float32) / 8 - 1
    return images, labels[order].astype(np.int32)


def _batch(sweep: Sweep, chosen: Any) -> dict[str, Any]:
    """Returns these images, enlarged and with three equal channels, and their labels."""
    images, labels = _digits()
    factor = sweep.image_size // SIDE
    large = images[chosen].repeat(factor, 1).repeat(factor, 2)
    large = np.pad(large, ((0, 0), (0, 1), (0, 1)), "edge")
    return {"image": np.repeat(large[..., None], 3, -1), "label": labels[chosen]}


def batches(sweep: Sweep, rank: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yields a rank's share of one batch after another, without end. All trials get the same."""
    random, size = np.random.default_rng(1), sweep.batch_size * ranks
    while True:
        order = HELD_OUT + random.permutation(len(_digits()[1]) - HELD_OUT)
        for first in range(0, len(order) - size + 1, size):
            yield _batch(sweep, order[first : first + size][rank::ranks])


def held_out(sweep: Sweep, rank: int, ranks: int) -> dict[str, Any]:
    """Returns a rank's share of the held-out images, as a single batch."""
    return _batch(sweep, np.arange(rank, HELD_OUT, ranks))


def kernels(shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Returns the first kernels of a network, whose shapes are those of Flax (inputs and outputs
    last), in the order of its layers. Each block's own layers come before its projection.

    Their standard deviation is that of He et al. (2015), i.e. the square root of 2 / inputs.
    """
    random = np.random.default_rng(2)
    return [
        random.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / math.prod(shape[:-1])))
        for shape in shapes
    ]
