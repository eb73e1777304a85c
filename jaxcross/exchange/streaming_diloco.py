"""Streaming DiLoCo: fragments of the model are exchanged in turn while the ranks keep training.

DiLoCo exchanges the whole model at the end of a round, and every rank waits for that. Over a slow
network this single exchange can take much longer than a step. Streaming DiLoCo removes the wait in
three ways.

**Fragments.** The model is cut into `fragments` even parts, each with its own anchor and outer
optimizer state. The parts take turns, so there's an exchange every `every / fragments` steps, of a
correspondingly smaller part. The paper's fragments are made of layers. We cut the vector of all
leaves evenly, so that each exchange takes the same number of bytes.

**Delay.** A fragment's pseudo-gradient is captured into the state (`pending`), and its outer step
is taken `delay` steps later. No exchange may be in flight between two steps of a job, so we can't
send one message and pick it up later. Instead, the pseudo-gradient is cut into `delay` slices, and
each of the following steps exchanges one of them. A slice depends only on the state rather than on
the step's gradient, so its exchange is carried: it's in flight while the step computes. With `delay
= every / fragments` the link carries the same bytes on every step.

**Mixing.** By the time the outer step is taken, the rank has trained for `delay` more steps.
Jumping to the new anchor would discard that progress in this fragment, so the rank moves to a mix
of the anchor and its own parameters.

What a step does is a function of the clock in the state (`FragmentTurns`). The host knows the
clock, so it runs the right program for each step, and a step without an exchange sends nothing.
With 8 or 4 bits, pseudo-gradients travel as integers with a shared unit per block
(`bits.quantise`), while the paper uses 4-bit floats.

How much of the speed of computation is left is measured in benchmarks/results/carried.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcross._arguments import is_whole
from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange.arithmetic import is_float, typed_like, varying_like
from jaxcross.exchange.bits import BLOCK, quantise, quantised_mean
from jaxcross.exchange.collectives import Axes, axis_names
from jaxcross.exchange.elementwise import check_elementwise
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.layouts import Fragments, cut_fragments
from jaxcross.exchange.local_rounds import outer_step
from jaxcross.exchange.validation import (
    as_number,
    check_real,
    optimizer_in,
    require_params,
    whole_number,
)

_WHAT = "`streaming_diloco`"


class Clock(NamedTuple):
    """A step's position in the schedule.

    It doesn't contain the length of a round, because a restart may change that.

    Attributes:
        turn: The turn, int32. Turn 0 is the first one, in which nothing is pending. After that,
            turns count from 1 to `fragments`, again and again.
        place: The step within the turn, int32.
    """

    turn: jax.Array
    place: jax.Array

    @classmethod
    def begin(cls) -> Clock:
        """Returns the clock of the first step."""
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


class StreamingDiLoCoState(NamedTuple):
    """State of Streaming DiLoCo.

    Attributes:
        clock: Which fragment's turn it is, and the step within the turn.
        anchor: For each fragment, the last vector that all ranks agreed on, bitwise identical on
            every rank.
        outer: For each fragment, the state of the outer optimizer, also bitwise identical.
        pending: This rank's pseudo-gradient of one fragment, in one slice per step that exchanges
            it. At 32 bits, a slice that has been exchanged is replaced by its mean.
        arrived: At 8 or 4 bits, a fragment's vector that collects the means of the slices. None at
            32 bits, or without a delay.
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
        """Returns the model to evaluate: the anchor as a tree like `params`."""
        cut = cut_fragments(params, len(self.anchor))
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
    """Takes DiLoCo's outer step fragment by fragment, each `delay` steps after it was captured.

    The model is cut into `fragments` even parts. Every `every / fragments` steps, the next
    fragment's pseudo-gradient (its anchor minus this rank's parameters) becomes `pending`. Each of
    the following `delay` steps exchanges one slice of it. The exchange depends only on the state,
    so it's carried and runs while the step computes. After the last slice, `outer` steps from the
    fragment's anchor, and the rank continues from a mix of the new anchor and its own parameters.
    With `delay = every / fragments`, the link carries the same bytes on every step. With `delay=0`,
    the fragment is exchanged and applied at once, and the step waits for it; with a single
    fragment, that is `diloco`.

    Parameters differ between ranks. The model to evaluate is the anchor, `state.model(params)`,
    which `jaxcross.exchange.finish` returns. When a job ends, pending slices are dropped,
    consistently on all ranks. All ranks must start with the same parameters. Deterministic.

    ```python
    outer = optax.sgd(0.4, momentum=0.9, nesterov=True)
    tx = jaxcross.exchange.streaming_diloco(
        optax.adamw(4e-4), outer, "batch", every=100, fragments=4, delay=25, bits=4
    )
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        inner: Steps on this rank's gradients.
        outer: Steps on a fragment's pseudo-gradient, once per round. It must work element by
            element (SGD with or without momentum, Adam), because it receives flat vectors.
        axes: One axis name, or a tuple of names that act as a single axis.
        every: Steps per round, in which each fragment is exchanged once. You can change it at a
            restart.
        fragments: Number of parts, a divisor of `every`. The tree's leaves are cut in order, into
            parts with equal numbers of elements.
        delay: Steps from capturing a fragment's pseudo-gradient to its outer step. At most `every /
            fragments`, because then the next fragment is captured.
        mix: Weight of the rank's own parameters in the mix after an outer step, in [0, 1). If None,
            0.5 with a delay, during which the rank has kept training, and 0 without.
        bits: Bits per element on the wire. With 32, an all-reduce. With 8 or 4, blocks of 128
            elements share a float32 unit, each element is rounded to the nearest of 255 or 15
            multiples of it, and every rank gathers all vectors and sums them in float32.

    Raises:
        ValueError: An argument is out of range, `fragments` does not divide `every`, or `inner` or
            `outer` is not an optimizer. At the first trace, on every rank: `update` got no
            `params`, or a state that was made with other arguments or for other parameters; `outer`
            does not work element by element; a floating-point leaf is complex, or is float64 while
            `bits` is 8 or 4.

    Memory in addition to the inner optimizer's: the anchor and the outer state, float32 at least.
    With a delay, also one pending fragment in its wire format, and, at 8 or 4 bits, one arriving
    fragment in float32.

    Bytes received per rank, with n the elements of a fragment in whole slices: `2(P-1)/P 4n` at 32
    bits (8n instead of 4n if a leaf is float64), otherwise `(P-1) (bits/8 + 1/32) n`, spread over
    `delay` out of every `every / fragments` steps.

    Every combination of what a step exchanges and applies is a separate program, compiled the first
    time it's needed. There are `delay + 2 * fragments` of them, `delay + fragments + 1` if `delay`
    is `every / fragments`, and `fragments + 1` without a delay. If compiling takes minutes, keep
    the number of slices and fragments small.

    Communicates only in `update`, over its axes, on steps that are determined by the arguments. All
    ranks must call it on the same step.

    Source: Douillard et al., arXiv 2501.18512, algorithm 2. Even parts instead of layers, slices
    instead of one message in flight, and integers instead of 4-bit floats are ours.
    """
    turns = FragmentTurns.checked(every, fragments, delay, _WHAT)
    own_part = _part(mix, turns.delay)
    if not is_whole(bits) or bits not in (32, 8, 4):
        raise ValueError(f"`bits` of {_WHAT} is `{bits!r}`: an element travels in 32, 8 or 4 bits.")
    names = axis_names(axes)
    local, beyond = optimizer_in(inner, _WHAT), optimizer_in(outer, _WHAT)
    work = _Work(turns=turns, names=names, outer=beyond, own_part=own_part, bits=bits)

    def init(params: optax.Params) -> StreamingDiLoCoState:
        cut = work.cut(params)
        anchor = tuple(cut.take(params, n) for n in range(turns.fragments))
        # Packing zeros gives zeros, but XLA would take seconds to find that out, so only take the
        # shapes.
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


class Turn(NamedTuple):
    """What a step does. Each field is None or the number of a slice or fragment.

    Attributes:
        slice: Slice to exchange.
        applied: Fragment whose outer step is taken.
        captured: Fragment whose pseudo-gradient is captured.
    """

    slice: int | None = None
    applied: int | None = None
    captured: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentTurns:
    """The schedule of a round: in which steps each fragment is captured, exchanged and applied.

    Everything is computed from a clock in the state, in integer arithmetic that the host can
    follow, so the host knows what each step exchanges.

    Attributes:
        every: Steps per round.
        fragments: Number of fragments.
        delay: Steps from a capture to its outer step.
        period: Steps per turn. At the end of a turn's last step, a fragment is captured.
    """

    every: int
    fragments: int
    delay: int
    period: int

    @classmethod
    def checked(cls, every: object, fragments: object, delay: object, what: str) -> FragmentTurns:
        """Returns the schedule, or raises a ValueError if these numbers don't make one."""
        n_every, n_fragments = (
            whole_number(every, "every", what),
            whole_number(fragments, "fragments", what),
        )
        n_delay = whole_number(delay, "delay", what, least=0)
        if n_every % n_fragments:
            raise ValueError(
                f"`every` of {what} is {n_every} and `fragments` {n_fragments}: each fragment has "
                f"an equal part of the round. Take a multiple of {n_fragments} steps, or a divisor "
                f"of {n_every}."
            )
        period = n_every // n_fragments
        if n_delay > period:
            raise ValueError(
                f"`delay` of {what} is {n_delay}, but the next fragment's turn comes after every / "
                f"fragments = {period} steps, and one is pending at a time. Take a delay of at "
                f"most {period}, or fewer fragments."
            )
        return cls(every=n_every, fragments=n_fragments, delay=n_delay, period=period)

    def kinds(self) -> list[Turn]:
        """Returns everything a step can do; `kind` is an index into this list."""
        captures = [Turn(captured=f) for f in range(self.fragments)]
        if self.delay == 0:
            return [Turn(), *captures]
        last = self.delay - 1
        # Whether a fragment's last slice is in the same step as the next capture.
        full = self.delay == self.period
        ends = [
            Turn(slice=last, applied=f, captured=(f + 1) % self.fragments if full else None)
            for f in range(self.fragments)
        ]
        return [Turn(), *(Turn(slice=n) for n in range(last)), *ends, *captures]

    def kind(self, clock: Clock) -> jax.Array:
        """Returns the index of this step's turn in `kinds`.

        If a restart has shortened the rounds, `place` may be beyond the period.
        """
        turn, place = clock
        captures = jnp.where(place >= self.period - 1, 1 + turn % self.fragments, 0)
        if self.delay == 0:
            return captures
        ends, pending = self.delay, (turn + self.fragments - 1) % self.fragments
        captures = jnp.where(captures > 0, captures - 1 + ends + self.fragments, 0)
        exchanges = jnp.where(place == self.delay - 1, ends + pending, 1 + place)
        # In the first turn nothing is pending.
        return jnp.where((turn > 0) & (place < self.delay), exchanges, captures)

    def after(self, clock: Clock) -> Clock:
        """Returns the next step's clock. Turn 0 is not repeated."""
        ends = clock.place + 1 >= self.period
        turn = jnp.where(clock.turn < self.fragments, clock.turn + 1, 1)
        return Clock(jnp.where(ends, turn, clock.turn), jnp.where(ends, 0, clock.place + 1))


class _Moving(NamedTuple):
    """The values that a step's turn may change."""

    updates: optax.Updates
    anchor: tuple[jax.Array, ...]
    outer: tuple[optax.OptState, ...]
    pending: tuple[PyTree, ...]
    arrived: jax.Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The operations that a turn is made of.

    Attributes:
        turns: The schedule.
        names: Axes.
        outer: Outer optimizer.
        own_part: Weight of the rank's own parameters after an outer step.
        bits: Bits per element on the wire.
    """

    turns: FragmentTurns
    names: tuple[Any, ...]
    outer: optax.GradientTransformationExtraArgs
    own_part: float
    bits: int

    def cut(self, params: optax.Params) -> Fragments:
        slices = max(self.turns.delay, 1)
        return cut_fragments(
            params,
            self.turns.fragments,
            multiple=slices * (BLOCK if self.bits < 32 else 1),
        )

    def sent(self, vector: jax.Array) -> tuple[PyTree, ...]:
        """Returns a fragment as slices in their wire format."""
        slices = max(self.turns.delay, 1)
        parts = vector.reshape(slices, vector.size // slices)
        return tuple(
            parts[n] if self.bits == 32 else quantise(parts[n], self.bits) for n in range(slices)
        )

    def exchange(self, part: PyTree) -> jax.Array:
        """Returns the mean of a slice over ranks."""
        return (
            jax.lax.pmean(part, self.names)
            if self.bits == 32
            else quantised_mean(part, self.bits, self.names)
        )

    def arrive(self, n: int, moving: _Moving) -> _Moving:
        """Exchanges a slice, and stores its mean."""
        mean = self.exchange(moving.pending[n])
        if moving.arrived is None:
            parts = [*moving.pending]
            parts[n] = varying_like(mean, parts[n])
            return moving._replace(pending=tuple(parts))
        mean = varying_like(mean, moving.arrived)
        # Written in place. Joining slices would copy them all.
        return moving._replace(
            arrived=jax.lax.dynamic_update_slice(moving.arrived, mean, (n * mean.size,))
        )

    def gradient(self, moving: _Moving) -> jax.Array:
        """Returns the mean pseudo-gradient of a fragment whose slices have all been exchanged."""
        return jnp.concatenate(moving.pending) if moving.arrived is None else moving.arrived

    def apply(
        self, fragment: int, gradient: jax.Array, params: optax.Params, moving: _Moving
    ) -> _Moving:
        """Takes the outer step on a fragment, and moves the parameters to the mix."""
        cut, anchor, outer = self.cut(params), [*moving.anchor], [*moving.outer]
        stepped, outer[fragment] = outer_step(
            self.outer, gradient, anchor[fragment], outer[fragment]
        )
        anchor[fragment] = jnp.asarray(stepped)
        began, targets = cut.parts(params, fragment), cut.split(anchor[fragment], fragment)
        if self.own_part:  # skip a weight of 0, because 0 times NaN would be NaN
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
        """Returns a fragment's pseudo-gradient on this rank, taken after this step's update."""
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
    """Refuses a state, parameters or an outer optimizer that this exchange would handle wrongly.

    Checked while tracing, so every rank raises before the first exchange.
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
