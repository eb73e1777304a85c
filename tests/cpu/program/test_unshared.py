"""Donated arrays that occur several times among the arguments are copied: XLA would reject them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxcross.program.step_checks import copy_shared


def test_array_also_passed_to_be_retained_is_retained() -> None:
    """If an array is also passed to be retained, that occurrence isn't replaced by a copy."""
    kept, key = jnp.ones(3), jax.random.key(0)
    leaves = [kept, kept, key, key, 1.0, 1.0]
    copy_shared(leaves, {1, 2, 3}, new_types=True)
    assert leaves[0] is kept
    assert leaves[1] is not kept
    assert leaves[1].tolist() == [1.0] * 3
    assert leaves[2] is key
    assert leaves[3] is not key
    assert (jax.random.key_data(leaves[3]) == jax.random.key_data(key)).all()


def test_arrays_that_stand_once_are_not_copied() -> None:
    leaves: list[Any] = [jnp.ones(3), jnp.ones(3), jnp.ones(())]
    before = list(leaves)
    for new_types in (True, False):
        copy_shared(leaves, {0, 1, 2}, new_types=new_types)
        assert all(x is y for x, y in zip(leaves, before, strict=True))
