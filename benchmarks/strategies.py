"""Every exchange strategy around a given optimizer, with the bytes that a rank receives per step.

Other benchmarks import this table. This module doesn't measure anything itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcross import exchange
from jaxcross.plan.compression import trace_update
from jaxcross.program.stages import cut
from jaxcross.testing import decide
from jaxcross.wire.bytes import wire_bytes

AXIS = "batch"
NODES = ("node", "local")
EVERY = 8  # local steps from one exchange of parameters to the next
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)  # of arXiv 2311.08105


def one_axis(ranks: int) -> dict[str, int]:
    return {AXIS: ranks}


def pairs(ranks: int) -> dict[str, int]:
    """Groups the ranks into nodes of two, or of one if there are only two or oddly many ranks."""
    local = 2 if ranks > 2 and ranks % 2 == 0 else 1
    return dict(zip(NODES, (ranks // local, local), strict=True))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The ranks and optimizers for which a strategy is made.

    Attributes:
        ranks: The number of ranks along the axis.
        optimizer: Follows an exchange of gradients, or is wrapped by an exchange of parameters.
        signs: Replaces `optimizer` if the exchanged gradients consist of 1 and -1.
        adam_rate: The learning rate, or its schedule, of the strategy that's an Adam itself.
        norms: A LARS or LAMB that follows the mean and computes its norms over the axis.
        freeze_step: The step at which 1-bit Adam begins to send signs, and at which a density that
            falls gradually has reached its final value. A density that falls only once does so at
            twice this step.
    """

    ranks: int
    optimizer: optax.GradientTransformation
    signs: optax.GradientTransformation
    adam_rate: optax.ScalarOrSchedule
    norms: optax.GradientTransformation
    freeze_step: int


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to train on several ranks.

    Attributes:
        name: The exchange, followed by its settings.
        make: Makes the whole optimizer, including its exchanges, for a setting.
        axes: Maps the number of ranks to the axes over which it exchanges.
        cycle: The number of steps after which its messages repeat.
        begins: The steps at which its messages change, in ascending order.
        model: Maps the parameters and states of all ranks, with ranks along the first axis, to the
            parameters to evaluate.
    """

    name: str
    make: Callable[[Setting], optax.GradientTransformation]
    axes: Callable[[int], dict[str, int]] = one_axis
    cycle: int = 1
    begins: Callable[[Setting], tuple[int, ...]] = lambda setting: ()
    model: Callable[[Any, Any], Any] = lambda params, state: jax.tree.map(
        lambda x: x.mean(0), params
    )

    def like(self, step: int, setting: Setting) -> int:
        """Returns the first step that sends the same messages as `step`."""
        begins = self.begins(setting)
        return (
            max((first for first in begins if first <= step), default=0)
            if begins
            else step % self.cycle
        )


def _before(
    make: Callable[[], optax.GradientTransformation],
) -> Callable[[Setting], optax.GradientTransformation]:
    return lambda s: optax.chain(make(), s.optimizer)


def _one_bit(s: Setting, eps: float = 1e-4) -> optax.GradientTransformation:
    # These aren't the defaults; docs/reference/exchanges.md explains why. The layers of these
    # models are small, so fewer elements share a scale. With `eps=1e-8`, elements with a tiny
    # second moment that share a scale with larger ones overflow as soon as signs are sent.
    return optax.chain(
        exchange.one_bit_adam(s.freeze_step, AXIS, ranks=s.ranks, block=256, eps=eps),
        optax.scale_by_learning_rate(s.adam_rate),
    )


def _first(tree: Any) -> Any:
    """Returns the first rank's values from a tree with ranks along the first axis."""
    return jax.tree.map(lambda x: x[0], tree)


def agreed(params: Any, state: Any) -> Any:
    """Returns the anchor, i.e. the parameters that are identical on all ranks."""
    return exchange.finish(*_first((params, state)))


STRATEGIES = (
    Strategy(name="mean", make=_before(lambda: exchange.mean(AXIS))),
    Strategy(
        name="mean, bfloat16", make=_before(lambda: exchange.mean(AXIS, wire_dtype=jnp.bfloat16))
    ),
    Strategy(
        name="top_k 1%, exact", make=_before(lambda: exchange.top_k(0.01, AXIS, selection="exact"))
    ),
    Strategy(
        name="top_k 1%, threshold",
        make=_before(lambda: exchange.top_k(0.01, AXIS, selection="threshold")),
    ),
    Strategy(name="gtop_k 1%", make=_before(lambda: exchange.gtop_k(0.01, AXIS))),
    Strategy(name="power_sgd, rank 2", make=_before(lambda: exchange.power_sgd(2, AXIS))),
    Strategy(
        name="decoupled_momentum 1%",
        make=_before(lambda: exchange.decoupled_momentum(0.01, AXIS)),
    ),
    Strategy(
        name="decoupled_momentum 1%, sign",
        make=lambda s: optax.chain(exchange.decoupled_momentum(0.01, AXIS, sign=True), s.signs),
    ),
    Strategy(name="qsgd, 127 levels", make=_before(lambda: exchange.qsgd(127, AXIS))),
    Strategy(name="sign_sgd", make=lambda s: optax.chain(exchange.sign_sgd(AXIS), s.signs)),
    Strategy(name="one_bit_adam", make=_one_bit, begins=lambda s: (s.freeze_step,)),
    Strategy(name="adasum of gradients", make=_before(lambda: exchange.adasum(AXIS))),
    Strategy(name="adasum of deltas", make=lambda s: exchange.adasum(AXIS, s.optimizer)),
    Strategy(name="shared norms", make=lambda s: optax.chain(exchange.mean(AXIS), s.norms)),
    Strategy(
        name=f"local_sgd, every {EVERY}",
        cycle=EVERY,
        make=lambda s: exchange.local_sgd(s.optimizer, AXIS, every=EVERY),
    ),
    Strategy(
        name=f"diloco, every {EVERY}",
        cycle=EVERY,
        model=agreed,
        make=lambda s: exchange.diloco(s.optimizer, OUTER, AXIS, every=EVERY),
    ),
    Strategy(
        name=f"streaming_diloco, every {EVERY}, 4 bits",
        cycle=EVERY,
        model=agreed,
        begins=lambda s: (0, EVERY // 2),
        make=lambda s: exchange.streaming_diloco(
            s.optimizer, OUTER, AXIS, every=EVERY, fragments=2, delay=EVERY // 2, bits=4
        ),
    ),
    Strategy(
        name=f"federated_average, half, every {EVERY}",
        cycle=EVERY,
        make=lambda s: exchange.federated_average(
            s.optimizer, AXIS, every=EVERY, participation=0.5
        ),
    ),
    Strategy(
        name=f"elastic_average, every {EVERY}",
        cycle=EVERY,
        make=lambda s: exchange.elastic_average(
            s.optimizer, AXIS, every=EVERY, alpha=0.9 / s.ranks
        ),
        model=lambda params, state: _first(state.centre),
    ),
    Strategy(name="gossip, ring", make=lambda s: exchange.gossip(s.optimizer, AXIS, "ring")),
    Strategy(
        name="gossip, exponential", make=lambda s: exchange.gossip(s.optimizer, AXIS, "exponential")
    ),
    Strategy(
        name=f"sparse_loco 1/64, every {EVERY}",
        cycle=EVERY,
        model=agreed,
        make=lambda s: exchange.sparse_loco(s.optimizer, optax.sgd(1.0), AXIS, every=EVERY),
    ),
    Strategy(
        name=f"no_loco, every {EVERY}",
        cycle=EVERY,
        make=lambda s: exchange.no_loco(s.optimizer, AXIS, every=EVERY),
    ),
    Strategy(
        name="sharded_optimizer",
        make=lambda s: exchange.sharded_optimizer(s.optimizer, AXIS, ranks=s.ranks),
    ),
    Strategy(name="delayed_mean", make=lambda s: exchange.delayed_mean(s.optimizer, AXIS)),
    Strategy(
        name="bounded_stale, 2 steps",
        make=lambda s: exchange.bounded_stale(s.optimizer, AXIS, staleness=2),
    ),
    Strategy(
        name="asynchronous, 0 to 2 steps",
        make=lambda s: exchange.asynchronous(
            s.optimizer, AXIS, delays=[r % 3 for r in range(s.ranks)]
        ),
    ),
)


def _sparse_nodes(s: Setting) -> optax.GradientTransformation:
    local = pairs(s.ranks)["local"]
    return optax.chain(
        exchange.top_k(0.01, NODES, pattern="hierarchical", inner_ranks=local), s.optimizer
    )


# Some of the strategies above, but with a different communication pattern (nodes of two ranks, a
# ring, a tree or a grid), or with 16-bit values on the wire.
ROUTES = (
    Strategy(
        name="mean, hierarchical",
        axes=pairs,
        make=_before(lambda: exchange.mean(NODES, pattern="hierarchical")),
    ),
    Strategy(
        name="mean, hierarchical, bfloat16",
        axes=pairs,
        make=_before(lambda: exchange.mean(NODES, pattern="hierarchical", wire_dtype=jnp.bfloat16)),
    ),
    Strategy(name="mean, ring", make=_before(lambda: exchange.mean(AXIS, pattern="ring"))),
    Strategy(name="mean, tree", make=_before(lambda: exchange.mean(AXIS, pattern="tree"))),
    Strategy(name="top_k 1%, hierarchical", axes=pairs, make=_sparse_nodes),
    Strategy(
        name="top_k 1%, bfloat16 values",
        make=_before(lambda: exchange.top_k(0.01, AXIS, wire_dtype=jnp.bfloat16)),
    ),
    Strategy(
        name="adasum of gradients, hierarchical",
        axes=pairs,
        make=_before(lambda: exchange.adasum(NODES)),
    ),
    Strategy(name="gossip, torus", make=lambda s: exchange.gossip(s.optimizer, AXIS, "torus")),
)


def _falling(s: Setting) -> list[tuple[int, float]]:
    """Returns a density schedule like that of arXiv 1712.01887.

    The densities are 25, 6.25, 3.2 and 1.6%, each for a quarter of the steps up to `freeze_step`.
    """
    return [
        (s.freeze_step * (n + 1) // 4, density)
        for n, density in enumerate((0.25, 0.0625, 0.032, 0.016))
    ]


def _warmed_up(name: str, stages: Callable[[Setting], list[tuple[int, float]]]) -> Strategy:
    return Strategy(
        name=f"top_k 1%, {name}",
        make=lambda s: optax.chain(
            exchange.top_k(0.01, AXIS, selection="exact", warm_up=stages(s)), s.optimizer
        ),
        begins=lambda s: tuple(step for step, _ in stages(s)),
    )


# Variants of top-k that lose less accuracy with Adam: they send more elements, at least at first,
# or they select from the updates of each rank's own optimizer rather than from gradients.
GENTLER = (
    Strategy(
        name="top_k 2%, exact", make=_before(lambda: exchange.top_k(0.02, AXIS, selection="exact"))
    ),
    Strategy(
        name="top_k 5%, exact", make=_before(lambda: exchange.top_k(0.05, AXIS, selection="exact"))
    ),
    Strategy(
        name="top_k 10%, exact", make=_before(lambda: exchange.top_k(0.1, AXIS, selection="exact"))
    ),
    _warmed_up("falling to it", _falling),
    _warmed_up("10% at first", lambda s: [(2 * s.freeze_step, 0.1)]),
    Strategy(
        name="top_k 1%, of deltas",
        make=lambda s: optax.chain(s.optimizer, exchange.top_k(0.01, AXIS, selection="exact")),
    ),
)


def _diloco(every: int, name: str = "", outer: optax.GradientTransformation = OUTER) -> Strategy:
    return Strategy(
        name=f"diloco, every {every}{name}",
        cycle=every,
        model=agreed,
        make=lambda s: exchange.diloco(s.optimizer, outer, AXIS, every=every),
    )


# Different numbers of local steps and different outer optimizers, to see which part of the gap in
# accuracy each of them causes.
ROUNDS = (
    _diloco(4),
    _diloco(4, ", outer momentum 0.5", optax.sgd(0.7, momentum=0.5, nesterov=True)),
    _diloco(16),
    _diloco(16, ", outer SGD 1.0", optax.sgd(1.0)),
    _diloco(16, ", outer momentum 0.5", optax.sgd(0.7, momentum=0.5, nesterov=True)),
    _diloco(16, ", outer rate 1.0", optax.sgd(1.0, momentum=0.5, nesterov=True)),
    Strategy(
        name="sparse_loco 1/64, every 16",
        cycle=16,
        model=agreed,
        make=lambda s: exchange.sparse_loco(s.optimizer, optax.sgd(1.0), AXIS, every=16),
    ),
    Strategy(
        name="no_loco, every 16",
        cycle=16,
        make=lambda s: exchange.no_loco(s.optimizer, AXIS, every=16),
    ),
)


# Controls for the settings above: the same strategy with the default value.
CONTROLS = (
    Strategy(
        name="one_bit_adam, eps 1e-8",
        make=partial(_one_bit, eps=1e-8),
        begins=lambda s: (s.freeze_step,),
    ),
)


def received_bytes(
    tx: optax.GradientTransformation, params: Any, axes: dict[str, int], steps: Iterable[int] = (0,)
) -> dict[int, int]:
    """Computes how many bytes a rank receives in some steps, from the formulas of the exchanges.

    The step is cut as by default.

    Args:
        tx: An optimizer that exchanges over `axes`.
        params: Arrays, or their types.
        axes: Maps each axis to its number of ranks.
        steps: The steps to look at, counted from 0.
    """
    traced, wanted = trace_update(tx, params, axes), set(steps)
    found: dict[int, int] = {}
    for step, counters in enumerate(itertools.islice(_counters(tx, params, axes), max(wanted) + 1)):
        if step in wanted:
            own = iter(counters)
            leaves = [next(own) if _is_counter(x) else x for x in traced.in_avals]
            found[step] = sum(wire_bytes(x, axes) for x in cut(decide(traced, leaves)).exchanges)
    return found


def _counters(
    tx: optax.GradientTransformation, params: Any, axes: dict[str, int]
) -> Iterator[list[jax.Array]]:
    """Yields the integers in a rank's state before each step. They decide what the step sends.

    These counters don't depend on the gradients, so we can compute them by updating with zeros. XLA
    then removes all computations that the counters don't need.
    """

    def zeros(of_rank: jax.Array) -> Any:
        return jax.tree.map(lambda x: jnp.full(x.shape, of_rank.astype(x.dtype)), params)

    def start(zero: jax.Array) -> list[jax.Array]:
        return [x for x in jax.tree.leaves(tx.init(zeros(zero))) if _is_counter(x)]

    def advance(zero: jax.Array, counters: list[jax.Array]) -> list[jax.Array]:
        own = iter(counters)
        state = jax.tree.map(lambda x: next(own) if _is_counter(x) else x, tx.init(zeros(zero)))
        return [
            x
            for x in jax.tree.leaves(tx.update(zeros(zero), state, zeros(zero))[1])
            if _is_counter(x)
        ]

    sizes = tuple(axes.values())

    @partial(jax.jit, static_argnums=0)
    def first(function: Callable[..., list[jax.Array]], *args: Any) -> list[jax.Array]:
        for name in reversed(axes):
            function = jax.vmap(function, in_axes=(0, *(None for _ in args)), axis_name=name)
        return [x.reshape(-1)[0] for x in function(jnp.zeros(sizes), *args)]

    counters = first(start)
    while True:
        yield counters
        counters = first(advance, counters)


def _is_counter(x: Any) -> bool:
    return x.shape == () and x.dtype == jnp.int32
