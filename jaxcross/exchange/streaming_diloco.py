"""Streaming DiLoCo: the ranks exchange the model one fragment at a time while they keep training.

In DiLoCo, the ranks train independently for a round of many steps, then exchange the whole model
while everyone waits. Over a slow network, that one exchange can take much longer than a step.
Streaming DiLoCo combines three ideas to avoid the wait.

**Fragments.** The model is cut into `fragments` equal parts, each with its own anchor (the last
parameters that all ranks agreed on) and its own outer optimizer state. The fragments take turns,
which replaces the large exchange at the end of each round with a smaller one every `every /
fragments` steps.

In the paper, fragments are made up of layers. We split the vector of all leaves evenly instead, so
every exchange transfers the same number of bytes.

**Delay.** When a fragment's turn comes up, each rank captures its pseudo-gradient, i.e. computes
the difference between anchor and parameters and stores it in the state (`pending`). The outer step
is only taken `delay` steps later, and in the meantime the pseudo-gradient is exchanged.

The paper sends it as a single message that's in flight for several steps. We can't do that, because
exchanges aren't allowed to be in flight between two steps of a job. Instead, we cut the
pseudo-gradient into `delay` slices and exchange one of them on each of the following steps.

A slice depends only on the state and not on the step's gradient, so its exchange is in flight while
the step computes (a carried exchange). With the largest possible `delay` of `every / fragments`,
there's a slice to exchange on every step, which loads the link evenly.

**Mixing.** The outer step produces a new anchor for the fragment, but from parameters that are
`delay` steps old, and the rank has kept training in the meantime. Continuing from the new anchor
would throw that progress away, so the rank continues from a mix of the new anchor and its own
parameters.

**The schedule.** The state contains a `Clock`, and `FragmentTurns` determines from it what a step
does. The host can compute the clock too, so it always knows which program to run next. On a step
with nothing to exchange, that's a program without any exchange.

The clock counts turns (i.e. periods of `every / fragments` steps) and the steps within a turn. It
used to count the steps of a round, which broke when a restart changed the length of a round: the
outer step of one fragment was then silently taken on the pseudo-gradient of another.

**Few bits.** Optionally, the elements of a pseudo-gradient are sent as 8-bit or 4-bit integers,
i.e. as multiples of a float32 unit chosen for each block of elements (`bits.quantise`). The paper
uses 4-bit floats instead. Since every rank has its own units, an all-reduce can't add up these
integers. Instead, every rank gathers the vectors of all ranks and sums them in float32.

See benchmarks/results/carried.md for how close a step gets to the speed of computation alone.
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

    It doesn't depend on the length of a round, because that may change at a restart.

    Attributes:
        turn: Number of the turn, int32. Nothing is pending in turn 0, the very first. From then on,
            turns cycle through 1 to `fragments`.
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
        clock: Which fragment's turn it is, and which step of the turn.
        anchor: The last vector that all ranks agreed on, for each fragment; bitwise identical on
            every rank.
        outer: The outer optimizer's state for each fragment, also bitwise identical.
        pending: This rank's pseudo-gradient for one fragment, with a slice for each step that
            exchanges it. At 32 bits, each slice is overwritten by its mean once it has been
            exchanged.
        arrived: At 8 or 4 bits, a fragment-sized vector that collects the means of the slices. None
            at 32 bits, or without a delay.
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
        """Returns the model to evaluate: the anchor, as a tree like `params`."""
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
    """Takes DiLoCo's outer step one fragment at a time, `delay` steps after capturing it.

    The model is cut into `fragments` equal parts. Every `every / fragments` steps, the next
    fragment gets its turn: its pseudo-gradient (its anchor minus this rank's parameters) is stored
    in the state, and each of the following `delay` steps exchanges a slice of it. Since the
    exchange depends only on the state, it overlaps with the step's computation.

    Once the last slice is through, `outer` takes a step from the fragment's anchor, and the rank
    continues from a mix of the new anchor and its own parameters.

    With `delay = every / fragments`, the link carries the same number of bytes on every step. With
    `delay=0`, a fragment is exchanged and applied immediately, and the step waits for it; if
    there's also just a single fragment, that's equivalent to `diloco`.

    Parameters differ between ranks. The model to evaluate is the anchor, `state.model(params)`,
    which is what `jaxcross.exchange.finish` returns. If a job ends partway through exchanging a
    fragment, that fragment keeps its previous anchor on all ranks. All ranks must start from the
    same parameters. Deterministic.

    ```python
    outer = optax.sgd(0.4, momentum=0.9, nesterov=True)
    tx = jaxcross.exchange.streaming_diloco(
        optax.adamw(4e-4), outer, "batch", every=100, fragments=4, delay=25, bits=4
    )
    updates, opt_state = tx.update(grads, opt_state, params)  # this rank's own gradients: no mean
    ```

    Args:
        inner: Optimizer that every step applies to this rank's own gradients.
        outer: Optimizer for the anchors. Once per round, it takes a step on each fragment's mean
            pseudo-gradient. It must work elementwise (SGD with or without momentum, Adam), because
            it operates on flat vectors.
        axes: One axis name, or a tuple of names that act as a single axis.
        every: Steps per round. Each fragment is exchanged once per round. You can change this at a
            restart.
        fragments: Number of parts, a divisor of `every`. The tree's leaves are cut in order, into
            parts of equal size.
        delay: Steps from capturing a fragment's pseudo-gradient to its outer step. At most `every /
            fragments`, since that's when the next fragment is captured.
        mix: Weight of the rank's own parameters in the mix after an outer step, in [0, 1). If None,
            it's 0 without a delay, and 0.5 with one, because the rank has kept training in the
            meantime.
        bits: Bits per element on the wire. With 32, the exchange is an all-reduce. With 8 or 4,
            each block of 128 elements shares a float32 unit, elements are rounded to the nearest of
            255 or 15 multiples of it, and every rank gathers all vectors and sums them in float32.

    Raises:
        ValueError: An argument is out of range, `fragments` does not divide `every`, or `inner` or
            `outer` is not an optimizer. At the first trace, on every rank: `update` got no
            `params`, or a state that was made with other arguments or for other parameters; `outer`
            does not work element by element; a floating-point leaf is complex, or is float64 while
            `bits` is 8 or 4.

    Memory on top of the inner optimizer's: the anchor and the outer optimizer's state, both in
    float32 or wider. With a delay, there's also the fragment that's being exchanged, in its wire
    format. At 8 or 4 bits, the means are collected in another fragment in float32 as they arrive.

    Bytes received per rank: with P ranks and a fragment of n elements, including the padding to
    whole slices, `2(P-1)/P 4n` at 32 bits (8n instead of 4n if a leaf is float64), and
    `(P-1) (bits/8 + 1/32) n` at 8 or 4 bits. There's one such fragment every `every / fragments`
    steps, and its bytes are spread over `delay` of them.

    The step is compiled separately for each combination of what it exchanges and applies, the first
    time that combination comes up. Normally this makes `delay + 2 * fragments` programs, but only
    `delay + fragments + 1` if `delay` equals `every / fragments`, and `fragments + 1` without a
    delay. If compiling takes minutes, keep the numbers of slices and fragments small.

    Communicates only in `update`, over its axes. Which calls of `update` actually exchange
    something depends on `every`, `fragments` and `delay`. All ranks must call it on the same step.

    Source: Douillard et al., arXiv 2501.18512, algorithm 2. Ours differs in three ways: fragments
    are equal parts of the model instead of layers, we spread slices over several steps instead of
    keeping a single message in flight the whole time, and we round to integers instead of 4-bit
    floats.
    """
    turns = FragmentTurns.checked(every, fragments, delay, _WHAT)
    own_part = _part(mix, turns.delay)
    if not is_whole(bits) or bits not in (32, 8, 4):
        raise ValueError(
            f"`bits` of {_WHAT} is the number of bits that are sent per element, and must be 32, "
            f"8 or 4, got `{bits!r}`."
        )
    names = axis_names(axes)
    inner_optimizer = optimizer_in(inner, _WHAT)
    outer_optimizer = optimizer_in(outer, _WHAT)
    work = _Work(turns=turns, names=names, outer=outer_optimizer, own_part=own_part, bits=bits)

    def init(params: optax.Params) -> StreamingDiLoCoState:
        cut = work.cut(params)
        anchor = tuple(cut.take(params, n) for n in range(turns.fragments))
        # Nothing is pending at first, so the slices are all zeros. Zeros stay zeros when packed, so
        # we only need the shapes of the packed slices. (Actually packing them took 16 s, because
        # XLA did it at compile time.)
        sent = (
            jax.eval_shape(work.sent, jax.ShapeDtypeStruct((cut.width,), cut.dtype))
            if turns.delay
            else ()
        )
        pending = jax.tree.map(jnp.zeros_like, sent)
        # Once a slice has been exchanged, its mean over ranks has to go somewhere. At 32 bits, it
        # replaces the slice. At 8 or 4 bits per element, the slice doesn't have room for a float32
        # mean, so the means get their own vector.
        arrived = jnp.zeros(cut.width, cut.dtype) if turns.delay and bits < 32 else None
        outer_state = tuple(outer_optimizer.init(x) for x in anchor)
        return StreamingDiLoCoState(
            Clock.begin(), anchor, outer_state, pending, arrived, inner_optimizer.init(params)
        )

    def update(
        updates: optax.Updates,
        state: StreamingDiLoCoState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, StreamingDiLoCoState]:
        params = require_params(params, _WHAT)
        _check(work, state, jax.eval_shape(init, params), params)
        updates, inner_state = inner_optimizer.update(updates, state.inner, params, **extra)
        # The inner optimizer runs on every step, so that part comes ahead of the switch. The
        # switch's branches only contain what differs between steps: which slices are exchanged, and
        # what is applied or captured. Which branch to take depends solely on the clock, which the
        # host knows, so the program it runs contains just that branch.
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
    """The schedule of a round: when each fragment is captured, exchanged and applied.

    What a step does follows from the `Clock` in the optimizer's state, using nothing but integer
    arithmetic on scalars. Since the host can evaluate that as well, it knows in advance what each
    step exchanges.

    Attributes:
        every: Steps per round.
        fragments: Number of fragments.
        delay: Steps from a capture to its outer step.
        period: Steps per turn. A fragment is captured at the end of a turn's last step.
    """

    every: int
    fragments: int
    delay: int
    period: int

    @classmethod
    def checked(cls, every: object, fragments: object, delay: object, what: str) -> FragmentTurns:
        """Returns the schedule, or raises a ValueError if these numbers don't work out."""
        n_every = whole_number(every, "every", what)
        n_fragments = whole_number(fragments, "fragments", what)
        n_delay = whole_number(delay, "delay", what, least=0)
        if n_every % n_fragments:
            raise ValueError(
                f"`every` of {what} must be a multiple of `fragments`, because each fragment gets "
                f"an equal part of the round, got `every={n_every}` and `fragments={n_fragments}`. "
                f"Use a multiple of {n_fragments} as `every`, or a divisor of {n_every} as "
                "`fragments`."
            )
        period = n_every // n_fragments
        if n_delay > period:
            raise ValueError(
                f"`delay` of {what} is {n_delay}, but the next fragment is exchanged after every / "
                f"fragments = {period} steps, and only one fragment can be in flight at a time. "
                f"Use a delay of at most {period}, or fewer fragments."
            )
        return cls(every=n_every, fragments=n_fragments, delay=n_delay, period=period)

    def kinds(self) -> list[Turn]:
        """Returns everything a step can do; `kind` is an index into this list."""
        # `kind` returns an index into this list, so the order matters: first the step that does
        # nothing, then all slices except the last, then the last slice of each fragment, and
        # finally the capture of each fragment.
        captures = [Turn(captured=f) for f in range(self.fragments)]
        if self.delay == 0:
            return [Turn(), *captures]
        last = self.delay - 1
        # With the longest possible delay, there's no gap between the exchanges of two fragments:
        # the step that exchanges a fragment's last slice also captures the next fragment.
        full = self.delay == self.period
        ends = [
            Turn(slice=last, applied=f, captured=(f + 1) % self.fragments if full else None)
            for f in range(self.fragments)
        ]
        return [Turn(), *(Turn(slice=n) for n in range(last)), *ends, *captures]

    def kind(self, clock: Clock) -> jax.Array:
        """Returns the index of this step's turn in `kinds`.

        `place` can exceed the period if a restart has shortened the rounds.
        """
        turn, place = clock
        # Turns last for `period` steps. On the last step of turn t, we capture the pseudo-gradient
        # of fragment t, modulo the number of fragments. Its slices are then exchanged during the
        # next turn.
        captures = jnp.where(place >= self.period - 1, 1 + turn % self.fragments, 0)
        if self.delay == 0:
            return captures
        # From here on, the numbers are indices into the list returned by `kinds`. The fragment
        # whose slices are exchanged in this turn (`pending`) was captured at the end of the
        # previous turn.
        ends = self.delay
        pending = (turn + self.fragments - 1) % self.fragments
        captures = jnp.where(captures > 0, captures - 1 + ends + self.fragments, 0)
        exchanges = jnp.where(place == self.delay - 1, ends + pending, 1 + place)
        # In the first turn, nothing is pending yet.
        return jnp.where((turn > 0) & (place < self.delay), exchanges, captures)

    def after(self, clock: Clock) -> Clock:
        """Returns the next step's clock. Turn number `fragments` is followed by turn 1."""
        ends = clock.place + 1 >= self.period
        turn = jnp.where(clock.turn < self.fragments, clock.turn + 1, 1)
        return Clock(jnp.where(ends, turn, clock.turn), jnp.where(ends, 0, clock.place + 1))


class _Moving(NamedTuple):
    """Everything a step's turn may change."""

    updates: optax.Updates
    anchor: tuple[jax.Array, ...]
    outer: tuple[optax.OptState, ...]
    pending: tuple[PyTree, ...]
    arrived: jax.Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The operations that make up a turn.

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
        # All slices need to be the same length and, with 8 or 4 bits, a whole number of blocks.
        return cut_fragments(
            params,
            self.turns.fragments,
            multiple=slices * (BLOCK if self.bits < 32 else 1),
        )

    def sent(self, vector: jax.Array) -> tuple[PyTree, ...]:
        """Cuts a fragment into slices in their wire format."""
        slices = max(self.turns.delay, 1)
        # Store each slice as a separate leaf of the state. If the state held the whole fragment, a
        # step would have to cut out its slice first, which isn't one of the operations allowed
        # between the state and a carried exchange, so the exchange wouldn't be carried.
        #
        # Pack each slice separately, too. When we packed whole fragments (ResNet-50, four of them,
        # at 8 bits), a fragment's last step took 38 ms of computation instead of 31.
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
        """Exchanges a slice and stores its mean."""
        mean = self.exchange(moving.pending[n])
        if moving.arrived is None:
            parts = [*moving.pending]
            parts[n] = varying_like(mean, parts[n])
            return moving._replace(pending=tuple(parts))
        mean = varying_like(mean, moving.arrived)
        # Write each mean in place, because joining the slices at the end would copy them all.
        return moving._replace(
            arrived=jax.lax.dynamic_update_slice(moving.arrived, mean, (n * mean.size,))
        )

    def gradient(self, moving: _Moving) -> jax.Array:
        """Returns a fragment's mean pseudo-gradient, once all slices have been exchanged."""
        return jnp.concatenate(moving.pending) if moving.arrived is None else moving.arrived

    def apply(
        self, fragment: int, gradient: jax.Array, params: optax.Params, moving: _Moving
    ) -> _Moving:
        """Takes the outer step on a fragment and moves the parameters to the mix."""
        cut = self.cut(params)
        anchor = [*moving.anchor]
        outer = [*moving.outer]
        stepped, outer[fragment] = outer_step(
            self.outer, gradient, anchor[fragment], outer[fragment]
        )
        anchor[fragment] = jnp.asarray(stepped)
        # The outer step works on a vector. From here on, stick to pieces of leaves in the leaves'
        # own shapes, because joining them into vectors would read and write all of their memory
        # once more.
        began = cut.parts(params, fragment)
        targets = cut.split(anchor[fragment], fragment)
        if self.own_part:  # skip a weight of 0, because 0 times NaN would be NaN
            own = cut.parts(optax.apply_updates(params, moving.updates), fragment)
            targets = [
                mine + (1 - self.own_part) * (x - mine)
                for mine, x in zip(own, targets, strict=True)
            ]
        # optax adds updates to the parameters from before the step, so the update that gets us to
        # the target is the difference between the two.
        updates = cut.put(
            moving.updates, fragment, [x - before for x, before in zip(targets, began, strict=True)]
        )
        return moving._replace(updates=updates, anchor=tuple(anchor), outer=tuple(outer))

    def capture(self, fragment: int, params: optax.Params, moving: _Moving) -> jax.Array:
        """Returns this rank's pseudo-gradient for a fragment, taken after this step's update."""
        return moving.anchor[fragment] - self.cut(params).take(
            optax.apply_updates(params, moving.updates), fragment
        )


def _branch(work: _Work, turn: Turn, params: optax.Params, given: _Moving) -> Callable[[], _Moving]:
    def run() -> _Moving:
        moving = given
        # A step may take the outer step on one fragment and capture the pseudo-gradient of the
        # next. With a single fragment, both are the same, so take the outer step first: the
        # pseudo-gradient has to be relative to the new anchor.
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
    default = 0.5 if delay else 0.0
    part = default if mix is None else as_number(mix)
    if not 0 <= part < 1:
        raise ValueError(
            f"`mix` of {_WHAT} is the weight of the rank's own parameters after an outer step, "
            f"and must be a number in [0, 1), got `{mix!r}`."
        )
    return part


def _check(
    work: _Work, state: StreamingDiLoCoState, fresh: StreamingDiLoCoState, params: optax.Params
) -> None:
    """Rejects a state, parameters or outer optimizer that this exchange would mishandle.

    We check this at trace time, so every rank raises before the first exchange.
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
                f"{_counted(made)}: it was created with different `fragments`, `delay` or `bits`, "
                "or for different parameters. Restore it with the arguments that it was created "
                "with, or create it again. Its contents are then lost."
            )
    # The outer optimizer always receives vectors in place of leaves, so its result mustn't depend
    # on shapes. To verify that, trace it on a single-row matrix as well, which has to yield the
    # same operations.
    vector = fresh.anchor[0]
    row = jax.ShapeDtypeStruct((1, *vector.shape), vector.dtype)
    part = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
    check_elementwise(
        work.outer,
        (row, row),
        (part, part),
        fresh.outer[0],
        f"outer steps of {_WHAT}",
        instead="use `diloco`, whose outer optimizer receives whole leaves",
    )


def _shapes(tree: PyTree) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(jnp.shape(x)), jnp.result_type(x).name) for x in jax.tree.leaves(tree)]


def _counted(found: list[tuple[tuple[int, ...], str]]) -> str:
    kinds = dict.fromkeys(f"{name}{[*shape]}" for shape, name in found)
    return f"{len(found)} arrays of {', '.join(kinds)}" if found else "no arrays"
