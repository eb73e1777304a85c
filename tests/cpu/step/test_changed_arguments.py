"""Errors about arguments whose structure changed: which argument, why, and what to do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxcross.step.signature import describe_structures

ONE_FOR_ALL = (
    " holds another `optax` object. Make one for all jobs: with `optax.inject_hyperparams`, a "
    "value that "
)


def described(old: Any, new: Any) -> str:
    return describe_structures(*map(jax.tree.structure, (old, new)))


def linen(rate: float) -> TrainState:
    optimizer = optax.inject_hyperparams(optax.sgd)(rate)
    return TrainState.create(apply_fn=len, params={"w": jnp.ones(2)}, tx=optimizer)


def in_place(rate: float) -> Any:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return nnx.to_tree((model, nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)))


def test_a_new_optimizer_in_each_job_is_named() -> None:
    old, new = (((linen(rate), jnp.ones(2)), {}) for rate in (0.1, 0.2))
    assert described(old, new).startswith(f"`args[0]`{ONE_FOR_ALL}")
    old, new = (((jnp.ones(2), *in_place(rate)), {}) for rate in (0.1, 0.2))
    assert described(old, new).startswith(f"`args[2]`{ONE_FOR_ALL}")
    old, new = (((), {"batch": 1.0, "state": linen(rate)}) for rate in (0.1, 0.2))
    assert described(old, new).startswith(f"`kwargs['state']`{ONE_FOR_ALL}")


@jax.tree_util.register_pytree_node_class
class Kept:
    def __init__(self, static: object) -> None:
        self.static = static

    def tree_flatten(self) -> tuple[tuple[()], object]:
        return (), self.static

    @classmethod
    def tree_unflatten(cls, static: object, _: tuple[()]) -> Kept:
        return cls(static)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            ((1, [Kept(1)]), {}),
            ((1, [Kept(2)]), {}),
            "what is static in `args[1]`, of type `Kept`, is another object or",
        ),
        (((1, {"a": 1}), {}), ((1, {"b": 1}), {}), "the structure of `args[1]` changed"),
        (((1, {"a": 1}), {}), ((1, {"a": None}), {}), "the structure of `args[1]` changed"),
        (((1, (1, 2)), {}), ((1, (1,)), {}), "the structure of `args[1]` changed"),
        (((1, Kept(1)), {}), ((1, 1), {}), "the structure of `args[1]` changed"),
        (
            ((), {"a": 1, "b": 1}),
            ((), {"a": 1, "b": [1]}),
            "the structure of `kwargs['b']` changed",
        ),
        (((1,), {}), ((1, 2), {}), "it got other arguments"),
        (((1,), {"a": 1}), ((1,), {"b": 1}), "it got other arguments"),
        (((1, 2), {}), ((1,), {"b": 2}), "it got other arguments"),
    ],
)
def test_the_argument_that_changed_is_named(old: Any, new: Any, text: str) -> None:
    assert described(old, new).startswith(text)
