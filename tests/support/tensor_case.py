"""The meshes, model and train step of all tests of tensor parallelism, with and without MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcross import tensor
from jaxcross.tensor import Mesh
from jaxcross.testing import over_ranks

GRIDS = {
    f"[{q},{q},{d}]": Mesh(side=q, depth=d) for q, d in ((1, 1), (2, 1), (2, 2), (1, 4), (3, 2))
}  # fmt: skip
LINES = {f"1-D on {p}": Mesh(tensor=p) for p in (1, 2, 4)}
BESIDE = {"data 2 x 1-D on 2": Mesh(data=2, tensor=2), "data 3 x [2,2,1]": Mesh(data=3, side=2)}
MESHES = {**GRIDS, **LINES, **BESIDE}
# The meshes of the usual run.
QUICK = {"[2,2,2]", "1-D on 4", "data 2 x 1-D on 2"}

# Divisible by every mesh of the table.
FEATURES, HEADS, VOCABULARY, LENGTH, BATCH = 24, 12, 24, 5, 12


def over(meshes: dict[str, Mesh]) -> Any:
    """Runs a test on each of these meshes; all but the quick ones are `exhaustive`."""
    import pytest  # ranks that train the table over MPI don't need pytest

    params = [
        pytest.param(m, id=n, marks=[] if n in QUICK else pytest.mark.exhaustive)
        for n, m in meshes.items()
    ]
    return pytest.mark.parametrize("mesh", params)


def transformer(mesh: Mesh, **options: Any) -> tensor.Transformer:
    """The table's model on a mesh."""
    options = {"layers": 2, "heads": HEADS, "tied": True, **options}
    return tensor.Transformer(
        vocabulary=VOCABULARY, features=FEATURES, positions=LENGTH, mesh=mesh, **options
    )


def batch(step: int) -> dict[str, np.ndarray]:
    """A global batch. Every row has different tokens, so no two ranks have the same data."""
    tokens = (
        np.random.default_rng(step).integers(0, VOCABULARY, (BATCH, LENGTH + 1)).astype(np.int32)
    )
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def optimizer(specs: Any, mesh: Mesh) -> optax.GradientTransformation:
    """Clipping that takes effect, and an Adam whose epsilon is larger than rounding errors.

    The gradient of a key's bias is zero except for rounding. With Adam's usual epsilon, rounding
    errors would become full-size steps.
    """
    return optax.chain(tensor.clip_by_global_norm(0.5, specs, mesh), optax.adamw(1e-2, eps=1e-3))


@cache
def serial_params(**options: Any) -> Any:
    """The serial model's initial parameters, from which every mesh's shards are cut."""
    model = transformer(Mesh(), **options)
    params = tensor.init(model, jax.random.key(3), jax.ShapeDtypeStruct((1, LENGTH), jnp.int32))
    return jax.tree.map(np.asarray, params)


class Training:
    """The table's model, optimizer and step on a mesh."""

    def __init__(
        self,
        mesh: Mesh,
        make: Callable[..., optax.GradientTransformation] = optimizer,
        **options: Any,
    ):
        self.mesh, self.model, self.options = mesh, transformer(mesh, **options), options
        self.example = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
        self.specs = tensor.partition(self.model, self.example)
        self.tx = make(self.specs, mesh)

    def params(self, rank: int = 0) -> Any:
        parts = tensor.shard(serial_params(**self.options), self.specs, self.mesh, rank)
        return jax.tree.map(jnp.asarray, parts)

    def state(self, rank: int = 0) -> Any:
        params = self.params(rank)
        return params, self.tx.init(params)

    def states(self) -> list[Any]:
        return [self.state(rank) for rank in range(self.mesh.ranks)]

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = self.model.apply({"params": params}, batch["tokens"])
            return tensor.cross_entropy(logits, batch["labels"], self.mesh)

        return jax.value_and_grad(loss_fn)(params)

    def step(self, state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = self.loss_and_gradients(params, batch)
        norm = tensor.global_norm(grads, self.specs, self.mesh)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "norm": norm}

    def run(self, steps: int) -> tuple[list[Any], list[Any]]:
        """Runs `steps` under `vmap`. Returns all ranks' states, and their metrics per step."""
        states, reported, call = self.states(), [], over_ranks(self.step, self.mesh.axes)
        for n in range(steps):
            results = call([(s, self.mesh.local_batch(batch(n), r)) for r, s in enumerate(states)])
            states, metrics = map(list, zip(*results, strict=True))
            reported.append(metrics)
        return states, reported


def on_ranks(
    function: Callable[..., Any], mesh: Mesh, args: Callable[[int], Sequence[Any]]
) -> list[Any]:
    """`function(*args(rank))` on every rank of the mesh, under nested `vmap`s."""
    return over_ranks(function, mesh.axes)([tuple(args(rank)) for rank in range(mesh.ranks)])


def close(got: Any, want: Any, rtol: float, what: str = "") -> None:
    """Compares leaves up to `rtol` of each leaf's largest element.

    The scale is per leaf because Adam's moments are small.
    """
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = float(np.max(np.abs(np.asarray(b, np.float64)), initial=0))
        where = f"{what}{jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale, err_msg=where)
