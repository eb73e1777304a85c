"""Validates arguments, states and leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross._arguments import is_whole
from jaxcross._jax_compat import Tracer
from jaxcross._pytree import is_static_leaf


def require_params(params: optax.Params | None, what: str) -> optax.Params:
    """Returns the parameters.

    Raises:
        ValueError: `update` got none.
        TypeError: They have a leaf that isn't an array or a number, like an Equinox module.
    """
    if params is None:
        raise ValueError(
            f"{what} exchanges parameters, but its `update` got no `params`. Write "
            "`tx.update(grads, state, params)`."
        )
    for path, leaf in jax.tree.leaves_with_path(params):
        if is_static_leaf(leaf):
            raise TypeError(
                f"{what} exchanges parameters, but `{jax.tree_util.keystr(path)}` of the `params` "
                f"that its `update` got is a `{type(leaf).__name__}`. Pass only arrays, to `init` "
                "as well. With Equinox, that's `eqx.filter(model, eqx.is_array)`."
            )
    return params


_LARGEST = 2**31 - 1


def whole_number(value: object, name: str, what: str, least: int = 1) -> int:
    """Returns `value` as an int if it's a Python or NumPy integer from `least` to 2^31 - 1.

    Raises:
        ValueError: It isn't.
    """
    if not is_whole(value) or value < least:
        raise ValueError(
            f"`{name}` of {what} must be a whole number, {least} or more, got `{value!r}`."
        )
    if int(value) > _LARGEST:
        raise ValueError(
            f"`{name}` of {what} must be at most {_LARGEST}, as counters have 32 bits, got {value}."
        )
    return int(value)


def as_number(value: Any) -> float:
    """Converts a Python, NumPy or JAX real number to a float, and anything else to NaN.

    NaN isn't in any range, so range checks on the result reject other values too.
    """
    if isinstance(value, bool | str | Tracer):
        return math.nan
    try:
        return math.nan if np.ndim(value) or jnp.result_type(value) == jnp.bool_ else float(value)
    except (TypeError, ValueError):
        return math.nan


def part_kept(decay: object, what: str, of: str) -> float:
    """Returns `decay` as a float, or raises a ValueError if it isn't in [0, 1]."""
    kept = as_number(decay)
    if not 0 <= kept <= 1:
        raise ValueError(
            f"`decay` of {what} is the part of the {of} that is kept, and must be a number in "
            f"[0, 1], got `{decay!r}`."
        )
    return kept


def optimizer_in(
    optimizer: optax.GradientTransformation, what: str
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer that `what` wraps, with support for extra arguments.

    Raises:
        ValueError: `optimizer` is not an optax optimizer.
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"the optimizer of {what} must be an optax optimizer, for example `optax.sgd(0.1)`, "
            f"got `{optimizer!r}`."
        )
    return optax.with_extra_args_support(optimizer)


def check_state(
    state: optax.OptState,
    init: Callable[[optax.Params], optax.OptState],
    params: optax.Params,
    what: str,
) -> None:
    """Raises a ValueError if a state's shapes differ from what `init` creates for `params`."""
    made, fresh = (
        dict(jax.tree.leaves_with_path(tree)) for tree in (state, jax.eval_shape(init, params))
    )
    for path in made | fresh:
        mine, new = (
            f"{list(jnp.shape(tree[path]))}" if path in tree else "nothing"
            for tree in (made, fresh)
        )
        if mine != new:
            raise ValueError(
                f"the state of {what} is {mine} at `{jax.tree_util.keystr(path)}`, but must be "
                f"{new} here: it was created with different arguments, or for different ranks or "
                "parameters. Create it again. Its contents are then lost."
            )


def check_float32(path: jax.tree_util.KeyPath, leaf: jax.typing.ArrayLike, what: str) -> None:
    """Raises a ValueError for a float64 leaf, because `what` is computed in float32.

    A finite float64 number can become infinite in float32.
    """
    if jnp.result_type(leaf) == jnp.float64:
        raise ValueError(
            f"the update `{jax.tree_util.keystr(path)}` is float64, but {what} are float32 and "
            "would round it. Cast the gradients to float32 first, or exclude this leaf with "
            "`optax.masked`."
        )


def check_real(updates: optax.Updates, what: str, *, float64: bool = True) -> None:
    """Raises a ValueError for leaves that aren't real floats, which `what` can't represent.

    With `float64=False`, rejects float64 leaves as well.
    """
    for path, leaf in jax.tree.leaves_with_path(updates):
        if not float64:
            check_float32(path, leaf, what)
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"the update `{jax.tree_util.keystr(path)}` is {jnp.result_type(leaf).name}, but "
                f"{what} need real floating-point leaves. Exclude all others with `optax.masked`."
            )
