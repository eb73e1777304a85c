"""What a checkpoint is on disk: leaves of every kind, parts, folders."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxcross.checkpoint import arrays, leaves


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
        "numpy": (np.arange(4, dtype=np.float64)[::2], np.asfortranarray(np.ones((2, 3), np.int8)), np.zeros((), bool)),
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


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_a_state_comes_back_as_it_was(make, tmp_path):
    state = make()
    taken = leaves.snapshot(state)
    forms = {path: leaf.form for path, leaf in taken.items()}
    arrays.write(tmp_path / "state", {path: leaf.array for path, leaf in taken.items()})
    read = arrays.read(tmp_path / "state", forms)
    assert {path: leaves.digest(forms[path], array) for path, array in read.items()} == {
        path: leaf.digest for path, leaf in taken.items()
    }
    assert leaves.unlike(leaves.forms_of(state), forms) is None
    identical(leaves.rebuild(jax.tree.map(lambda x: x, state), forms, read), state)


TYPES = [
    "bool", "int64", "uint64", "float16", "float32", "float64", "complex64", "complex128",
    "int8", "int16", "int32", "uint8", "uint16", "uint32",
    *(name for name in dir(ml_dtypes) if name.startswith(("bfloat", "float", "int", "uint"))),
]  # fmt: skip


def test_every_element_type_comes_back(tmp_path):
    dtypes = {name: np.dtype(name) for name in TYPES}
    state = {name: np.array([0, 1, 1, 0]).astype(dtype) for name, dtype in dtypes.items()}
    taken = leaves.snapshot(state)
    arrays.write(tmp_path / "state", {path: leaf.array for path, leaf in taken.items()})
    forms = {path: leaf.form for path, leaf in taken.items()}
    identical(leaves.rebuild(state, forms, arrays.read(tmp_path / "state", forms)), state)
