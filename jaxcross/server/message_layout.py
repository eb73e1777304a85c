"""Splits a tree of arrays into one flat message per server, and joins these messages again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._pytree import PyTree, leaves_with_paths, shape_and_type

_ALIGNMENT = 64


class MessageLayout:
    """Splits every leaf into P equal, zero-padded parts; message p contains part p of each leaf.

    A message is a byte array (uint8) that contains a server's part of the parameters. Since each
    leaf is split separately, every server's part is a tree with the same structure as the
    parameters, and all messages have the same length. The class is pure: it neither communicates
    nor modifies its arguments.

    Args:
        params: The tree; its leaves must be floating-point or complex arrays.
        ranks: Number of servers, P.

    Raises:
        TypeError: A leaf has any other type.

    Attributes:
        treedef: Structure of the tree.
        nbytes: Length of a message.
    """

    def __init__(self, params: PyTree, ranks: int) -> None:
        self._ranks = ranks
        self.treedef = jax.tree.structure(params)
        found = leaves_with_paths(params)
        self._names = [path for path, _ in found]
        self._forms = [shape_and_type(leaf) for _, leaf in found]
        for name, (_, dtype) in zip(self._names, self._forms, strict=True):
            if not jnp.issubdtype(dtype, np.inexact):
                raise TypeError(
                    f"`{name}` of the parameters is of type {dtype}, but a parameter server can "
                    "only train floating-point numbers. Leave counters, keys and the like out of "
                    "`params`."
                )
        self._widths = [-(-math.prod(shape) // ranks) for shape, _ in self._forms]
        sizes = (
            -(-width * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            for width, (_, dtype) in zip(self._widths, self._forms, strict=True)
        )
        *self._starts, self.nbytes = itertools.accumulate(sizes, initial=0)

    def types(self) -> PyTree:
        """Returns the shapes and element types of the parameters, as a tree."""
        return jax.tree.unflatten(
            self.treedef, [jax.ShapeDtypeStruct(*form) for form in self._forms]
        )

    def leaves(self, tree: PyTree) -> list[jax.Array]:
        """Returns the leaves of `tree`, which must match the parameters.

        Raises:
            ValueError: Its structure, a shape or an element type doesn't match.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"`grads` of `push_pull` must have the same structure as the parameters, "
                f"{self.treedef}, got {treedef}."
            )
        for name, leaf, (shape, dtype) in zip(self._names, leaves, self._forms, strict=True):
            got_shape, got = shape_and_type(leaf)
            if (got_shape, got) != (shape, dtype):
                raise ValueError(
                    f"the gradient `{name}` is {got}{list(got_shape)}, but its parameter is "
                    f"{dtype}{list(shape)}. Each must have its parameter's shape and type, because "
                    "the servers expect messages of a fixed length. Cast the gradient, or check "
                    "whether it is transposed."
                )
        return leaves

    def parts(self, leaves: Sequence[jax.typing.ArrayLike]) -> list[np.ndarray]:
        """Returns one message per server."""
        messages = [np.zeros(self.nbytes, np.uint8) for _ in range(self._ranks)]
        columns = [self.views(message) for message in messages]
        for n, (leaf, width) in enumerate(zip(leaves, self._widths, strict=True)):
            flat = np.asarray(leaf).reshape(-1)
            for rank, column in enumerate(columns):
                part = flat[rank * width : (rank + 1) * width]
                column[n][: part.size] = part
        return messages

    def views(self, message: np.ndarray) -> list[np.ndarray]:
        """Returns a flat view of each leaf's part of a message."""
        return [
            message[start : start + width * dtype.itemsize].view(dtype)
            for start, width, (_, dtype) in zip(
                self._starts, self._widths, self._forms, strict=True
            )
        ]

    def message(self, parts: Sequence[jax.typing.ArrayLike]) -> np.ndarray:
        """Packs the leaves' parts into a message; the inverse of `views`."""
        message = np.zeros(self.nbytes, np.uint8)
        for view, part in zip(self.views(message), parts, strict=True):
            view[:] = part
        return message

    def join(self, messages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reassembles the whole leaves from one message per server."""
        columns = zip(*(self.views(message) for message in messages), strict=True)
        return [
            np.concatenate(parts)[: math.prod(shape)].reshape(shape)
            for parts, (shape, _) in zip(columns, self._forms, strict=True)
        ]
