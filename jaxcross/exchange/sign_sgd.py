"""signSGD with majority vote: every rank votes on the sign of each element with one bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxcross.exchange import bits, collectives
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.flat import layout
from jaxcross.exchange.validation import check_real


def sign_sgd(axes: collectives.Axes) -> optax.GradientTransformation:
    """Returns +1 or -1 for each element, as on most ranks; the same on every rank. Stateless,
    deterministic.

    A zero votes +1 and a tie gives +1. A leaf that is all zeros on all ranks stays zero; one with
    NaN or infinity on any rank becomes NaN on every rank. The size of gradients is lost: use a
    small learning rate.

    Rank r counts the votes on the r-th part of all elements: `2 (P-1)/P D'/8` bytes a rank, D'
    being all elements padded to a multiple of 8 P, and `2 (P-1)/P` of 8 bytes a leaf.

    ```python
    tx = optax.chain(jaxcross.exchange.sign_sgd("batch"), optax.add_decayed_weights(1e-4),
    optax.sgd(1e-4))
    ```

    Args:
        axes: One axis name; several are refused.

    Raises:
        ValueError: Several axes; (when traced) a leaf is not real floating-point.

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: Bernstein et al., arXiv 1802.04434 and 1810.05291, algorithm 1.
    """
    axis = collectives.one_axis(axes, "`sign_sgd`")

    def elect(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        check_real(updates, "the votes of `sign_sgd`")
        leaves, treedef = jax.tree.flatten(updates)
        size = jax.lax.axis_size(axis)
        where = layout(updates, multiple=8 * size, dtype=bool)
        if where.size == 0:
            return updates
        ballots = bits.pack(where.ravel(jax.tree.map(lambda x: x >= 0, updates)).reshape(size, -1))
        votes = bits.unpack(jax.lax.all_to_all(ballots, axis, 0, 0))
        majority = 2 * jnp.sum(votes, axis=0, dtype=jnp.int32) >= size
        elected = bits.unpack(collectives.gather(bits.pack(majority), axis)).reshape(-1)
        # A bit cannot encode zero, nor what is not finite: this travels as NaN, which a job's
        # `nonfinite` sees.
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
