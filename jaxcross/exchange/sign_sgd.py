"""signSGD with majority vote: ranks vote on the sign of each element, at one bit per vote."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange import bits, collectives
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.layouts import vector_layout
from jaxcross.exchange.validation import check_real


def sign_sgd(axes: collectives.Axes) -> optax.GradientTransformation:
    """Replaces each element by its majority sign over ranks, +1 or -1, identical on every rank.

    Zero counts as a vote for +1, and ties go to +1 as well. A leaf that's all zeros on all ranks
    stays zero. If a leaf contains NaN or infinity on any rank, it becomes NaN on every rank. The
    magnitude of the gradients is lost, so use a small learning rate. Stateless and deterministic.

    Each rank tallies the votes for 1/P of all elements and sends the results to the others. Bytes
    received per rank: `2 (P-1)/P D'/8` for votes and results, where D' is the number of elements
    padded to a multiple of 8 P, plus `2 (P-1)/P` times 4 bytes per leaf for finding out which
    leaves are zero or not finite.

    ```python
    tx = optax.chain(jaxcross.exchange.sign_sgd("batch"), optax.add_decayed_weights(1e-4),
    optax.sgd(1e-4))
    ```

    Args:
        axes: One axis name. Several raise an error.

    Raises:
        ValueError: `axes` names several axes, or (when traced) a leaf is not real floating-point.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Bernstein et al., arXiv 1802.04434 and 1810.05291, algorithm 1.
    """
    axis = collectives.one_axis(axes, "`sign_sgd`")

    def elect(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        check_real(updates, "the votes of `sign_sgd`")
        leaves, treedef = jax.tree.flatten(updates)
        size = jax.lax.axis_size(axis)
        where = vector_layout(updates, multiple=8 * size, dtype=bool)
        if where.size == 0:
            return updates
        ballots = bits.pack(where.ravel(jax.tree.map(lambda x: x >= 0, updates)).reshape(size, -1))
        votes = bits.unpack(jax.lax.all_to_all(ballots, axis, 0, 0))
        majority = 2 * jnp.sum(votes, axis=0, dtype=jnp.int32) >= size
        elected = bits.unpack(collectives.gather(bits.pack(majority), axis)).reshape(-1)
        # A one-bit vote can't express that an element is zero or not finite. So we also sum one
        # number per leaf: 1 if the leaf has a nonzero element, 0 if it doesn't, and NaN if any of
        # its elements isn't finite. In the last case, the leaf becomes NaN on all ranks, which a
        # job's `nonfinite` check will catch.
        present = [jnp.where(jnp.all(jnp.isfinite(x)), jnp.any(x != 0), jnp.nan) for x in leaves]
        moved = jax.lax.psum(jnp.stack(present).astype(jnp.float32), axis)
        signed = jax.tree.leaves(where.unravel(bits.signs(elected)))
        out = [
            jnp.where(jnp.isnan(m), jnp.asarray(jnp.nan, s.dtype), jnp.where(m > 0, s, 0)).astype(
                x.dtype
            )
            for s, m, x in zip(signed, moved, leaves, strict=True)
        ]
        return jax.tree.unflatten(treedef, out)

    return exchange_once("sign_sgd", axes, optax.stateless(elect))
