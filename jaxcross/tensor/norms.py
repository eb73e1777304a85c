"""Norms of trees that are split across ranks, and clipping by the global norm.

Optimizers that update each element independently, such as optax's SGD, Adam and AdamW, work with
sharded parameters as they are: each rank just applies them to its own parts. Clipping by the global
norm is different. No rank can compute the norm of the whole gradient by itself, so this module
computes it on all ranks together.

Optimizers that use whole matrices or their norms (LARS, LAMB, Adafactor, Shampoo) don't work with
sharded parameters. They would mistake a rank's part for the whole matrix and give wrong results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.tensor.mesh import Mesh, named


def global_norm(tree: PyTree, specs: PyTree, mesh: Mesh) -> jax.Array:
    """Returns the L2 norm of the whole tree, which is the same on every rank.

    Each element is counted only once, even if several ranks hold it. We add up the squares of all
    leaves that are cut over the same axes, and then all-reduce the sum over these axes. There are
    at most two such all-reduces, each of a scalar. Squares are summed at least in float32.

    Args:
        tree: This rank's parts. Leaves that are None or masked out by `optax.masked` are ignored.
        specs: Each leaf's spec, as returned by `partition`.
        mesh: The ranks.

    Raises:
        ValueError: A spec belongs to a different mesh.
    """
    groups: dict[tuple[str, ...], list[jax.Array]] = {}
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_left_out)
    for leaf, spec in zip(leaves, treedef.flatten_up_to(specs), strict=True):
        if _left_out(leaf):
            continue
        mesh.check_spec(tuple(spec), "A leaf")
        axes = tuple(a for a in named(tuple(spec)) if mesh.size((a,)) > 1)
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        groups.setdefault(axes, []).append(jnp.sum(wide * wide))
    squares = [
        jax.lax.psum(sum(parts), axes) if axes else sum(parts) for axes, parts in groups.items()
    ]
    return jnp.sqrt(jnp.asarray(sum(squares)))


def clip_by_global_norm(max_norm: float, specs: PyTree, mesh: Mesh) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm` for gradients that are split across ranks.

    The transformation is stateless, and communicates in the same way as `global_norm`. If the norm
    isn't finite, every element becomes NaN on all ranks, even on ranks whose own parts are finite.
    That way, a later transformation that checks for non-finite gradients, such as
    `optax.apply_if_finite`, makes the same decision on every rank.

    ```python
    tx = optax.chain(jaxcross.tensor.clip_by_global_norm(1.0, specs, mesh), optax.adamw(1e-3))
    ```

    Args:
        max_norm: The largest norm that the whole gradient may have.
        specs: Each leaf's spec.
        mesh: The ranks.

    Raises:
        ValueError: `max_norm` isn't positive.
    """
    if not max_norm > 0:
        raise ValueError(f"`max_norm` of `clip_by_global_norm` must be above 0, got {max_norm!r}.")

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        norm = global_norm(updates, specs, mesh)
        norm = jnp.where(jnp.isfinite(norm), norm, jnp.nan)
        keep = norm < max_norm  # False if the norm is NaN
        return jax.tree.map(
            lambda u: jnp.where(keep, u, u / norm.astype(u.dtype) * max_norm), updates
        ), state

    return optax.GradientTransformation(init, update)


def _left_out(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, optax.MaskedNode)
