"""Gossip (decentralised parallel SGD): ranks average parameters with their graph neighbours."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives
from jaxcross.exchange.arithmetic import add_moves
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.layouts import ravel_floats
from jaxcross.exchange.validation import optimizer_in, require_params

Topology = Literal["ring", "torus", "exponential", "complete"]
_TOPOLOGIES = ("ring", "torus", "exponential", "complete")


class GossipState(NamedTuple):
    """State of `gossip`.

    Attributes:
        round: Index of the next round of the graph, int32.
        inner: State of this rank's own optimizer.
    """

    round: jax.Array
    inner: optax.OptState

    rank_local = RankLocal(model=("inner",), maybe_empty=("inner",))


class Hop(NamedTuple):
    """A message of a round: rank `r` sends to rank `to[r]`, which adds it with this weight."""

    weight: float
    to: tuple[int, ...]


def gossip(
    optimizer: optax.GradientTransformation,
    axes: collectives.Axes,
    topology: Topology = "ring",
    *,
    adapt_first: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Averages each rank's parameters with those of its neighbours on every step.

    Rank i sets its parameters to `sum_j W_ij w_j + u_i`, where `w_j` are the parameters of rank j
    and `u_i` is rank i's own update. The weights `W` are doubly stochastic, so the mean over ranks
    evolves as if we averaged all ranks. The exchange doesn't depend on the step's gradient, so it
    can run while the gradient is computed.

    Ranks only reach consensus in the limit, so both their parameters and their optimizer states
    differ. The model to evaluate is the mean of the parameters over ranks. Deterministic.

    ```python
    tx = jaxcross.exchange.gossip(optax.sgd(0.1), "batch", "exponential")
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        optimizer: Steps on this rank's gradients.
        axes: One axis name. Several raise an error.
        topology: Which neighbours a rank averages with. `"ring"`: the two adjacent ranks, with
            weight 1/3 each. `"torus"`: the four neighbours on a grid that's as square as possible,
            with weight 1/5 each. `"exponential"`: a single neighbour per step, with weight 1/2, at
            distances 1, 2, 4, ... in turn; if the number of ranks is a power of two, log2(P) steps
            without updates make all ranks equal. `"complete"`: all ranks, with equal weights.
        adapt_first: Mix the updated parameters `w + u` instead of `w`. Ranks then converge to each
            other faster, but the exchange has to wait for the gradient. Combined with `"complete"`,
            this amounts to synchronous SGD.

    Raises:
        ValueError: The topology is unknown; the number of ranks can't form a grid (raised at the
            first trace); or `update` was called without `params`.

    Bytes received per rank and step, as a multiple of the parameters' size: 2 for the ring (1 if
    there are just two ranks), 4 for the torus (minus 1 for each side of the grid that has length
    2), 1 for the exponential graph, and `2(P-1)/P` for the complete graph.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Lian et al., arXiv 1705.09056, algorithm 1. The one-peer exponential graph is from
    Assran et al., arXiv 1811.10792.
    """
    axis = collectives.one_axis(axes, "`gossip`")
    if topology not in _TOPOLOGIES:
        raise ValueError(
            f"`topology` of `gossip` must be one of {', '.join(map(repr, _TOPOLOGIES))}, got "
            f"{topology!r}."
        )
    inner = optimizer_in(optimizer, "`gossip`")

    def init(params: optax.Params) -> GossipState:
        return GossipState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: optax.Updates, state: GossipState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, GossipState]:
        params = require_params(params, "`gossip`")
        graph = rounds(topology, jax.lax.axis_size(axis))
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        start = optax.apply_updates(params, updates) if adapt_first else params
        vectors, back = ravel_floats(start)
        if topology == "complete":
            pulls = [jax.lax.pmean(x, axis) - x for x in vectors]
        elif len(graph) == 1:
            pulls = _pull(vectors, axis, graph[0])
        else:
            # In an exponential graph, the neighbour changes from step to step, so we create a
            # branch for each neighbour. The branch index is a counter that the host can compute
            # ahead of time. This lets the host run a program that contains just this branch, and
            # therefore only receives a single neighbour's parameters.
            branches = [partial(_pull, axis=axis, hops_of_round=found) for found in graph]
            pulls = jax.lax.switch(state.round, branches, vectors)
        updates = add_moves(updates, back(pulls))
        return updates, GossipState((state.round + 1) % len(graph), inner_state)

    return exchange_once("gossip", axes, optax.GradientTransformationExtraArgs(init, update))  # pyright: ignore[reportArgumentType]


def rounds(topology: Topology, ranks: int) -> tuple[tuple[Hop, ...], ...]:
    """Returns the hops of each round, in the order in which the rounds repeat.

    The hops of a round are the messages that a rank receives from its neighbours, along with their
    weights. The rank's own parameters get whatever weight is left, so that the total is one.

    Raises:
        ValueError: `ranks` can't form a grid.
    """
    everyone = range(ranks)
    if topology == "exponential":
        distances = [1 << i for i in range((ranks - 1).bit_length())]
        found = [_merge([Hop(1 / 2, tuple((r + d) % ranks for r in everyone))]) for d in distances]
        return tuple(found) or ((),)
    if topology == "complete":
        return (
            _merge([Hop(1 / ranks, tuple((r + d) % ranks for r in everyone)) for d in everyone]),
        )
    if topology == "ring":
        return (_merge([Hop(1 / 3, tuple((r + d) % ranks for r in everyone)) for d in (1, -1)]),)
    rows = next(n for n in range(math.isqrt(ranks), 0, -1) if ranks % n == 0)
    columns = ranks // rows
    if rows == 1 and ranks > 1:
        raise ValueError(
            f"`topology` of `gossip` is `torus`, but {ranks} ranks do not fit a grid of two or "
            f"more rows, because {ranks} is prime. Use `ring` or `exponential`, or start a number "
            "of ranks that is not prime."
        )
    cells = [divmod(r, columns) for r in everyone]
    steps = [(0, 1), (0, -1), (1, 0), (-1, 0)]
    hops = [
        Hop(1 / 5, tuple((i + di) % rows * columns + (j + dj) % columns for i, j in cells))
        for di, dj in steps
    ]
    return (_merge(hops),)


def mixing_matrix(hops_of_round: Sequence[Hop], ranks: int) -> np.ndarray:
    """Returns the weights `W` of a round, float64.

    Row `i` contains the weights that rank `i` gives to each rank's parameters.
    """
    matrix = np.eye(ranks) * (1 - sum(hop.weight for hop in hops_of_round))
    for hop in hops_of_round:
        for source, receiver in enumerate(hop.to):
            matrix[receiver, source] += hop.weight
    return matrix


def _merge(found: Sequence[Hop]) -> tuple[Hop, ...]:
    """Drops hops from a rank to itself, and merges hops with the same destinations.

    Both occur in small graphs, e.g. in a ring of two, where both neighbours are the same rank.
    """
    weights: dict[tuple[int, ...], float] = {}
    for hop in found:
        if hop.to != tuple(range(len(hop.to))):
            weights[hop.to] = weights.get(hop.to, 0.0) + hop.weight
    return tuple(Hop(weight, to) for to, weight in weights.items())


def _pull(
    vectors: Sequence[jax.Array], axis: Hashable, hops_of_round: Sequence[Hop]
) -> list[jax.Array]:
    """Returns how much a round changes this rank's parameters.

    We add up differences from the neighbours' parameters, so that ranks with equal parameters stay
    bitwise identical.
    """
    pulls = [jnp.zeros_like(x) for x in vectors]
    for hop in hops_of_round:
        perm = list(enumerate(hop.to))
        got = [jax.lax.ppermute(x, axis, perm) for x in vectors]
        pulls = [
            pull + hop.weight * (theirs - x)
            for pull, theirs, x in zip(pulls, got, vectors, strict=True)
        ]
    return pulls
