"""Finds optimizers that differentiate the loss themselves and don't exchange the derivatives.

`optax.lbfgs` evaluates the loss and its gradient in a line search, `optax.contrib.sophia` evaluates
its curvature. By the rules of `pmap`, the gradient of a loss is rank-local even if the loss is
averaged over ranks. So each rank takes a different step, and the replicas drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from jaxcross import _jax_compat as compat
from jaxcross.program.ir import Exchange, Wire
from jaxcross.program.jaxpr_utils import holds_exchange, is_shard_map

# The line search's loop, and the branch taken on every k-th step. They contain the derivative.
_OPTIMIZERS = {
    "optax.lbfgs": re.compile(r"optax[/\\]_src[/\\]linesearch\.py:.*zoom_linesearch"),
    "optax.contrib.sophia": re.compile(r"optax[/\\]contrib[/\\]_sophia\.py:.*scale_by_sophia"),
}
_OPTAX = re.compile(r"[/\\]optax[/\\]")


def own_derivatives(
    jaxpr: compat.Jaxpr, axes: Mapping[str, int], wire: Wire
) -> Iterator[tuple[str, str]]:
    """Yields the optimizers that differentiate the loss but exchange no array, with the user's
    line.

    Args:
        jaxpr: Open or closed, not flat.
        axes: Axis name -> size.
        wire: Recognises exchanges.
    """
    for eqn in compat.open_jaxpr(jaxpr)[0].eqns:
        if is_shard_map(eqn, axes):
            continue  # with `check_vma=True`, JAX itself inserts the exchanges of gradients
        stack = compat.stack_of(eqn) if eqn.primitive.name in ("while", "cond") else []
        name = next(
            (n for n, place in _OPTIMIZERS.items() if any(map(place.search, stack[:1]))), None
        )
        inside = list(compat.sub_jaxprs(eqn))
        if name is None:
            for inner in inside:
                yield from own_derivatives(inner, axes, wire)
        elif not any(holds_exchange(j, axes, wire, only=_moves_array) for j in inside):
            yield name, next((line for line in stack if not _OPTAX.search(line)), stack[0])


def _moves_array(exchange: Exchange) -> bool:
    """Whether an exchange moves more than a single number such as the loss."""
    return bool(exchange.shape)
