"""Norms of trees that are cut over ranks.

Optimizers that work element by element need nothing else: optax's SGD, Adam, AdamW and the like can
run on each rank's own parts unchanged. Optimizers that use whole matrices or their norms (LARS,
LAMB, Adafactor, Shampoo) don't work with sharded parameters, because they would take a part for the
whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.tensor.mesh import Mesh, named


def global_norm(tree: PyTree, specs: PyTree, mesh: Mesh) -> jax.Array:
    """Returns the serial tree's L2 norm, equal on every rank.

    Every element counts once, no matter how many ranks hold it. Makes one all-reduce of a scalar
    for each set of axes over which leaves are cut, i.e. at most two. Squares are summed at least in
    float32.

    Args:
        tree: This rank's parts. None, and what `optax.masked` left out, are ignored.
        specs: Each leaf's spec, as returned by `partition`.
        mesh: The ranks.

    Raises:
        ValueError: A spec belongs to another mesh.
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
    """Returns `optax.clip_by_global_norm` for gradients that are cut over ranks.

    It's stateless, and exchanges what `global_norm` does. If the norm isn't finite, every element
    becomes NaN on every rank, even on those whose own part is finite. Transformations that come
    after it and check for that, such as `optax.apply_if_finite`, then decide alike everywhere.

    ```python
    tx = optax.chain(jaxcross.tensor.clip_by_global_norm(1.0, specs, mesh), optax.adamw(1e-3))
    ```

    Args:
        max_norm: Largest norm that the whole gradient may have.
        specs: Each leaf's spec.
        mesh: The ranks.

    Raises:
        ValueError: `max_norm` isn't positive.
    """
    if not max_norm > 0:
        raise ValueError(
            f"`max_norm` of `clip_by_global_norm` is {max_norm!r}: a norm that is allowed is "
            "positive."
        )

    def init(params: optax.Params) -> optax.OptState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        norm = global_norm(updates, specs, mesh)
        norm = jnp.where(jnp.isfinite(norm), norm, jnp.nan)
        keep = norm < max_norm  # False if it's NaN
        return jax.tree.map(
            lambda u: jnp.where(keep, u, u / norm.astype(u.dtype) * max_norm), updates
        ), state

    return optax.GradientTransformation(init, update)


def _left_out(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, optax.MaskedNode)
