"""Optimizers that parameter servers may apply to flat parts, and those they reject."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import pallas as pl

from jaxcross.exchange import sharded_optimizer
from jaxcross.server.message_layout import MessageLayout
from jaxcross.server.served_part import ServedPart
from jaxcross.testing import vmapped

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PARAMS = {
    "w": jnp.ones((4, 3)),
    "b": jnp.ones(3),
    "s": jnp.ones(()),
    "h": jnp.ones((2, 2), jnp.bfloat16),
}
MASK = {"w": True, "b": False, "s": False, "h": True}


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def remembers_a_norm() -> optax.GradientTransformation:
    """Returns an optimizer that keeps a norm for the next step."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda u: u * state.astype(u.dtype), updates), optax.tree.norm(updates)

    return optax.GradientTransformation(lambda p: jnp.zeros(()), update)


RATE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100)
PIECES = optax.piecewise_interpolate_schedule("cosine", 0.1, {10: 0.5, 20: 0.1})
GOOD = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adam": optax.adam(PIECES),
    "amsgrad": optax.amsgrad(0.1),
    "adamw": optax.adamw(RATE, weight_decay=0.1),
    "adamw, masked": optax.adamw(0.1, weight_decay=0.1, mask=MASK),
    "rmsprop": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "adagrad": optax.adagrad(0.1),
    "lion": optax.lion(0.1),
    "radam": optax.radam(0.1),
    "clip": optax.chain(
        optax.clip(1.0), optax.zero_nans(), optax.add_decayed_weights(1e-4), optax.sgd(0.1)
    ),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "several steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "labels": optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "b": "b", "s": "a", "h": "a"}
    ),
    "accumulators of 16 bits": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "flattened": optax.flatten(optax.adam(0.1)),
    "flattened, decayed": optax.chain(
        optax.flatten(optax.adam(0.1)), optax.add_decayed_weights(0.1)
    ),
    "a table": optax.stateless(
        lambda u, p: u | {"w": jnp.asarray([1.0, 0.5])[(u["w"] > 0).astype(int)]}
    ),
}
ACROSS = {
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "block": optax.clip_by_block_rms(1.0),
    "adafactor": optax.adafactor(0.1),
    "adaptive": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "norm in several steps": optax.MultiSteps(optax.lamb(0.1), 2).gradient_transformation(),
    "noise": optax.add_noise(0.1, 0.5, 0),
    "remembered": remembers_a_norm(),
}


def each(function: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda u, p: jax.tree.map(function, u))


ACROSS |= {
    "by place": each(lambda x: x / (1 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)),
    "by a place's table": each(
        lambda x: x * jnp.arange(1.0, x.size + 1, dtype=x.dtype).reshape(x.shape)
    ),
    "by another leaf": optax.stateless(lambda u, p: u | {"w": u["w"] * p["s"].reshape(-1)[0]}),
    "by a broadcast": optax.stateless(lambda u, p: u | {"w": u["w"] * p["s"].reshape(-1)[:1]}),
    "rolled": each(lambda x: jnp.roll(x.reshape(-1), 1).reshape(x.shape)),
    "reversed": each(lambda x: x.reshape(-1)[::-1].reshape(x.shape)),
    "by the first": each(lambda x: x / x.reshape(-1)[0]),
    "by neighbours": each(lambda x: x - jnp.pad(x.reshape(-1)[1:], (0, 1)).reshape(x.shape)),
    "rolled in a loop": each(
        lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jnp.roll(y, 1), x.reshape(-1)).reshape(
            x.shape
        )
    ),
    "taken": each(lambda x: x.reshape(-1)[jnp.zeros(x.size, int)].reshape(x.shape)),
}
BY_SHAPE = {
    "mask": optax.adamw(0.1, weight_decay=0.1, mask=matrices),
    "masked": optax.masked(optax.sgd(0.1), matrices),
    "size": optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda x: x.size > 3, p)),
    "share": optax.stateless(
        lambda u, p: jax.tree.map(lambda x: x / jnp.asarray(x.size, x.dtype) * x.size, u)
    ),
}


def kernel(sums: bool) -> optax.GradientTransformation:
    """Returns momentum in a Pallas kernel, which writes its result instead of returning it."""

    def step(u: Any, m: Any, out: Any) -> None:
        out[...] = u[...] + 0.9 * (m[...].sum() if sums else m[...])

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def one(u: Any, m: Any) -> Any:
            return pl.pallas_call(step, jax.ShapeDtypeStruct(u.shape, u.dtype), interpret=True)(
                u, m
            )

        made = jax.tree.map(one, updates, state)
        return made, made

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def two_moments() -> optax.GradientTransformation:
    """Returns an optimizer whose state keeps two moments as the rows of one array."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = jax.tree.map(lambda s, u: jnp.stack([0.9 * s[0] + u, s[1] + u * u]), state, updates)
        return jax.tree.map(lambda s: s[0] / (1 + s[1]), new), new

    return optax.GradientTransformation(
        lambda p: jax.tree.map(lambda x: jnp.stack([x * 0] * 2), p), update
    )


GOOD["two moments"] = two_moments()
# Counts up to as many as some parts have elements, and reduces that to one number.
GOOD |= {
    f"a schedule of {n}": optax.sgd(lambda c, n=n: 0.1 * 0.5 ** jnp.sum(jnp.arange(n) * 9 < c))
    for n in (1, 2, 3, 6)
}
GOOD["kernel"], ACROSS["kernel"] = kernel(sums=False), kernel(sums=True)


def collective(optimizer: optax.GradientTransformation) -> None:
    tx = sharded_optimizer(optimizer, "batch")
    step = vmapped(lambda p: tx.update(p, tx.init(p), p), {"batch": 2})
    jax.eval_shape(step, jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS))


def real(optimizer: optax.GradientTransformation) -> None:
    layout = MessageLayout(PARAMS, 2)
    ServedPart(optimizer, layout, layout.parts(jax.tree.leaves(PARAMS))[0], ranks=2)


BOTH = pytest.mark.parametrize(
    ("server", "name"), [(collective, "`sharded_optimizer`"), (real, "a parameter server")]
)


@pytest.mark.mostly_integration(
    "collective-`sharded_optimizer`-adamw, masked",
    "collective-`sharded_optimizer`-clip",
    "collective-`sharded_optimizer`-flattened",
    "real-a parameter server-sgd",
    "real-a parameter server-adamw, masked",
)
@pytest.mark.parametrize("optimizer", [pytest.param(tx, id=name) for name, tx in GOOD.items()])
@BOTH
def test_element_by_element(
    server: Any, name: str, optimizer: optax.GradientTransformation
) -> None:
    server(optimizer)


@pytest.mark.mostly_integration(
    "real-a parameter server-by a place's table",
    "real-a parameter server-by another leaf",
    "real-a parameter server-by a broadcast",
    "real-a parameter server-reversed",
    "real-a parameter server-by the first",
)
@pytest.mark.parametrize("optimizer", [pytest.param(tx, id=name) for name, tx in ACROSS.items()])
@BOTH
def test_across_elements(server: Any, name: str, optimizer: optax.GradientTransformation) -> None:
    text = (
        rf"^the optimizer of {name} does not work element by element: its updates depend on the "
        r"result of `\w+`\."
    )
    with pytest.raises(ValueError, match=text):
        server(optimizer)


@pytest.mark.parametrize("optimizer", [pytest.param(tx, id=name) for name, tx in BY_SHAPE.items()])
@BOTH
def test_by_shape(server: Any, name: str, optimizer: optax.GradientTransformation) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^the optimizer of {name} computes `.+` on whole leaves, but `.+` on",
    ):
        server(optimizer)


def test_whoever_hands_parameters_on_or_not() -> None:
    tx = sharded_optimizer(optax.sgd(0.1), "batch")
    step = vmapped(lambda p: tx.update(p, tx.init(p)), {"batch": 2})
    assert jax.eval_shape(step, jnp.ones((2, 5)))[0].shape == (2, 5)
