"""A rank's part of the parameters and the optimizer's state, held in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from jaxcross._pytree import PyTree
from jaxcross.exchange import check_elementwise
from jaxcross.server.message_layout import MessageLayout


class ServedPart:
    """Stores this rank's part and steps the optimizer on it.

    All computation runs on the CPU device and thus never occupies an accelerator.

    Args:
        optimizer: Must work element by element, because it only gets to see flat parts of the
            leaves.
        layout: Layout of the parameters.
        message: This rank's part of the initial parameters.
        ranks: Number of workers, by which sums of gradients are divided.

    Raises:
        ValueError: The optimizer does not work element by element.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        layout: MessageLayout,
        message: np.ndarray,
        *,
        ranks: int,
    ) -> None:
        self._layout = layout
        self._ranks = ranks
        self._message = message
        self._cpu = jax.local_devices(backend="cpu")[0]
        self._params = self._tree(layout.views(message))
        with jax.default_device(self._cpu):
            self._state = jax.device_put(optimizer.init(self._params), self._cpu)
        place = SingleDeviceSharding(self._cpu)
        grads = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), self._params
        )

        def step(
            grads: optax.Updates, state: optax.OptState, params: optax.Params
        ) -> tuple[optax.Params, optax.OptState]:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        whole = layout.types()
        check_elementwise(
            optimizer, (whole, whole), (grads, grads), self._state, "a parameter server"
        )
        # Compile now rather than on the first step, so that errors in the optimizer surface in the
        # call that it was passed to.
        self._step = jax.jit(step).lower(grads, self._state, self._params).compile()

    def apply(self, gradients: Mapping[int, np.ndarray]) -> None:
        """Takes one step on the sum of the given gradients, divided by the total number of ranks.

        Waits until the step is done.
        """
        # Add in rank order, regardless of the order of arrival, so that the same gradients always
        # yield bitwise the same mean.
        columns = zip(
            *(self._layout.views(gradients[rank]) for rank in sorted(gradients)), strict=True
        )
        mean = self._tree([_mean(parts, self._ranks) for parts in columns])
        self._params, self._state = self._step(mean, self._state, self._params)
        self._message = self._layout.message([np.asarray(x) for x in jax.tree.leaves(self._params)])

    def message(self) -> np.ndarray:
        """Returns this rank's part of the parameters as a message, which is never modified."""
        return self._message

    def _tree(self, parts: list[np.ndarray]) -> PyTree:
        return jax.tree.unflatten(self._layout.treedef, jax.device_put(parts, self._cpu))


def _mean(parts: tuple[np.ndarray, ...], ranks: int) -> np.ndarray:
    """Divides the sum of `parts` by `ranks`. 16-bit floats are summed in float32."""
    dtype = parts[0].dtype
    total = parts[0].astype(np.float32 if dtype.itemsize == 2 else dtype)
    for part in parts[1:]:
        total += part
    return (total / ranks).astype(dtype)
