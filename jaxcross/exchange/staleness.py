"""Scheduled staleness: bounded-stale and asynchronous training, simulated with delay queues.

With a real parameter server whose workers don't wait for each other, staleness depends on timing
and runs can't be reproduced. Here, you specify the delays yourself, and delayed gradients sit in
queues in the optimizer's state. This lets you study and test how delays affect convergence.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross._pytree import PyTree
from jaxcross.checkpoint import RankLocal
from jaxcross.exchange import collectives
from jaxcross.exchange.arithmetic import accumulation_dtype
from jaxcross.exchange.exchange_once import exchange_once
from jaxcross.exchange.validation import optimizer_in, whole_number


class StaleState(NamedTuple):
    """State of `asynchronous`.

    Attributes:
        step: Step modulo the schedule's period, int32.
        queue: Gradients that haven't arrived yet, as a tree like the gradients with an additional
            leading axis for the slots, at least float32. Gradients that arrive on step `t` are in
            slot `t mod length`.
        inner: State of the optimizer.
    """

    step: jax.Array
    queue: PyTree
    inner: optax.OptState

    rank_local = RankLocal(unsent=("queue",), maybe_empty=("inner",))


class BoundedStaleState(NamedTuple):
    """State of `bounded_stale`.

    Attributes:
        step: Step modulo the staleness, int32.
        late: The other ranks' gradients that haven't been applied yet, in slots as in `StaleState`.
        inner: State of this rank's own optimizer.
    """

    step: jax.Array
    late: PyTree
    inner: optax.OptState

    rank_local = RankLocal(unsent=("late",), model=("inner",), maybe_empty=("inner",))


def bounded_stale(
    optimizer: optax.GradientTransformation, axes: collectives.Axes, *, staleness: int
) -> optax.GradientTransformationExtraArgs:
    """Steps on a rank's own gradient right away, and on the others' `staleness` steps late.

    This is the worst case permitted by stale-synchronous parallelism (SSP). Under SSP, a rank
    always sees its own writes, along with any other rank's writes that are more than `staleness`
    clocks old. It may see newer ones too, but here it never does.

    Every gradient counts exactly once on each rank, divided by the number of ranks. Parameters and
    state differ between ranks, so save them per rank. Deterministic. With `staleness=0`, the result
    is bitwise identical to `mean` in front of `optimizer`.

    ```python
    tx = jaxcross.exchange.bounded_stale(optax.sgd(0.1), "batch", staleness=3)
    ```

    Args:
        optimizer: Steps on the sum of whatever arrives.
        axes: One axis name, or a tuple of names that act as a single axis.
        staleness: How many steps late the other ranks' gradients are. Each step takes up the memory
            of one set of gradients.

    Raises:
        ValueError: `staleness` is not a non-negative whole number.

    Bytes received per rank: as for the mean, `2(P-1)/P` times the bytes of the gradients. No
    messages are actually delayed by the simulation: gradients are sent immediately, and the
    receiver holds on to them.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Ho et al., More effective distributed ML via a stale synchronous parallel parameter
    server, NIPS 2013, section 2 (the definition of SSP); Langer et al., arXiv 2007.03970, section
    3.3.4.
    """
    staleness = whole_number(staleness, "staleness", "`bounded_stale`", least=0)
    names = collectives.axis_names(axes)
    inner = optimizer_in(optimizer, "`bounded_stale`")

    def init(params: optax.Params) -> BoundedStaleState:
        return BoundedStaleState(
            jnp.zeros((), jnp.int32), _empty(params, staleness), inner.init(params)
        )

    def update(
        updates: optax.Updates,
        state: BoundedStaleState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, BoundedStaleState]:
        everybody = jax.tree.map(lambda g: jax.lax.pmean(g, names), updates)
        queue = state.late
        step = state.step
        _check_queue(queue, staleness, "`bounded_stale`", f"`staleness` is {staleness}")
        if staleness:
            ranks = jax.lax.psum(1, names)
            late = jax.tree.map(lambda q: q[step], queue)
            own = jax.tree.map(lambda g, q: g.astype(q.dtype) / ranks, updates, late)
            others = jax.tree.map(lambda x, mine: x.astype(mine.dtype) - mine, everybody, own)
            queue = jax.tree.map(lambda q, x: q.at[step].set(x), queue, others)
            everybody = jax.tree.map(
                lambda g, mine, old: (mine + old).astype(g.dtype), updates, own, late
            )
            step = (step + 1) % staleness
        updates, inner_state = inner.update(everybody, state.inner, params, **extra)
        return updates, BoundedStaleState(step, queue, inner_state)

    return exchange_once(
        "bounded_stale",
        names,
        optax.GradientTransformationExtraArgs(init, update),  # pyright: ignore[reportArgumentType]
    )


def asynchronous(
    optimizer: optax.GradientTransformation,
    axes: collectives.Axes,
    *,
    delays: int | Sequence[int] | Sequence[Sequence[int]],
) -> optax.GradientTransformationExtraArgs:
    """Steps on the mean of the gradients that *arrive* on this step, each with its own delay.

    This simulates an asynchronous server with scheduled arrival times: a gradient computed on the
    parameters of step `t` isn't applied until step `t + delay`, by which time the parameters have
    changed. Each gradient is applied exactly once.

    Parameters and updates are bitwise identical on every rank, but the queue of gradients that
    haven't arrived yet is rank-local. Deterministic. If all delays are 0, the result is bitwise
    identical to `mean` in front of `optimizer`.

    ```python
    tx = jaxcross.exchange.asynchronous(optax.sgd(0.1), "batch", delays=[[0, 1], [2, 1]])
    ```

    Args:
        optimizer: Steps on the mean of whatever arrives, identically on every rank.
        axes: One axis name. Several raise an error.
        delays: Delays in steps: a single number, one number per rank, or a table `[step][rank]`
            that repeats. The largest delay is also the number of sets of gradients to keep in
            memory.

    Raises:
        ValueError: A delay is not a non-negative whole number, rows differ in length, or there
            isn't one delay per rank (at the first trace).

    Bytes received per rank: as for the mean, `2(P-1)/P` times the bytes of the gradients.

    Communicates only in `update`, over its axes. All ranks must call it on the same step.

    Source: Langer et al., arXiv 2007.03970, section 3.3.3; Agarwal and Duchi, arXiv 1104.5525
    (delayed SGD).
    """
    axis = collectives.one_axis(axes, "`asynchronous`")
    table = _table(delays)
    # The queue has one slot per step, from the current step to the latest possible arrival.
    slots = int(table.max()) + 1
    period = int(np.lcm(len(table), slots))
    inner = optimizer_in(optimizer, "`asynchronous`")

    def init(params: optax.Params) -> StaleState:
        return StaleState(
            jnp.zeros((), jnp.int32), _empty(params, slots if slots > 1 else 0), inner.init(params)
        )

    def update(
        updates: optax.Updates, state: StaleState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, StaleState]:
        queue = state.queue
        step = state.step
        _check_queue(
            queue,
            slots if slots > 1 else 0,
            "`asynchronous`",
            f"the largest of `delays` is {slots - 1}",
        )
        if slots > 1:
            delay = _delay(table, step, axis)
            sent = jax.tree.map(
                lambda q, g: q.at[(step + delay) % slots].add(g.astype(q.dtype)), queue, updates
            )
            updates = jax.tree.map(lambda q, g: q[step % slots].astype(g.dtype), sent, updates)
            queue = jax.tree.map(lambda q: q.at[step % slots].set(0), sent)
            step = (step + 1) % period
        else:
            _delay(table, step, axis)
        updates = jax.tree.map(lambda g: jax.lax.pmean(g, axis), updates)
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        return updates, StaleState(step, queue, inner_state)

    return exchange_once("asynchronous", axes, optax.GradientTransformationExtraArgs(init, update))  # pyright: ignore[reportArgumentType]


def _empty(params: optax.Params, slots: int) -> PyTree:
    """Returns an all-zero queue in float32 or wider, which avoids rounding the queued gradients."""
    return (
        jax.tree.map(
            lambda x: jnp.zeros((slots, *jnp.shape(x)), accumulation_dtype(jnp.result_type(x))),
            params,
        )
        if slots
        else None
    )


def _check_queue(queue: PyTree, slots: int, what: str, why: str) -> None:
    """Rejects a state made for different delays, which would lose or double-count gradients."""
    found = {len(q) for q in jax.tree.leaves(queue)} if queue is not None else {0}
    if found not in ({slots}, set()):
        raise ValueError(
            f"{what} got a state with {found.pop()} slots for delayed gradients, but {why}, which "
            f"needs {slots}. Restore the state with the delays that it was created with, or start "
            "with a new state. The delayed gradients are then lost."
        )


def _table(delays: object) -> np.ndarray:
    """Returns the delays as `[step, rank]`, or `[step, 1]` if they're the same for all ranks."""
    rows = list(delays) if isinstance(delays, Sequence | np.ndarray) else [[delays]]
    rows = (
        [rows]
        if rows and not isinstance(rows[0], Sequence | np.ndarray)
        else [list(row) for row in rows]
    )
    flat = [d for row in rows for d in row]
    ragged = len({len(row) for row in rows}) != 1
    counts = all(
        isinstance(d, int | np.integer) and not isinstance(d, bool) and d >= 0 for d in flat
    )
    if ragged or not flat or not counts:
        raise ValueError(
            "`delays` of `asynchronous` must be whole numbers of steps, 0 or more: one for all "
            f"ranks, one per rank, or rows with one per rank, got `{delays!r}`."
        )
    return np.asarray(rows, np.int32)


def _delay(table: np.ndarray, step: jax.Array, axis: Hashable) -> jax.Array:
    ranks = jax.lax.axis_size(axis)
    if table.shape[1] not in (1, ranks):
        raise ValueError(
            f"`delays` of `asynchronous` are for {table.shape[1]} ranks, but the axis has {ranks}. "
            "Give one per rank."
        )
    rank = jax.lax.axis_index(axis) if table.shape[1] > 1 else 0
    return jnp.asarray(table)[step % len(table), rank]
