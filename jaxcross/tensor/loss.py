"""Cross-entropy over a vocabulary that's split across ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxcross.tensor.copy_reduce import reduce_from
from jaxcross.tensor.layers import in_vocabulary, owned
from jaxcross.tensor.mesh import Mesh


def cross_entropy(
    logits: jax.Array, labels: jax.Array, mesh: Mesh, weights: jax.Array | None = None
) -> jax.Array:
    """Returns the mean of `-log softmax(logits)[label]` over all ranks' tokens, as a scalar.

    The result is the same on every rank: the total loss of all tokens, divided by the number of
    tokens in the *global* batch (or by the sum of their weights). Since we don't divide by the
    number of tokens on this rank, the ranks' gradients add up to the gradient of the serial model.

    A token's logits are spread over the ranks of `mesh.inner`, so computing the softmax takes two
    all-reduces: one for each token's largest logit, and one for two sums per token. The losses of
    all tokens (and the weights, if there are any) are then summed over `mesh.batch`. The backward
    pass doesn't send anything. Everything is computed at least in float32.

    Args:
        logits: `[..., vocabulary / ranks]`, this rank's columns for its own tokens.
        labels: `[...]`, integers from 0 to `vocabulary - 1`, for the same tokens. With any other
            label, a token's loss and gradient become NaN, unless its weight is 0.
        mesh: The ranks.
        weights: `[...]`, each token's weight. Tokens with a weight of 0 are left out, no matter
            what their labels and logits are; where logits are infinite or NaN, their gradient is 0.
            The sum of all ranks' weights must be positive.

    Raises:
        ValueError: `labels` or `weights` don't have the shape of `logits` without the last
            dimension.

    Source: Shoeybi et al., arXiv 1909.08053, section 3; for the grid, Xu et al., arXiv 2104.05343,
    section 3.
    """
    for name, given in (("labels", labels), ("weights", weights)):
        if given is not None and given.shape != logits.shape[:-1]:
            raise ValueError(
                f"The {name} have shape {given.shape}, but this rank's logits are those of "
                f"{logits.shape[:-1]} tokens. On the mesh {mesh.axes}, a batch is sharded over "
                f"{mesh.batch or 'no axis'}. Shard the {name} like the tokens, with "
                "`mesh.local_batch`."
            )
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if weights is not None:
        # A weight of 0 is supposed to leave a token out. But if the token's logits are NaN or
        # infinite, 0 times its loss is still NaN, in the backward pass as well, so we replace these
        # logits with 0. Finite logits have to stay, because the derivative with respect to the
        # weight depends on them.
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
