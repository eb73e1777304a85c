"""The norms of LARS and LAMB shared out over ranks (PTO): each computes its layers' ratios, and all
learn them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax

from jaxcross._pytree import PyTree
from jaxcross.exchange import collectives

Mask = PyTree | Callable[[optax.Params], PyTree]
"""Tree of booleans, or the function that makes one of the parameters."""


def scale_by_trust_ratio(
    axes: collectives.Axes,
    min_norm: float = 0.0,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
) -> optax.GradientTransformation:
    """Scale each layer's update by its trust ratio as optax's function of this name does, with 1/P
    of the work.

    After an exchange all ranks hold the same updates and parameters, and would all compute the same
    norms. Here each layer (leaf) belongs to one rank, shared out by elements. Stateless, the same
    bits on every rank, deterministic. Updates and parameters must already be equal on all ranks:
    put it behind `mean` or another exchange whose result is. It averages nothing. Without one, each
    rank scales its own updates by ratios of other ranks', and nothing tells. It pays where reading
    (P-1)/P of two arrays takes longer than waiting once more. On two ranks neither a Transformer's
    step nor ResNet-50's gained more than repeats differ by (benchmarks/results/exchanges.md): it is
    for many ranks and large models.

    ```python
    tx = optax.chain(jaxcross.exchange.mean("batch"), jaxcross.exchange.lars("batch", 0.1))
    ```

    Args:
        axes: One axis name; several are refused.
        min_norm: Smallest norm of a layer's parameters and updates.
        trust_coefficient: Factor of every ratio.
        eps: Added to the updates' norm.

    Raises:
        ValueError: `axes` names several axes; `update` got no `params`.

    Bytes that a rank receives: `(P-1) ceil(L/P)` numbers for L layers, 4 bytes each (8 where a
    layer is float64).

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: Shi et al., arXiv 2010.10458, section 3.2 (parallel tensor operator); You et al., arXiv
    1708.03888, equation 6.
    """
    axis = collectives.one_axis(axes, "`scale_by_trust_ratio`")

    def scale(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        if params is None:
            raise ValueError(
                "`scale_by_trust_ratio` got no `params`, whose norms it needs. Write "
                "`tx.update(grads, state, params)`."
            )
        leaves, treedef = jax.tree.flatten(updates)
        if not leaves:
            return updates
        pairs = list(zip(leaves, treedef.flatten_up_to(params), strict=True))
        owned = shares([u.size for u in leaves], jax.lax.axis_size(axis))
        dtype = jnp.result_type(
            jnp.float32, *(jnp.finfo(jnp.result_type(u, p)).dtype for u, p in pairs)
        )
        longest = max(map(len, owned))

        def of(layers: Sequence[int]) -> jax.Array:
            ratios = [
                _ratio(*pairs[i], min_norm, trust_coefficient, eps).astype(dtype) for i in layers
            ]
            return jnp.stack([*ratios, *[jnp.ones((), dtype)] * (longest - len(ratios))])

        # Only this rank's branch runs: over MPI the index is a constant.
        mine = jax.lax.switch(jax.lax.axis_index(axis), [partial(of, layers) for layers in owned])
        gathered = collectives.gather(mine, axis)
        out = list(leaves)
        for rank, layers in enumerate(owned):
            for place, i in enumerate(layers):
                update, param = pairs[i]
                out[i] = update * gathered[rank, place].astype(jnp.result_type(update, param))
        return jax.tree.unflatten(treedef, out)

    return optax.stateless(scale)


def lars(
    axes: collectives.Axes,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    weight_decay_mask: Mask = True,
    trust_coefficient: float = 0.001,
    eps: float = 0.0,
    trust_ratio_mask: Mask = True,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """LARS: SGD with momentum whose steps are scaled layer by layer; `optax.lars` with norms shared
    out over ranks.

    Of each layer `w` with gradient `g`: `u = g + weight_decay w`, `ratio = trust_coefficient |w| /
    (|u| + eps)` (1 where a norm is 0), `m <- momentum m - learning_rate ratio u`, and `w <- w + m`,
    or by Nesterov `w <- w + momentum m - learning_rate ratio u`. The momentum is the same on every
    rank. It averages no gradients: put it behind `mean`, or ranks drift apart, their layers scaled
    by ratios of other ranks' gradients, and nothing tells. For where it stands, what it sends and
    when it pays see `scale_by_trust_ratio`.

    Args:
        axes: One axis name; several are refused. Gradients and parameters are equal on its
            ranks.
        learning_rate: A number or a schedule.
        weight_decay: Of the parameters, added to the gradient before the norms.
        weight_decay_mask: A tree of booleans, or a function that makes one: which leaves decay.
        trust_coefficient: Factor of every ratio.
        eps: Added to the norm of `u`.
        trust_ratio_mask: Which leaves are scaled; usually not biases and norms.
        momentum: Its decay.
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ValueError: `axes` names several axes; `update` got no `params`.

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: You et al., arXiv 1708.03888, algorithm 1.
    """
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=weight_decay_mask),
        optax.masked(
            scale_by_trust_ratio(axes, trust_coefficient=trust_coefficient, eps=eps),
            mask=trust_ratio_mask,
        ),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=momentum, nesterov=nesterov),
    )


def lamb(
    axes: collectives.Axes,
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> optax.GradientTransformation:
    """LAMB: Adam whose steps are scaled layer by layer; `optax.lamb` with norms shared out over
    ranks.

    Of each layer `w` with Adam's corrected moments `m` and `v`: `u = m / (sqrt(v + eps_root) + eps)
    + weight_decay w`, `w <- w - learning_rate |w| / |u| u` (the ratio 1 where a norm is 0). The
    moments are the same on every rank. For where it stands, what it sends and when it pays see
    `scale_by_trust_ratio`. It averages no gradients: put it behind `mean`, or ranks drift apart,
    their layers scaled by ratios of other ranks' gradients, and nothing tells.

    Args:
        axes: One axis name; several are refused. Gradients and parameters are equal on its
            ranks.
        learning_rate: A number or a schedule.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the second moment's root.
        eps_root: Added to the second moment.
        weight_decay: Of the parameters, added to Adam's step before the norms.
        mask: A tree of booleans, or a function that makes one: which leaves decay; None: all.

    Raises:
        ValueError: `axes` names several axes; `update` got no `params`.

    Making it and `init` do not communicate; `update` does, over its axes, and every rank calls it
    in the same step.

    Source: You et al., arXiv 1904.00962, algorithm 2.
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root),
        optax.add_decayed_weights(weight_decay=weight_decay, mask=mask),
        scale_by_trust_ratio(axes),
        optax.scale_by_learning_rate(learning_rate),
    )


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The layers of each rank: at most ceil(L / P) of them, the largest given first to who has the
    fewest elements.
    """
    most = math.ceil(len(sizes) / ranks)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for layer in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min((r for r in range(ranks) if len(owned[r]) < most), key=lambda r: (load[r], r))
        owned[rank].append(layer)
        load[rank] += sizes[layer]
    return owned


def _ratio(
    update: jax.Array, param: jax.Array, min_norm: float, trust_coefficient: float, eps: float
) -> jax.Array:
    param_norm = optax.safe_norm(param, min_norm)
    update_norm = optax.safe_norm(update, min_norm)
    ratio = trust_coefficient * param_norm / (update_norm + eps)
    # A layer that is all zeros would never move.
    return jnp.where((param_norm == 0) | (update_norm == 0), jnp.ones((), ratio.dtype), ratio)
