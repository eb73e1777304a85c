"""The table of steps that solve with an operator that exchanges, for tests with and without MPI."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

SIZE, ROWS = 6, 8


def rows(rank: int) -> np.ndarray:
    """A rank's own data. The matrix is made from all ranks' data."""
    return np.random.default_rng(rank).normal(size=(ROWS, SIZE)).astype(np.float32)


def weights() -> np.ndarray:
    """Weights that are identical across ranks."""
    return np.linspace(-1, 1, SIZE, dtype=np.float32)


def mean(x: Any) -> Any:
    return lax.pmean(x, "batch")


def fisher(x: Any, damping: Any = 0.1) -> Any:
    """`v -> (mean over ranks of X'X / n + damping) v`: symmetric and positive definite."""
    return lambda v: mean(x.T @ (x @ v)) / ROWS + damping * v


def skew(x: Any) -> Any:
    """An operator that isn't symmetric."""
    return lambda v: fisher(x, 1.0)(v) + 0.3 * mean(jnp.tanh(x[:SIZE])) @ v


def gradient(w: Any, x: Any) -> Any:
    return mean(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w))


def natural_gradient(w: Any, x: Any) -> Any:
    """A solve as natural-gradient code does it: the Fisher product comes from `jvp` and `vjp`."""

    def product(v: Any) -> Any:
        model = lambda w: jnp.tanh(x @ w)  # noqa: E731
        _, tangent = jax.jvp(model, (w,), (v,))
        return mean(jax.vjp(model, w)[1](tangent)[0]) / ROWS + 0.1 * v

    return w - cg(product, gradient(w, x))[0]


def with_a_guess(w: Any, x: Any) -> Any:
    return cg(fisher(x), gradient(w, x), x0=w, tol=1e-4, maxiter=3, M=lambda v: 0.5 * v)[0]


def through_cg(w: Any, x: Any) -> Any:
    """The gradient of a loss of the solution, through the operator and the right-hand side."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(cg(fisher(x * (1 + w**2)), mean(x.T @ jnp.tanh(x @ w)))[0] ** 2)

    return jax.grad(loss, argnums=(0, 1))(w, x)


def by_hand(w: Any, x: Any) -> Any:
    """`custom_linear_solve` by a series of fixed length, whose right-hand side is rank-local."""

    def series(product: Any, b: Any) -> Any:
        v = b
        for _ in range(4):
            v = v + 0.3 * (b - product(v))
        return v

    def loss(w: Any) -> Any:
        return jnp.sum(lax.custom_linear_solve(skew(x), x[0] * w, series, series) ** 2)

    return jax.value_and_grad(loss)(w)


def solver_alone(w: Any, x: Any) -> Any:
    """Only the operator exchanges, and the function passed as the solver doesn't call it."""
    return lax.custom_linear_solve(fisher(x), w + x[0], lambda _, b: b / 2, symmetric=True)


def in_a_loop(w: Any, x: Any) -> Any:
    def body(w: Any, _: Any) -> Any:
        w = natural_gradient(w, x)
        return w, jnp.sum(w)

    return lax.scan(body, w, None, length=3)


def in_a_longer_loop(w: Any, x: Any) -> Any:
    """A loop that is too long to be unrolled."""
    return lax.fori_loop(0, 70, lambda _, w: 0.5 * w + 0.01 * by_hand(w, x)[1], w)


def in_a_conditional(w: Any, x: Any) -> Any:
    return lax.cond(mean(jnp.sum(x)) < 1e6, lambda w: by_hand(w, x)[1], lambda w: w, w)


def in_a_jitted_function(w: Any, x: Any) -> Any:
    """The two calls share one jaxpr."""
    step = jax.jit(jax.checkpoint(natural_gradient))
    return step(step(w, x), x)


def root(w: Any, x: Any) -> Any:
    """`custom_root`: Newton steps towards the root of an equation over all ranks, differentiated
    with respect to the equation's data.
    """

    def step(f: Any, z: Any) -> Any:
        return jnp.linalg.solve(jax.jacobian(f)(z), f(z))

    def loss(w: Any, x: Any) -> Any:
        f = lambda z: fisher(x)(z) + 0.1 * z**3 - mean(x.T @ jnp.tanh(x @ w)) / ROWS  # noqa: E731
        newton = lambda f, guess: lax.fori_loop(0, 8, lambda _, z: z - step(f, z), guess)  # noqa: E731
        z = lax.custom_root(
            f, jnp.zeros_like(w), newton, lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
        )
        return jnp.sum(z**2)

    return jax.value_and_grad(loss)(w, x)


def iterations_by_rank(w: Any, x: Any) -> Any:
    """One iteration on rank 0, and more on every other rank, each of which has another matrix."""
    spread = 1 + lax.axis_index("batch") * jnp.arange(SIZE, dtype=w.dtype)
    return cg(lambda v: spread * v + 0 * mean(v), x[0] + w, tol=1e-6)[0]


STEPS: dict[str, Any] = {
    "natural gradient": natural_gradient,
    "a guess and a preconditioner": with_a_guess,
    "through cg": through_cg,
    "gmres": lambda w, x: gmres(skew(x), gradient(w, x))[0],
    "gmres, incremental": lambda w, x: gmres(skew(x), gradient(w, x), solve_method="incremental")[
        0
    ],
    "bicgstab": lambda w, x: bicgstab(skew(x), gradient(w, x))[0],
    "by hand": by_hand,
    "a solver alone": solver_alone,
    "in a loop": in_a_loop,
    "in a longer loop": in_a_longer_loop,
    "in a conditional": in_a_conditional,
    "in a jitted function": in_a_jitted_function,
    "a root": root,
    "iterations by rank": iterations_by_rank,
}
# A solver stops once its residual is below 1e-5 of the right-hand side. Different rounding can make
# it stop one iteration earlier or later, and a gradient depends on two solves, so the tolerance has
# to be larger than 1e-5.
RTOL = 2e-4
