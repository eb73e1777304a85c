"""Cross-entropy over a vocabulary that is cut over ranks, as a mean over all tokens of the global
batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxcross.tensor.collectives import reduce_from
from jaxcross.tensor.layers import in_vocabulary, owned
from jaxcross.tensor.mesh import Mesh


def cross_entropy(
    logits: jax.Array, labels: jax.Array, mesh: Mesh, weights: jax.Array | None = None
) -> jax.Array:
    """The mean of `-log softmax(logits)[label]` over every token of every rank: a scalar, the same
    on every rank.

    Divided by the number of tokens of the *global* batch, so that gradients summed over ranks are
    those of the serial model. No rank holds all logits of a token: a maximum, and a sum of two
    numbers a token, are made over `mesh.inner`; a scalar is summed over `mesh.batch`. Computes in
    float32 at least; sends nothing backward.

    Args:
        logits: `[..., vocabulary / ranks]`, this rank's columns for its own tokens.
        labels: `[...]`, integers from 0 to below the vocabulary, of the same tokens. Another label
            makes the loss and the gradient of its token NaN, unless the token is left out.
        mesh: The ranks.
        weights: `[...]`, a token's weight; 0 leaves it out, whatever its label and its logits are:
            infinite or NaN logits get the gradient 0. The sum of all ranks' weights must be
            positive.

    Raises:
        ValueError: Labels or weights have another shape than the tokens of `logits`.

    Source: Shoeybi et al., arXiv 1909.08053, section 3; for the grid, Xu et al., arXiv 2104.05343,
    section 3.
    """
    for name, given in (("labels", labels), ("weights", weights)):
        if given is not None and given.shape != logits.shape[:-1]:
            raise ValueError(
                f"The {name} have shape {given.shape}, but this rank's logits are those of "
                f"{logits.shape[:-1]} tokens. On the mesh {mesh.axes} a batch is cut over "
                f"{mesh.batch or 'no axis'}: cut {name} as the tokens are (`mesh.local_batch`)."
            )
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if weights is not None:
        # 0 times NaN is NaN, also in the backward pass: the logits themselves are replaced. Finite
        # ones need not be, and stay, so that the derivative in a weight that is 0 is right.
        left_out = (weights == 0) & ~jnp.all(jnp.isfinite(x), -1)
        x = jnp.where(left_out[..., None], 0, x)
    largest = jax.lax.stop_gradient(jnp.max(x, -1))
    if mesh.inner:
        largest = jax.lax.pmax(largest, mesh.inner)
    place, mine = owned(labels, x.shape[-1], mesh)
    target = jnp.where(mine, jnp.take_along_axis(x, place[..., None], -1)[..., 0] - largest, 0)
    both = reduce_from(
        jnp.stack([jnp.sum(jnp.exp(x - largest[..., None]), -1), target]), mesh.inner
    )
    known = in_vocabulary(labels, x.shape[-1] * mesh.size(mesh.inner))
    if weights is not None:
        known |= weights == 0
    losses = (jnp.log(both[0]) - both[1]) * jnp.where(known, 1, jnp.nan)
    if weights is None:
        return reduce_from(jnp.sum(losses), mesh.batch) / (labels.size * mesh.size(mesh.batch))
    sums = jnp.stack([jnp.sum(losses * weights), jnp.sum(weights).astype(losses.dtype)])
    total, count = reduce_from(sums, mesh.batch)
    return total / count
