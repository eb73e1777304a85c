"""Counts the examples in a job's steps, and chooses the unit that reports use for them."""

from __future__ import annotations

from typing import final

import jax
import numpy as np

from jaxcross._pytree import PyTree


@final
class ExampleCount:
    """Averages the number of examples per step, unless the job sets `per_step` itself.

    Attributes:
        per_step: How many examples all ranks together use per step, averaged over the steps so far;
            None if unknown.
        unit: What reports call an example.
    """

    __slots__ = ("_counted", "_in_batch", "_mean", "_steps", "per_step", "unit")

    def __init__(self) -> None:
        self.per_step: float | None = None
        self.unit = "examples"
        self._in_batch: float | None = None  # examples in the latest batch, all ranks together
        self._mean: float | None = None  # the `per_step` computed here; the job may set another
        self._counted = 0.0
        self._steps = 0

    def next_batch(self, batch: PyTree, ranks: int) -> None:
        """Records the size of the batch that the next step uses."""
        self._in_batch, unit = count_examples(batch, ranks)
        if self.per_step is None:
            self.per_step = self._mean = self._in_batch
            self.unit = unit

    def count_step(self) -> None:
        """Counts a step that used the latest batch."""
        if self._in_batch is None or self.per_step != self._mean:
            return
        self._counted += self._in_batch
        self._steps += 1
        self.per_step = self._mean = self._counted / self._steps


def count_examples(batch: PyTree, ranks: int) -> tuple[float | None, str]:
    """Returns how many examples all ranks together use per step, and what to call them."""
    shapes = [
        leaf.shape
        for leaf in jax.tree.leaves(batch)
        if isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim
    ]
    if not shapes:
        return None, "examples"
    shape = shapes[0]
    images = False
    if len(shape) == 4:
        # Channels are either last, as in Flax, or first. An image is larger than its number of
        # channels, which tells the two apart.
        size, channels = (shape[1:3], shape[3]) if shape[3] < shape[1] else (shape[2:], shape[1])
        images = min(size) > 4 and channels in (1, 3, 4)
    return float(shape[0] * ranks), "images" if images else "examples"
