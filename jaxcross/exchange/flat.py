"""A tree of arrays as one padded vector, and back. Rings, halvings and bit-packing work on it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxcross._pytree import PyTree


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Position of each leaf of a tree in its vector. Static: holds shapes and types, but no arrays.

    Attributes:
        treedef: Structure of the tree.
        shapes: Shape of each leaf.
        dtypes: Element type of each leaf; `unravel` casts back to them.
        bounds: Leaf `i` occupies elements `bounds[i]` to `bounds[i + 1]`.
        length: Length of the vector: the elements of all leaves, padded with zeros to a multiple.
        dtype: Element type of the vector, which can represent every leaf's type.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    bounds: tuple[int, ...]
    length: int
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of elements of all leaves, without the padding."""
        return self.bounds[-1]

    def ravel(self, tree: PyTree) -> jax.Array:
        """Returns the tree's leaves one after the other, cast to `dtype` and padded with zeros.

        This is a copy.
        """
        parts = [
            jnp.asarray(x).reshape(-1).astype(self.dtype) for x in self.treedef.flatten_up_to(tree)
        ]
        if self.length > self.size:
            parts.append(jnp.zeros(self.length - self.size, self.dtype))
        return jnp.concatenate(parts) if parts else jnp.zeros(0, self.dtype)

    def unravel(self, vector: jax.Array) -> PyTree:
        """Returns the tree of the leaves in `vector`, in their own shapes and types."""
        ranges = itertools.pairwise(self.bounds)
        leaves = [
            jax.lax.slice_in_dim(vector, start, stop).reshape(shape).astype(dtype)
            for (start, stop), shape, dtype in zip(ranges, self.shapes, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)


def layout(tree: PyTree, *, multiple: int = 1, dtype: DTypeLike | None = None) -> Layout:
    """Returns the layout of `tree` in one vector whose length is a multiple of `multiple`.

    Args:
        tree: Arrays or `jax.ShapeDtypeStruct`; may be empty.
        multiple: Divisor of the vector's length, for example the number of ranks.
        dtype: Element type of the vector. If None, the type that all leaves' types promote to.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shapes = tuple(tuple(jnp.shape(x)) for x in leaves)
    dtypes = tuple(jnp.result_type(x) for x in leaves)
    if dtype is None:
        dtype = jnp.result_type(*dtypes) if dtypes else jnp.float32
    bounds = tuple(itertools.accumulate((math.prod(s) for s in shapes), initial=0))
    length = -(-bounds[-1] // multiple) * multiple
    dtype = jnp.dtype(dtype)
    return Layout(
        treedef=treedef, shapes=shapes, dtypes=dtypes, bounds=bounds, length=length, dtype=dtype
    )
