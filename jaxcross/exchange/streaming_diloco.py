"""Streaming DiLoCo: fragments of the model are exchanged in turn, each while the ranks train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._arguments import is_whole
from jaxcross._pytree import PyTree
from jaxcross.exchange import fragments as cuts
from jaxcross.exchange import integers
from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.elementwise import check_elementwise
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.per_rank import RankLocal
from jaxcross.exchange.rounds import outer_step
from jaxcross.exchange.turns import Clock, Turn, Turns
from jaxcross.exchange.validation import (
    as_number,
    check_real,
    is_float,
    optimizer_in,
    require_params,
    typed_like,
    varying_like,
)

_WHAT = "`streaming_diloco`"


class StreamingDiLoCoState(NamedTuple):
    """State of Streaming DiLoCo.

    Attributes:
        clock: The turn of a fragment, and the step within it.
        anchor: Of each fragment the vector that all ranks agreed on last, the same bits on every
            rank.
        outer: Of each fragment the state of the outer optimizer, likewise.
        pending: This rank's pseudo-gradient of one fragment, in as many slices as steps that
            exchange it. At 32 bits a slice that was exchanged has become the mean.
        arrived: The means of slices that travel as integers, a fragment's vector; None at 32 bits
            and without a delay.
        inner: State of this rank's own optimizer.
    """

    clock: Clock
    anchor: tuple[jax.Array, ...]
    outer: tuple[optax.OptState, ...]
    pending: tuple[PyTree, ...]
    arrived: jax.Array | None
    inner: optax.OptState

    rank_local = RankLocal(
        unsent=("pending",), model=("inner",), maybe_empty=("outer", "pending", "arrived", "inner")
    )

    def model(self, params: optax.Params) -> optax.Params:
        """Returns the anchor as a tree like `params`: the model to evaluate."""
        cut = cuts.cut(params, len(self.anchor))
        for fragment, vector in enumerate(self.anchor):
            params = cut.put(params, fragment, cut.split(vector, fragment))
        return params


def streaming_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    axes: Axes,
    *,
    every: int,
    fragments: int,
    delay: int,
    mix: float | None = None,
    bits: int = 32,
) -> optax.GradientTransformationExtraArgs:
    """Takes DiLoCo's outer step on one fragment of the model after another, each `delay` steps
    after it was sent.

    The model is cut into `fragments` even parts. Every `every / fragments` steps the next one's
    pseudo-gradient, its anchor less this rank's parameters, becomes `pending`. Each of the
    following `delay` steps exchanges a part of it: the exchange depends on the state alone, so it
    is carried, and travels while the step computes. Behind the last part, `outer` steps from the
    fragment's anchor, and the rank goes on from the anchor and its own parameters, mixed. With
    `delay = every / fragments` the link carries the same bytes in every step. With `delay=0` the
    fragment is exchanged and applied at once, and the step waits for it; with one fragment that is
    `diloco`.

    Parameters differ between ranks. The model to evaluate is the anchor, `state.model(params)`,
    which `jaxcross.exchange.finish` returns; a job that ends drops what is pending, on every rank
    alike. Every rank must begin with the same parameters. Deterministic.

    ```python
    outer = optax.sgd(0.4, momentum=0.9, nesterov=True)
    tx = jaxcross.exchange.streaming_diloco(
        optax.adamw(4e-4), outer, "batch", every=100, fragments=4, delay=25, bits=4
    )
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        inner: Steps on this rank's gradients.
        outer: Steps on a fragment's pseudo-gradient, once a round. It must work element by element,
            since it sees flat vectors: SGD with or without momentum, Adam.
        axes: One axis name, or a tuple of several that count as one.
        every: Steps of a round, in which each fragment is exchanged once. May be another one after
            a restart.
        fragments: A divisor of `every`. Parts of the tree's leaves in order, equal in elements.
        delay: Steps from a fragment's pseudo-gradient to its outer step, at most `every /
            fragments`: then the next fragment needs the place.
        mix: The rank's own part in the parameters after an outer step, in [0, 1); None: 0.5 with a
            delay, in which the rank has trained on, else 0.
        bits: Of an element on the wire. 32: an all-reduce. 8 or 4: blocks of 128 elements share a
            float32 unit, each element is rounded to the nearest of 255 or 15 multiples of it, and
            every rank gathers and sums in float32.

    Raises:
        ValueError: An argument is out of its range, `fragments` does not divide `every`, or `inner`
            or `outer` is not an optimizer. At the first trace, on every rank: `update` got no
            `params`, or a state that was made with other arguments or for other parameters; `outer`
            does not work element by element; a floating-point leaf is complex, or is float64 where
            `bits` is 8 or 4.

    Memory above the inner optimizer's: the anchor and the outer state, in float32 at least. With a
    delay also a fragment that is pending, as it travels, and at 8 or 4 bits one that arrives, in
    float32.

    Bytes that a rank receives, with n the elements of a fragment in whole slices: `2(P-1)/P 4n` at
    32 bits (8n if a leaf is float64), else `(P-1) (bits/8 + 1/32) n`, spread over `delay` steps of
    each `every / fragments`.

    Each thing that a step may exchange or apply makes it another program, compiled when the first
    such step is called: `delay + 2 * fragments` of them, `delay + fragments + 1` if `delay` is
    `every / fragments`, `fragments + 1` without a delay. Where compiling takes minutes, take few
    slices and fragments.

    Making it and `init` do not communicate; `update` does, in the steps that follow from the
    arguments, over its axes, and every rank calls it in the same step.

    Source: Douillard et al., arXiv 2501.18512, algorithm 2; even parts in place of layers, slices
    in place of one message in flight, and integers in place of 4-bit floats are ours.
    """
    turns = Turns.checked(every, fragments, delay, _WHAT)
    own_part = _part(mix, turns.delay)
    if not is_whole(bits) or bits not in (32, 8, 4):
        raise ValueError(f"`bits` of {_WHAT} is `{bits!r}`: an element travels in 32, 8 or 4 bits.")
    names = axis_names(axes)
    local, beyond = optimizer_in(inner, _WHAT), optimizer_in(outer, _WHAT)
    work = _Work(turns=turns, names=names, outer=beyond, own_part=own_part, bits=bits)

    def init(params: optax.Params) -> StreamingDiLoCoState:
        cut = work.cut(params)
        anchor = tuple(cut.take(params, n) for n in range(turns.fragments))
        # Packed zeros are zeros, and XLA would take seconds to find that out.
        sent = (
            jax.eval_shape(work.sent, jax.ShapeDtypeStruct((cut.width,), cut.dtype))
            if turns.delay
            else ()
        )
        pending = jax.tree.map(jnp.zeros_like, sent)
        arrived = jnp.zeros(cut.width, cut.dtype) if turns.delay and bits < 32 else None
        outer_state = tuple(beyond.init(x) for x in anchor)
        return StreamingDiLoCoState(
            Clock.begin(), anchor, outer_state, pending, arrived, local.init(params)
        )

    def update(
        updates: optax.Updates,
        state: StreamingDiLoCoState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, StreamingDiLoCoState]:
        params = require_params(params, _WHAT)
        _check(work, state, jax.eval_shape(init, params), params)
        updates, inner_state = local.update(updates, state.inner, params, **extra)
        moving = _Moving(updates, state.anchor, state.outer, state.pending, state.arrived)
        branches = [_branch(work, turn, params, moving) for turn in turns.kinds()]
        moving: _Moving = (
            branches[0]()
            if len(branches) == 1
            else jax.lax.switch(turns.kind(state.clock), branches)
        )
        clock = turns.after(state.clock)
        state = StreamingDiLoCoState(
            clock, moving.anchor, moving.outer, moving.pending, moving.arrived, inner_state
        )
        return moving.updates, state

    return exchange_once(
        "streaming_diloco",
        names,
        optax.GradientTransformationExtraArgs(init, update),  # pyright: ignore[reportArgumentType]
    )


class _Moving(NamedTuple):
    """What a step's turn may change."""

    updates: optax.Updates
    anchor: tuple[jax.Array, ...]
    outer: tuple[optax.OptState, ...]
    pending: tuple[PyTree, ...]
    arrived: jax.Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The parts of a turn.

    Attributes:
        turns: The schedule.
        names: Axes.
        outer: Outer optimizer.
        own_part: The rank's own part after an outer step.
        bits: Of an element on the wire.
    """

    turns: Turns
    names: tuple[Any, ...]
    outer: optax.GradientTransformationExtraArgs
    own_part: float
    bits: int

    def cut(self, params: optax.Params) -> cuts.Fragments:
        slices = max(self.turns.delay, 1)
        return cuts.cut(
            params,
            self.turns.fragments,
            multiple=slices * (integers.BLOCK if self.bits < 32 else 1),
        )

    def sent(self, vector: jax.Array) -> tuple[PyTree, ...]:
        """Returns the slices of a fragment as they travel."""
        slices = max(self.turns.delay, 1)
        parts = vector.reshape(slices, vector.size // slices)
        return tuple(
            parts[n] if self.bits == 32 else integers.pack(parts[n], self.bits)
            for n in range(slices)
        )

    def exchange(self, part: PyTree) -> jax.Array:
        """Returns the mean of a slice over ranks."""
        return (
            jax.lax.pmean(part, self.names)
            if self.bits == 32
            else integers.mean(part, self.bits, self.names)
        )

    def arrive(self, n: int, moving: _Moving) -> _Moving:
        """Exchanges a slice, and keeps its mean."""
        mean = self.exchange(moving.pending[n])
        if moving.arrived is None:
            parts = [*moving.pending]
            parts[n] = varying_like(mean, parts[n])
            return moving._replace(pending=tuple(parts))
        mean = varying_like(mean, moving.arrived)
        # In place, where joining slices would copy them all.
        return moving._replace(
            arrived=jax.lax.dynamic_update_slice(moving.arrived, mean, (n * mean.size,))
        )

    def gradient(self, moving: _Moving) -> jax.Array:
        """Returns the mean of a fragment's pseudo-gradients, whose slices have all been
        exchanged.
        """
        return jnp.concatenate(moving.pending) if moving.arrived is None else moving.arrived

    def apply(
        self, fragment: int, gradient: jax.Array, params: optax.Params, moving: _Moving
    ) -> _Moving:
        """Takes the outer step on a fragment, and leads the parameters there."""
        cut, anchor, outer = self.cut(params), [*moving.anchor], [*moving.outer]
        stepped, outer[fragment] = outer_step(
            self.outer, gradient, anchor[fragment], outer[fragment]
        )
        anchor[fragment] = jnp.asarray(stepped)
        began, targets = cut.parts(params, fragment), cut.split(anchor[fragment], fragment)
        if self.own_part:  # a part of 0 is none, also of what is not finite
            own = cut.parts(optax.apply_updates(params, moving.updates), fragment)
            targets = [
                mine + (1 - self.own_part) * (x - mine)
                for mine, x in zip(own, targets, strict=True)
            ]
        updates = cut.put(
            moving.updates, fragment, [x - before for x, before in zip(targets, began, strict=True)]
        )
        return moving._replace(updates=updates, anchor=tuple(anchor), outer=tuple(outer))

    def capture(self, fragment: int, params: optax.Params, moving: _Moving) -> jax.Array:
        """Returns a fragment's pseudo-gradient on this rank."""
        return moving.anchor[fragment] - self.cut(params).take(
            optax.apply_updates(params, moving.updates), fragment
        )


def _branch(work: _Work, turn: Turn, params: optax.Params, given: _Moving) -> Callable[[], _Moving]:
    def run() -> _Moving:
        moving = given
        if turn.slice is not None:
            moving = work.arrive(turn.slice, moving)
            if turn.applied is not None:
                moving = work.apply(turn.applied, work.gradient(moving), params, moving)
        if turn.captured is not None:
            gradient = work.capture(turn.captured, params, moving)
            if work.turns.delay:
                moving = moving._replace(pending=work.sent(gradient))
            else:
                moving = work.apply(
                    turn.captured, work.exchange(work.sent(gradient)[0]), params, moving
                )
        return jax.tree.map(typed_like, moving, given)

    return run


def _part(mix: object, delay: int) -> float:
    part = (0.5 if delay else 0.0) if mix is None else as_number(mix)
    if not 0 <= part < 1:
        raise ValueError(
            f"`mix` of {_WHAT} is `{mix!r}`: it is the rank's own part in its parameters after an "
            "outer step, in [0, 1)."
        )
    return part


def _check(
    work: _Work, state: StreamingDiLoCoState, fresh: StreamingDiLoCoState, params: optax.Params
) -> None:
    """Refuses what would be exchanged or stepped wrongly, while tracing: on every rank, before the
    first exchange.

    Raises:
        ValueError: The state is not of these arguments and parameters, a leaf cannot travel, or the
            outer optimizer does not work element by element.
    """
    check_real(
        [x for x in jax.tree.leaves(params) if is_float(x)],
        f"fragments of {_WHAT}",
        float64=work.bits == 32,
    )
    for name in ("anchor", "pending", "arrived"):
        mine, made = (_shapes(getattr(each, name)) for each in (state, fresh))
        if mine != made:
            raise ValueError(
                f"the state of {_WHAT} has {_counted(mine)} in `{name}`, but its arguments need "
                f"{_counted(made)}: it was made with other `fragments`, `delay` or `bits`, or for "
                "other parameters. Restore it with the arguments that it was made with, or make it "
                "again; what it holds is lost then."
            )
    vector = fresh.anchor[0]
    row = jax.ShapeDtypeStruct((1, *vector.shape), vector.dtype)
    part = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
    check_elementwise(
        work.outer,
        (row, row),
        (part, part),
        fresh.outer[0],
        f"outer steps of {_WHAT}",
        instead="take `diloco`, whose outer optimizer is given whole leaves",
    )


def _shapes(tree: PyTree) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(jnp.shape(x)), jnp.result_type(x).name) for x in jax.tree.leaves(tree)]


def _counted(found: list[tuple[tuple[int, ...], str]]) -> str:
    kinds = dict.fromkeys(f"{name}{[*shape]}" for shape, name in found)
    return f"{len(found)} arrays of {', '.join(kinds)}" if found else "no arrays"
