"""A float64 reference of Adasum in NumPy, and gradients of all ranks to test it with."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

SHAPES = {"matrix": (7, 3), "one": (1,), "scalar": (), "long": (50,), "empty": (0, 3), "few": (3,)}
EPS = float(jnp.finfo(jnp.float32).eps)


def pair(a, b):
    """Combines one layer of two ranks, in float64."""
    aa, bb, ab = np.vdot(a, a), np.vdot(b, b), np.vdot(a, b)
    return a * (1 - ab / (2 * aa) if aa else 1) + b * (1 - ab / (2 * bb) if bb else 1)


def tree(layer):
    """Combines one layer of all ranks, which are the first axis, in the documented order.

    If the number of ranks isn't a power of two, the ranks beyond the largest power of two are first
    combined with the ranks at the beginning. Then neighbours are combined pairwise, level by level.
    """
    vectors = [np.asarray(x, np.float64) for x in layer]
    base = 1 << (len(vectors).bit_length() - 1)
    folded = [
        pair(v, vectors[r + base]) if r + base < len(vectors) else v
        for r, v in enumerate(vectors[:base])
    ]
    while len(folded) > 1:
        folded = [pair(*folded[i : i + 2]) for i in range(0, len(folded), 2)]
    return folded[0]


def grads(ranks, seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    # All ranks share a common part, so that the dot products matter.
    return {
        name: np.asarray(rng.normal(size=(ranks, *shape)) + rng.normal(size=shape), np.float32)
        for name, shape in shapes.items()
    }


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64).ravel())
