"""Elastic averaging (EASGD): springs tie each rank's parameters to a shared centre."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross.checkpoint import RankLocal
from jaxcross.exchange.arithmetic import add_moves, sum_of
from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.local_rounds import Round, copied, local_rounds
from jaxcross.exchange.validation import as_number, optimizer_in, whole_number


class ElasticAverageState(NamedTuple):
    """State of elastic averaging.

    Attributes:
        since: Steps since the last exchange, int32.
        centre: Shaped like the parameters, and bitwise identical on every rank.
        inner: State of this rank's own optimizer.
    """

    since: jax.Array
    centre: optax.Params
    inner: optax.OptState

    rank_local = RankLocal(model=("inner",), maybe_empty=("inner",))


def elastic_average(
    optimizer: optax.GradientTransformation,
    axes: Axes,
    *,
    every: int,
    alpha: float,
    beta: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Pulls parameters and a shared centre towards each other on every `every`-th step.

    When ranks exchange, a rank with parameters `x` and update `u` moves to `x + u - alpha (x - c)`,
    where `c` is the centre, and the centre moves to `c + beta sum_over_ranks(x - c)`. These are the
    parameters from the start of the step, so the exchange doesn't depend on the step's gradient and
    can run while the gradient is computed.

    Ranks explore independently: their parameters and optimizer states differ even right after an
    exchange. The model to evaluate is the centre (`state.centre`), which is the same on all ranks.
    Deterministic.

    ```python
    tx = jaxcross.exchange.elastic_average(optax.sgd(0.1), "batch", every=4, alpha=0.9 / world.size)
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name, or a tuple of names that act as a single axis.
        every: Number of steps from one exchange to the next.
        alpha: Fraction of its distance to the centre by which a rank moves, in [0, 1]. With 0,
            ranks train independently.
        beta: Fraction of its distance to each rank by which the centre moves. Defaults to `alpha`,
            which conserves the sum of the centre and all parameters.

    Raises:
        ValueError: An argument is out of range, or `update` was called without `params`. Also
            raised at the first trace if `beta` times the number of ranks exceeds 1 (the centre
            would overshoot the mean), or if that product and `alpha` are both 1 (parameters and
            centre would swap places).

    Bytes received per rank: `2(P-1)/P` times the size of the parameters on steps that exchange, and
    0 on all others. If `beta` is 0, the centre never moves, so nothing is exchanged at all.

    Communicates only in `update`, on every `every`-th step, over its axes. All ranks must call it
    on the same step.

    Source: Zhang, Choromanska, LeCun, arXiv 1412.6651, equations 3 and 4. Our `alpha` is the
    paper's alpha, which is defined there as eta times rho. The paper's beta is our `beta` times the
    number of ranks.
    """
    every = whole_number(every, "every", "`elastic_average`")
    names = axis_names(axes)
    given = {"alpha": alpha, "beta": alpha if beta is None else beta}
    for name, value in given.items():
        if not 0 <= as_number(value) <= 1:
            raise ValueError(
                f"`{name}` of `elastic_average` must be a fraction of a distance, from 0 to 1, got "
                f"`{value!r}`."
            )
    alpha, pull = map(as_number, given.values())
    inner = optimizer_in(optimizer, "`elastic_average`")

    def init(params: optax.Params) -> ElasticAverageState:
        return ElasticAverageState(jnp.zeros((), jnp.int32), copied(params), inner.init(params))

    def merge(
        updates: optax.Updates, params: optax.Params, state: ElasticAverageState
    ) -> tuple[optax.Updates, ElasticAverageState]:
        away = jax.tree.map(jnp.subtract, params, state.centre)
        total = sum_of(away, names)
        # Skip terms with a factor of 0, because 0 times NaN is NaN.
        pulled = updates
        centre = state.centre
        if alpha:
            pulled = add_moves(updates, jax.tree.map(lambda d: (-alpha * d).astype(d.dtype), away))
        if pull:
            centre = add_moves(centre, jax.tree.map(lambda d: (pull * d).astype(d.dtype), total))
        return pulled, state._replace(centre=centre)

    def begin(state: ElasticAverageState, params: optax.Params) -> Round:
        del state, params
        _check(alpha, pull, jax.lax.psum(1, names))
        return Round(merges=[merge])

    return local_rounds("elastic_average", names, inner, every=every, init=init, begin=begin)


def _check(alpha: float, pull: float, ranks: int) -> None:
    if pull * ranks > 1 + 1e-6:
        raise ValueError(
            f"`beta` of `elastic_average` is `{pull}` and the axis has {ranks} ranks: together, "
            f"these would move the centre by {pull * ranks:.3g} times its distance to their mean, "
            f"i.e. past the mean. Use at most 1 / P, which is {1 / ranks:.3g} here."
        )
    if alpha + pull * ranks > 2 - 1e-6:
        raise ValueError(
            f"`alpha` of `elastic_average` is `{alpha}` and `beta` is `{pull}`, on {ranks} ranks: "
            "parameters and centre would swap in every exchange and never converge. Use a smaller "
            "`alpha`, for example 0.5."
        )
