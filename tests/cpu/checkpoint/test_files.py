"""The layout of a checkpoint on disk: leaves of every kind, parts, folders."""

import importlib
import os
import pkgutil
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxcross import _pytree, exchange
from jaxcross.checkpoint import arrays
from jaxcross.checkpoint.folders import Folders, checkpoint_name
from jaxcross.checkpoint.rank_local import rank_local_leaves
from jaxcross.exchange.decoupled_momentum import DecoupledMomentumState


def train_state():
    params = {
        "dense/0": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.zeros(3, jnp.bfloat16)},
        "a.b": jnp.ones(()),
    }
    tx = optax.chain(optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10)))
    return TrainState.create(apply_fn=lambda *_: None, params=params, tx=tx)


def nnx_state():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return nnx.split((model, optimizer))[1]


def nnx_objects():
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))


def odd_leaves():
    weak = jnp.broadcast_to(jnp.asarray(2.0), (3,))
    assert weak.weak_type
    return {
        "weak": weak,
        "weak scalar": jnp.asarray(3),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "old key": jax.random.PRNGKey(3),
        "numbers": [True, 3, 2.5, 1 - 2j, -(2**62)],
        "numpy": (
            np.arange(4, dtype=np.float64)[::2],
            np.asfortranarray(np.ones((2, 3), np.int8)),
            np.zeros((), bool),
        ),
        "generic": np.float32(1.5),
        "empty": (jnp.zeros((0, 3)), np.zeros((2, 0), np.int16)),
        "none": None,
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf]),
    }


STATES = {
    "train state": train_state,
    "nnx state": nnx_state,
    "nnx objects": nnx_objects,
    "odd leaves": odd_leaves,
    "no leaves": dict,
    "one array": lambda: jnp.ones(3),
    "one number": lambda: 0.25,
}


def identical(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if isinstance(x, jax.Array):
            assert (x.aval, x.sharding, x.committed) == (y.aval, y.sharding, y.committed)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(x) == jax.random.key_impl(y)
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.mark.mostly_integration(
    "train state", "nnx objects", "no leaves", "one array", "one number"
)
@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_a_state_comes_back_as_it_was(make, tmp_path):
    state = make()
    taken = _pytree.snapshot(state)
    forms = {path: leaf.form for path, leaf in taken.items()}
    arrays.write(tmp_path / "state", {path: leaf.array for path, leaf in taken.items()})
    read = arrays.read(tmp_path / "state", forms)
    assert {path: _pytree.digest(forms[path], array) for path, array in read.items()} == {
        path: leaf.digest for path, leaf in taken.items()
    }
    assert _pytree.unlike(_pytree.forms_of(state), forms) is None
    identical(_pytree.rebuild(jax.tree.map(lambda x: x, state), forms, read), state)


EXCHANGES = {
    "top_k": lambda: exchange.top_k(0.1, axes="b"),
    "gtop_k": lambda: exchange.gtop_k(0.1, axes="b"),
    "power_sgd": lambda: exchange.power_sgd(1, axes="b"),
    "one_bit_adam": lambda: exchange.one_bit_adam(3, "b", ranks=2),
    "asynchronous": lambda: exchange.asynchronous(optax.sgd(0.1), "b", delays=2),
}


@pytest.mark.mostly_integration("gtop_k", "one_bit_adam", "asynchronous")
@pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES)
def test_what_an_exchange_keeps_for_a_rank_is_known(make):
    tx = optax.chain(optax.clip(1.0), make(), optax.adam(0.1))
    params = {"residual": jnp.zeros((64, 64)), "queue": jnp.zeros((200, 100))}
    # What counts is the exchange's own field, rather than a parameter the user gave the same name.
    found = rank_local_leaves({"params": params, "opt": tx.init(params)})
    assert found and all(
        re.match(r"\['opt'\]\[1\]\.(\w*residual|queue)\b", path) for path in found
    ), found
    nnx_tree = nnx.split(nnx.Optimizer(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param))[1]
    assert rank_local_leaves(nnx_tree) and all(
        path.startswith("['opt_state'][1]") for path in rank_local_leaves(nnx_tree)
    )


def test_plain_states_hold_nothing_of_one_rank_s_own():
    for make in STATES.values():
        assert rank_local_leaves(make()) == []
    assert rank_local_leaves({"residual": jnp.zeros(3), "dense": jnp.zeros(3)}) == []


@pytest.mark.parametrize("name", ["residual", "queue", "worker_residual", "server_residual"])
def test_sole_parameter_may_have_an_exchange_name(name):
    """A model's only parameter may be named like a field of an exchange's state."""
    params = {name: {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}}
    assert rank_local_leaves({"params": params, "opt": optax.adam(0.1).init(params)}) == []
    model = nnx.Dict(**{name: nnx.Linear(3, 2, rngs=nnx.Rngs(0))})
    assert (
        rank_local_leaves(
            nnx.split((model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)))[1]
        )
        == []
    )


def test_every_exchange_that_keeps_residuals_is_known():
    kinds: list[Any] = [
        kind
        for module in pkgutil.iter_modules(exchange.__path__)
        for kind in vars(importlib.import_module(f"jaxcross.exchange.{module.name}")).values()
        if isinstance(kind, type)
        and issubclass(kind, tuple)
        and kind.__module__.startswith("jaxcross.exchange")
        and kind.__name__.endswith("State")
    ]
    assert len(kinds) > 5
    for kind in kinds:
        state = kind(*[jnp.zeros(3)] * len(kind._fields))
        found = {path[1:] for path in rank_local_leaves(state)}
        own = {
            name
            for name in kind._fields
            if "residual" in name or name in ("queue", "late", "pending")
        }
        assert found == (own or {"momentum"} if kind is DecoupledMomentumState else own), kind


TYPES = [
    "bool", "int64", "uint64", "float16", "float32", "float64", "complex64", "complex128",
    "int8", "int16", "int32", "uint8", "uint16", "uint32",
    *(name for name in dir(ml_dtypes) if name.startswith(("bfloat", "float", "int", "uint"))),
]  # fmt: skip


def test_every_element_type_comes_back(tmp_path):
    dtypes = {name: np.dtype(name) for name in TYPES}
    state = {name: np.array([0, 1, 1, 0]).astype(dtype) for name, dtype in dtypes.items()}
    taken = _pytree.snapshot(state)
    arrays.write(tmp_path / "state", {path: leaf.array for path, leaf in taken.items()})
    forms = {path: leaf.form for path, leaf in taken.items()}
    identical(_pytree.rebuild(state, forms, arrays.read(tmp_path / "state", forms)), state)


def test_a_folder_that_another_rank_deletes_first_is_no_error(tmp_path, monkeypatch):
    """Both ranks delete one checkpoint, so it's gone between rank 0's check and its listing."""
    name, look = checkpoint_name(3, "0" * 16), os.scandir
    (tmp_path / name).mkdir()

    def deleted_meanwhile(path):
        os.rmdir(path)
        return look(path)

    monkeypatch.setattr(os, "scandir", deleted_meanwhile)
    Folders(tmp_path, rank=0, ranks=2).delete([name])
    assert not (tmp_path / name).exists()
