"""Normalisation over features that are split across ranks, with a single backward exchange."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

Axes = tuple[str, ...]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def normalise(x: jax.Array, features: int, axes: Axes, epsilon: float, centred: bool) -> jax.Array:
    """Returns this rank's part of `(x - mean) / sqrt(variance + epsilon)` over the last dimension.

    If `centred` is false, the mean is neither computed nor subtracted.

    The forward pass performs an all-reduce of one number per row for the mean, and another for the
    variance. We could save one of them by computing the variance as E[x^2] - E[x]^2, but if the
    mean is large, rounding would leave nothing of that difference. So we subtract the mean first
    and then average the squares. The backward pass gets by with a single all-reduce of two sums per
    row (one if `centred` is false).

    Args:
        x: `[..., features / ranks]`, at least float32.
        features: Length of the last dimension on all ranks together.
        axes: The axis over which the last dimension is cut; empty if it isn't cut.
        epsilon: Constant added to the variance.
        centred: True for layer normalisation (Ba et al., arXiv 1607.06450), false for RMS
            normalisation (arXiv 1910.07467).
    """
    return _passes(x, features, axes, epsilon, centred)[0]


def _passes(
    x: jax.Array, features: int, axes: Axes, epsilon: float, centred: bool
) -> tuple[jax.Array, jax.Array]:
    if centred:
        x = x - _total(jnp.sum(x, -1, keepdims=True), axes) / features
    variance = _total(jnp.sum(x * x, -1, keepdims=True), axes) / features
    scale = jax.lax.rsqrt(variance + epsilon)
    return x * scale, scale


def _forward(
    x: jax.Array, features: int, axes: Axes, epsilon: float, centred: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    normal, scale = _passes(x, features, axes, epsilon, centred)
    return normal, (normal, scale)


def _backward(
    features: int,
    axes: Axes,
    epsilon: float,
    centred: bool,
    saved: tuple[jax.Array, jax.Array],
    g: jax.Array,
) -> tuple[jax.Array]:
    # dx = r (u - mean(u) - x' mean(u x')), where r is the scale, x' the normalised input, and u the
    # cotangent of x'. Without centring, the term mean(u) drops out.
    del epsilon
    normal, scale = saved
    sums = [jnp.sum(g * normal, -1, keepdims=True)]
    if centred:
        sums.append(jnp.sum(g, -1, keepdims=True))
    means = _total(jnp.stack(sums), axes) / features
    g = g - normal * means[0]
    return (scale * (g - means[1] if centred else g),)


def _total(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


normalise.defvjp(_forward, _backward)
