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
    """Nodes of two ranks each; of one, where there are but two ranks."""
    local = 2 if ranks > 2 and ranks % 2 == 0 else 1
    return dict(zip(NODES, (ranks // local, local), strict=True))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a strategy is made for.

    Attributes:
        ranks: Along the axis.
        optimizer: Behind exchanges of gradients, inside those of parameters.
        signs: In its place behind gradients whose elements are 1 or -1.
        adam_rate: Of the strategy that is an Adam itself; may be a schedule.
        norms: A LARS or LAMB whose norms are shared out over the axis, behind the mean.
        freeze_step: Where 1-bit Adam begins to send signs, and where a density that falls has
            fallen; one that falls at once does so at twice of it.
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
        name: The exchange, and what is particular of it here.
        make: Setting -> the whole optimizer, its exchanges in it.
        axes: Ranks -> the axes that its exchanges go over.
        cycle: Steps after which its messages repeat.
        begins: The steps from which on its messages are others, ascending.
        model: (parameters of all ranks, state of all ranks) -> the parameters to evaluate, ranks
            along the first axis.
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
        """The first step that sends what `step` does."""
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
    # Not the defaults, as docs/reference/exchanges.md says. Fewer elements a scale, because these
    # models' layers are small. With `eps` at 1e-8, elements of a tiny second moment that share a
    # scale with larger ones overflow as soon as signs are sent.
    return optax.chain(
        exchange.one_bit_adam(s.freeze_step, AXIS, ranks=s.ranks, block=256, eps=eps),
        optax.scale_by_learning_rate(s.adam_rate),
    )


def _first(tree: Any) -> Any:
    """What the first rank holds, of ranks along the first axis."""
    return jax.tree.map(lambda x: x[0], tree)


def agreed(params: Any, state: Any) -> Any:
    """The anchor that all ranks hold."""
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


# The same by other routes: through nodes of two ranks, along a ring, a tree or a grid, and with
# 16-bit values.
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
    """Quarters of the steps to `freeze_step`: densities of 25, 6.25, 3.2 and 1.6%, as in arXiv
    1712.01887.
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


# Top-k that loses less behind Adam: it sends or begins with more, or selects from what each rank's
# own optimizer made.
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


# Rounds of other lengths, and other outer optimizers: how much of the gap is theirs.
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


# What the settings above are for: the same without them.
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
    """Bytes that one rank receives in each of some steps, cut as by default, by its exchanges'
    formulas.

    Args:
        tx: With its exchanges over `axes`.
        params: Arrays, or their types.
        axes: Each with its ranks.
        steps: Counted from 0.
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
    """Yields the whole numbers of a rank's state before each step, which decide what it sends.

    They do not depend on values, so updates of zeros give them, and XLA removes all other work from
    these.
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
