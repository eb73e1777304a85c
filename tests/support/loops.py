"""The table of loops that exchange, and whose number of iterations differs between ranks.

Each row is a step `(t, x)`, with a counter that is identical across ranks and a rank-local array.
A new row is tested in lock step, over MPI, and alongside another job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcross.program import stages
from jaxcross.program.ir import Program
from jaxcross.program.trace import trace
from jaxcross.testing import LocalRanks, decide


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step.

    Attributes:
        step: `(t, x)` -> results.
        axes: Ranks -> axis name -> size.
        votes: Number of votes in the program, or -1 if that isn't compared.
        oracle: If `vmap` has no rule for the step: the step that it runs instead, and its axes.
        rtol: Tolerance against `vmap`; 0 if all sums are exact.
        calls: How many times the step is called, with t = 0, 1, ...
    """

    step: Callable[..., Any]
    axes: Callable[[int], dict[str, int]] = lambda n: {"batch": n}
    votes: int = 1
    oracle: tuple[Callable[..., Any], Callable[[int], dict[str, int]]] | None = None
    rtol: float = 0.0
    calls: int = 2


def cut(step: Any, *args: Any, axes: Any = None) -> Program:
    traced = trace(step, args, axes=axes or {"batch": 2}, wire=LocalRanks())
    return stages.cut(decide(traced, jax.tree.leaves(args)))


def votes(program: Program) -> list[str]:
    return [x.line() for x in program.exchanges if x.op == "pmax" and x.dtype == "int32"]


def loops(program: Program) -> list[str]:
    return [x.line() for x in program.exchanges if "loop" in dict(x.params)]


def own(rank: int) -> Any:
    """A rank's array. Holds whole numbers, whose sums are exact."""
    return np.asarray(
        [1, 2, 3 + 2 * rank], np.result_type(float if jax.config.jax_enable_x64 else np.float32)
    )


def grid(n: int) -> dict[str, int]:
    return {"row": 2, "col": n // 2}


def number(t: Any, axis: Any = "batch") -> Any:
    """A number that differs between ranks and between calls."""
    return 1 + (2 * lax.axis_index(axis) + t) % 4


def micro_batches(t: Any, x: Any) -> Any:
    """Each rank has its own number of micro-batches. The mean is over those that exist."""
    n = number(t)

    def body(i: Any, c: Any) -> Any:
        total, count = c
        return total + lax.psum(jnp.where(i < n, x * i, 0), "batch"), count + lax.psum(
            jnp.where(i < n, 1, 0), "batch"
        )

    return lax.fori_loop(0, n, body, (jnp.zeros_like(x), 0))


def frozen_carry(t: Any, x: Any) -> Any:
    """A rank that has left the loop contributes what its final carry gives."""
    return lax.fori_loop(0, number(t), lambda i, c: c + lax.psum(c[::-1] + i, "batch"), x)


def equal_counts(t: Any, x: Any) -> Any:
    return lax.fori_loop(0, t + 2, lambda i, c: c + lax.psum(c - i, "batch"), x)


def zero_iterations(t: Any, x: Any) -> Any:
    """Rank 0 makes no iteration, and in the first call no rank makes any."""
    return lax.fori_loop(
        0, t * lax.axis_index("batch"), lambda i, c: c + lax.psum(c - i, "batch"), x
    )


def line_search(_: Any, x: Any) -> Any:
    """Each rank halves its step until its own loss falls."""
    loss = lambda v: jnp.sum(v**2)  # noqa: E731
    grad = 2 * x

    def body(c: Any) -> Any:
        size, worst = c
        return size / 2, worst + lax.pmax(loss(x - size * grad), "batch")

    scale = 2.0 ** (2 * lax.axis_index("batch"))
    return lax.while_loop(
        lambda c: loss(x - c[0] * grad) >= loss(x),
        body,
        (scale.astype(x.dtype), jnp.zeros_like(x[0])),
    )


def early_stop(t: Any, x: Any) -> Any:
    """Stops by a rank-local value or by a limit; the carry has several types."""
    key = jax.random.key(3)

    def body(c: Any) -> Any:
        i, v, flag, small, key = c
        v = v + lax.pmax(v, "batch") + i
        return i + 1, v, ~flag, small + lax.psum(small, "batch"), jax.random.fold_in(key, i)

    cond = lambda c: (c[1].sum() < 90 + 100 * lax.axis_index("batch")) & (c[0] < 6 + t)  # noqa: E731
    i, v, flag, small, key = lax.while_loop(cond, body, (0, x, True, jnp.int8(1), key))
    return i, v, flag, small, jax.random.key_data(key)


def nested(t: Any, x: Any) -> Any:
    """The iterations of both loops depend on the rank, and the inner loop's result is exchanged."""
    index = lax.axis_index("batch")

    def outer(i: Any, c: Any) -> Any:
        inner = lax.fori_loop(0, 3 - index % 3, lambda j, d: d + lax.psum(d % 7 + j, "batch"), c)
        return c + lax.psum(inner % 11, "batch") + i

    return lax.fori_loop(0, number(t), outer, x)


def nested_local(t: Any, x: Any) -> Any:
    """The inner loop exchanges nothing; the outer loop exchanges the inner loop's result."""
    shrink = lambda d: lax.while_loop(lambda e: e.sum() > 5, lambda e: jnp.floor(e / 2), d)  # noqa: E731
    return lax.fori_loop(0, number(t), lambda i, c: c + lax.psum(shrink(c) + i, "batch"), x)


def predicate_exchanges(t: Any, x: Any) -> Any:
    """The predicate sums over ranks, so a rank whose predicate was false may have to continue."""

    def cond(c: Any) -> Any:
        i, v = c
        return (lax.psum(v[0], "batch") % 3 != lax.axis_index("batch") % 3) & (i < 5 + t)

    return lax.while_loop(cond, lambda c: (c[0] + 1, c[1] + 1 + lax.axis_index("batch")), (0, x))


def two_axes(t: Any, x: Any) -> Any:
    n = number(t, ("row", "col"))
    return lax.fori_loop(0, n, lambda i, c: c + lax.psum(c % 5, "row") - lax.pmin(c + i, "col"), x)


def one_of_two_axes(t: Any, x: Any) -> Any:
    """Each row of ranks ends by itself, because rows exchange nothing with each other."""
    n = number(t, ("row", "col")) + 2 * lax.axis_index("row")
    return lax.fori_loop(0, n, lambda i, c: c + lax.psum(c % 5 + i, "col"), x)


def in_groups(t: Any, x: Any) -> Any:
    n = lax.psum(1, "batch")
    groups = [[*range(n // 2)], [*range(n // 2, n)]]
    body = lambda i, c: c + lax.psum(c % 5 + i, "batch", axis_index_groups=groups)  # noqa: E731
    return lax.fori_loop(0, number(t), body, x)


def gathers(t: Any, x: Any) -> Any:
    """Exchanges that aren't reductions."""
    p = lax.psum(1, "batch")
    ring = [(i, (i + 1) % p) for i in range(p)]
    body = lambda i, c: lax.ppermute(c, "batch", ring) + lax.all_gather(c % 5, "batch").sum(0) + i  # noqa: E731
    return lax.fori_loop(0, number(t), body, x)


def in_short_scan(t: Any, x: Any) -> Any:
    return lax.scan(lambda c, s: (frozen_carry(t + s, c) % 13, c.sum()), x, jnp.arange(3))


def in_long_scan(t: Any, x: Any) -> Any:
    return lax.scan(
        lambda c, s: (frozen_carry(t + s, c) % 13, c.sum()), x, jnp.arange(70), reverse=True
    )


def in_cond(t: Any, x: Any) -> Any:
    """All ranks take the same branch, because they exchanged the predicate's value."""
    most = lax.pmax(x.sum(), "batch") * (1 - 2 * (t % 2))
    return lax.cond(most > 0, lambda v: frozen_carry(t, v) + 1, lambda v: v - 1, x)


def scan_inside(t: Any, x: Any) -> Any:
    def body(i: Any, c: Any) -> Any:
        return (
            lax.scan(
                lambda d, s: ((d + lax.psum(d % 5 + s, "batch")) % 17, None), c, jnp.arange(2)
            )[0]
            + i
        )

    return lax.fori_loop(0, number(t), body, x)


def equal_inside(t: Any, x: Any) -> Any:
    """The inner loop ends by an exchanged value, so it needs no vote."""

    def body(i: Any, c: Any) -> Any:
        inner = lax.while_loop(
            lambda d: d[0] < 40,
            lambda d: (lax.psum(d[1].sum(), "batch") + d[0], d[1] + 1),
            (0.0, c),
        )
        return c + inner[0] + i

    return lax.fori_loop(0, number(t), body, x)


def cond_inside(t: Any, x: Any) -> Any:
    """Each iteration takes one of three branches, two of which exchange, by the loop's counter.

    The counter is rank-local: a rank that has left the loop no longer counts, so by itself it would
    take a different branch than the ranks that are still iterating.
    """

    def body(i: Any, c: Any) -> Any:
        ways = [
            lambda v: v + lax.psum(v % 5, "batch"),
            lambda v: v - 1,
            lambda v: v + lax.pmax(v, "batch"),
        ]
        return lax.switch(i % 3, ways, c)

    return lax.fori_loop(0, number(t), body, x)


def mapped_inside(t: Any, x: Any) -> Any:
    """The step contains a `vmap`, whose elements end at different iterations, too."""
    one = lambda n, v: lax.fori_loop(0, n, lambda i, c: c + lax.psum(c % 5 + i, "batch"), v)  # noqa: E731
    return jax.vmap(one)(number(t) + jnp.arange(3) % 2, x)


def mapped_equal(_: Any, x: Any) -> Any:
    """The elements end at different iterations, but at the same ones on every rank."""
    one = lambda n: lax.fori_loop(0, n, lambda i, c: c + lax.psum(c % 5 + i, "batch"), x)  # noqa: E731
    return jax.vmap(one)(jnp.arange(4))


def in_gradient(t: Any, x: Any) -> Any:
    """Forward-mode differentiation through the loop."""
    step = lambda v: lax.fori_loop(0, number(t), lambda i, c: c + lax.psum(c * v, "batch"), v)  # noqa: E731
    return jax.jvp(step, (x,), (jnp.ones_like(x),))


def least_squares(x: Any) -> tuple[Any, Callable[..., Any]]:
    weights = jnp.stack([x, x[::-1], x * 0 + 1]) / 10
    loss = lambda p: jnp.sum((weights @ p - x) ** 2) + jnp.sum(p**4)  # noqa: E731
    return jnp.ones_like(x), loss


def solved(tx: Any, loss: Callable[..., Any], params: Any) -> Any:
    state = tx.init(params)
    value_and_grad = optax.value_and_grad_from_state(loss)
    for _ in range(2):
        value, grad = value_and_grad(params, state=state)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        params = optax.apply_updates(params, updates)
    return params, value


def mean_loss(x: Any) -> tuple[Any, Callable[..., Any]]:
    """A loss whose gradient is the mean of the ranks' gradients, as a line search needs it."""
    params, loss = least_squares(x)

    @jax.custom_vjp
    def mean(p: Any) -> Any:
        return lax.pmean(loss(p), "batch")

    def forward(p: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(p)
        return lax.pmean(value, "batch"), lax.pmean(grad, "batch")

    mean.defvjp(forward, lambda grad, g: (g * grad,))
    return params, mean


def lbfgs(_: Any, x: Any) -> Any:
    params, loss = mean_loss(x)
    return solved(optax.lbfgs(), loss, params)


def backtracking(_: Any, x: Any) -> Any:
    """The gradient is stored only at the end: an exchange after a conditional in the loop."""
    params, loss = least_squares(x)
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True))
    return solved(tx, lambda p: lax.pmean(loss(p), "batch"), params)


def zoom(_: Any, x: Any) -> Any:
    """Each rank searches along its own gradient, so ranks need different numbers of iterations."""
    params, loss = least_squares(x)
    coupled = lambda p: loss(p) + 0 * lax.pmean(loss(lax.stop_gradient(p)), "batch")  # noqa: E731
    tx = optax.chain(
        optax.sgd(0.3), optax.scale_by_zoom_linesearch(9, initial_guess_strategy="one")
    )
    return solved(tx, coupled, params)


TABLE = {
    "micro-batches": Row(step=micro_batches, calls=3),
    "frozen carry": Row(step=frozen_carry, calls=4),
    "equal counts": Row(step=equal_counts),
    "zero iterations": Row(step=zero_iterations),
    "line search": Row(step=line_search, calls=1),
    "early stop": Row(step=early_stop),
    "nested": Row(step=nested, votes=2, calls=3),
    "nested, local": Row(step=nested_local),
    "predicate exchanges": Row(step=predicate_exchanges),
    "two axes": Row(step=two_axes, axes=grid),
    "one of two axes": Row(step=one_of_two_axes, axes=grid, votes=-1),
    "groups": Row(
        step=in_groups,
        oracle=(lambda t, x: lax.fori_loop(
            0, number(t, ("row", "col")), lambda i, c: c + lax.psum(c % 5 + i, "col"), x), grid),
    ),
    "gathers": Row(step=gathers),
    "in a short scan": Row(step=in_short_scan),
    "in a long scan": Row(step=in_long_scan, calls=1),
    "in a cond": Row(step=in_cond),
    "scan inside": Row(step=scan_inside),
    "equal loop inside": Row(step=equal_inside),
    "cond inside": Row(step=cond_inside, votes=2),
    "vmap inside": Row(step=mapped_inside),
    "vmap inside, equal counts": Row(step=mapped_equal, votes=0),
    "forward mode": Row(step=in_gradient),
    "lbfgs": Row(step=lbfgs, votes=-1, rtol=1e-4, calls=1),
    "backtracking": Row(step=backtracking, votes=-1, rtol=1e-4, calls=1),
    "zoom": Row(step=zoom, votes=-1, rtol=1e-4, calls=1),
}  # fmt: skip
