"""LARS and LAMB with norms distributed over ranks (PTO).

Each rank computes the trust ratios for its share of the layers, and an all-gather distributes them
to everyone.
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
"""A tree of booleans, or a function that creates one from the parameters."""


def scale_by_trust_ratio(
    axes: collectives.Axes,
    min_norm: float = 0.0,
    trust_coefficient: float = 1.0,
    eps: float = 0.0,
) -> optax.GradientTransformation:
    """Scales each layer's update by its trust ratio, like optax does, but with 1/P of the work.

    A layer's (i.e. leaf's) trust ratio depends on the norms of its parameters and of its update.
    After an exchange of gradients, those are the same on all ranks, so normally every rank would
    compute the same norms. We assign each layer to a single rank instead, which computes its ratio
    on behalf of everyone. The assignment balances the number of elements per rank. Stateless,
    bitwise identical on every rank, and deterministic.

    Only the trust ratios are exchanged; nothing is averaged. So put this after `mean`, or after
    some other exchange that makes updates and parameters identical on all ranks. If they aren't,
    each rank silently scales its own updates by ratios computed from other ranks' updates.

    With P ranks, each rank is spared from reading (P-1)/P of the updates and parameters, but has to
    wait for one more exchange. On two ranks, the gain was within the noise for both a Transformer
    and ResNet-50 (benchmarks/results/exchanges.md). This is meant for large models on many ranks.

    ```python
    tx = optax.chain(jaxcross.exchange.mean("batch"), jaxcross.exchange.lars("batch", 0.1))
    ```

    Args:
        axes: One axis name. Several raise an error.
        min_norm: Lower bound on the norms of a layer's parameters and update.
        trust_coefficient: Factor of every ratio.
        eps: Added to the update's norm.

    Raises:
        ValueError: `axes` names several axes, or `update` got no `params`.

    Bytes received per rank: `(P-1) ceil(L/P)` numbers for L layers, 4 bytes each (8 if a layer is
    float64).

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

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

        # Over MPI, the rank's index is a constant, so only this rank's branch is executed.
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
    """LARS: SGD with momentum and per-layer step scaling. Like `optax.lars`, with distributed
    norms.

    For a layer `w` with gradient `g`, LARS first adds weight decay, `u = g + weight_decay w`. It
    then scales the step by the trust ratio `trust_coefficient |w| / (|u| + eps)`, or by 1 if either
    norm is 0. The momentum becomes `m <- momentum m - learning_rate ratio u`, and the layer `w <- w
    + m`, or with Nesterov momentum `w <- w + momentum m - learning_rate ratio u`. The momentum is
    the same on every rank.

    LARS doesn't average gradients, so put it after `mean`. If you forget to, there's no error, but
    the ranks drift apart, because they scale their own gradients by ratios that other ranks have
    computed from different ones. See `scale_by_trust_ratio` for what gets sent, and when this saves
    time.

    Args:
        axes: One axis name. Several raise an error. Gradients and parameters must be identical on
            its ranks.
        learning_rate: A number or a schedule.
        weight_decay: Factor of the parameters, added to the gradient before the norms.
        weight_decay_mask: A tree of booleans, or a function that makes one: which leaves decay.
        trust_coefficient: Factor of every ratio.
        eps: Added to the norm of `u`.
        trust_ratio_mask: Which leaves are scaled; usually not biases and norms.
        momentum: Decay of the momentum.
        nesterov: Whether to use Nesterov momentum.

    Raises:
        ValueError: `axes` names several axes, or `update` got no `params`.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

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
    """LAMB: Adam with per-layer step scaling. Like `optax.lamb`, with distributed norms.

    For a layer `w` with Adam's bias-corrected moments `m` and `v`, LAMB first computes Adam's step
    with weight decay, `u = m / (sqrt(v + eps_root) + eps) + weight_decay w`. It then scales the
    step by the ratio of the two norms, `w <- w - learning_rate |w| / |u| u`. If either norm is 0,
    the ratio is 1. The moments are the same on every rank.

    LAMB doesn't average gradients, so put it after `mean`. If you forget to, there's no error, but
    the ranks drift apart, because they scale their own gradients by ratios that other ranks have
    computed from different ones. See `scale_by_trust_ratio` for what gets sent, and when this saves
    time.

    Args:
        axes: One axis name. Several raise an error. Gradients and parameters must be identical on
            its ranks.
        learning_rate: A number or a schedule.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the second moment's root.
        eps_root: Added to the second moment.
        weight_decay: Factor of the parameters, added to Adam's step before the norms.
        mask: A tree of booleans, or a function that makes one: which leaves decay; None: all.

    Raises:
        ValueError: `axes` names several axes, or `update` got no `params`.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: You et al., arXiv 1904.00962, algorithm 2.
    """
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root),
        optax.add_decayed_weights(weight_decay=weight_decay, mask=mask),
        scale_by_trust_ratio(axes),
        optax.scale_by_learning_rate(learning_rate),
    )


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assigns layers to ranks, at most ceil(L / P) each.

    Greedy: the largest remaining layer goes to the rank with the fewest elements so far.
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
    # If the ratio were 0, an all-zero layer could never move.
    return jnp.where((param_norm == 0) | (update_norm == 0), jnp.ones((), ratio.dtype), ratio)
