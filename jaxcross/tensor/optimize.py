"""Norms of trees that are cut over ranks. An optimizer that works element by element needs no other
change.

Optax's SGD, Adam, AdamW and their kin run on each rank's own parts as they are. One that reads
whole matrices or their norms (LARS, LAMB, Adafactor, Shampoo) would read a part for the whole, and
is not for sharded parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.tensor.mesh import Mesh, named


def global_norm(tree: PyTree, specs: PyTree, mesh: Mesh) -> jax.Array:
    """Returns the L2 norm of the serial tree, equal everywhere: every element counts once, however
    many ranks hold it.

    One all-reduce of a scalar for each set of axes that leaves are cut over, two at most. Squares
    are summed in float32 at least.

    Args:
        tree: This rank's parts. What `optax.masked` left out, or None, counts for nothing.
        specs: Of each leaf, as `partition` gives them.
        mesh: The ranks.

    Raises:
        ValueError: A spec is another mesh's.
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
    """`optax.clip_by_global_norm` for gradients that are cut over ranks. Stateless; exchanges what
    `global_norm` does.

    If the norm is not finite, every element becomes NaN, on every rank, those included whose own
    part is finite: what comes behind and looks, such as `optax.apply_if_finite`, decides the same
    everywhere.

    ```python
    tx = optax.chain(jaxcross.tensor.clip_by_global_norm(1.0, specs, mesh), optax.adamw(1e-3))
    ```

    Args:
        max_norm: Longest that the whole gradient may be.
        specs: Of each leaf.
        mesh: The ranks.

    Raises:
        ValueError: `max_norm` is not positive.
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
        keep = norm < max_norm  # not of NaN
        return jax.tree.map(
            lambda u: jnp.where(keep, u, u / norm.astype(u.dtype) * max_norm), updates
        ), state

    return optax.GradientTransformation(init, update)


def _left_out(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, optax.MaskedNode)
