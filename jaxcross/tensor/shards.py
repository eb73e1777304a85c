"""Between the serial model's tree of parameters and each rank's: partition, initialise, cut, join,
compare.

`shard` and `unshard` are pure and need no mesh of running ranks: a checkpoint is always the serial
model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxcross._jax_compat import one_result
from jaxcross._jax_compat.shard_map import checks_varying
from jaxcross._pytree import PyTree
from jaxcross.tensor.mesh import Mesh, named

Tokens = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def partition(model: nn.Module, tokens: Tokens) -> PyTree:
    """Returns a tree of a `PartitionSpec` for each parameter of `model`. Computes and sends
    nothing.

    Args:
        model: Has a field `mesh`, which its layers are given.
        tokens: Example input, or its `jax.ShapeDtypeStruct`; only its shape and type are read.

    Raises:
        ValueError: A parameter cannot be cut into equal parts.
    """
    abstract = jax.eval_shape(_whole(model).init, jax.random.key(0), tokens)
    return nn.get_partition_spec(abstract["params"])


def init(model: nn.Module, key: jax.Array, tokens: Tokens, rank: int = 0) -> PyTree:
    """Returns the parameters that `rank` holds: those of the serial model from the same key, cut.
    Sends nothing.

    Equal to `shard` of the serial model's parameters, which this gives too, bit for bit. One
    parameter is drawn after the other, and cut at once: of the serial model, memory never holds
    more than that one, a few times.

    Args:
        model: Has a field `mesh`.
        key: The same on every rank.
        tokens: Example input, or its `jax.ShapeDtypeStruct`; only its shape and type are read.
        rank: Of the mesh.

    Raises:
        ValueError: A parameter cannot be cut into equal parts, or there is no such rank.
    """
    mesh = _mesh_of(model)
    specs = partition(model, tokens)
    whole = _whole(model)

    def draw(key: jax.Array) -> PyTree:
        return nn.unbox(whole.init(key, jnp.zeros(tokens.shape, tokens.dtype)))["params"]

    traced, types = jax.make_jaxpr(draw, return_shape=True)(key)
    treedef = jax.tree.structure(types)
    parts = []
    for n, spec in enumerate(treedef.flatten_up_to(specs)):
        (leaf,) = jaxpr_as_fun(one_result(traced, n))(key)
        parts.append(jnp.array(mesh.part(leaf, tuple(spec), rank)))
    return treedef.unflatten(parts)


def shard(tree: PyTree, specs: PyTree, mesh: Mesh, rank: int) -> PyTree:
    """Returns the part of a serial tree that `rank` holds. Sends nothing; works on the host and in
    a `jit`.

    Args:
        tree: Global arrays: parameters, or an optimizer state with `state_specs`.
        specs: Of each leaf.
        mesh: The ranks.
        rank: Whose part.

    Raises:
        ValueError: A leaf cannot be cut into equal parts, or there is no such rank.
    """
    return jax.tree.map(lambda leaf, spec: mesh.part(leaf, tuple(spec), rank), tree, specs)


def unshard(trees: Sequence[PyTree], specs: PyTree, mesh: Mesh) -> PyTree:
    """Returns the serial tree, as NumPy arrays, of what every rank holds, in rank order. Sends
    nothing.

    Raises:
        ValueError: There are not as many trees as ranks, or ranks that should hold equal parts do
            not.
    """
    mesh.check_ranks(len(trees))

    def join(
        path: jax.tree_util.KeyPath, cut: PartitionSpec, *held: jax.typing.ArrayLike
    ) -> np.ndarray:
        spec = tuple(cut)
        parts = tuple(np.asarray(p) for p in held)
        sizes = mesh.axes
        cuts = [int(np.prod([sizes.get(a, 1) for a in named((axes,))])) for axes in spec]
        shape = [
            n * c
            for n, c in zip(
                parts[0].shape, [*cuts, *[1] * (parts[0].ndim - len(cuts))], strict=True
            )
        ]
        out = np.zeros(shape, parts[0].dtype)
        holder = {}
        for rank, part in enumerate(parts):
            where = tuple(mesh.coords(rank)[a] for a in named(spec))
            first = holder.setdefault(where, rank)
            if part.tobytes() != parts[first].tobytes():
                raise ValueError(
                    _unequal(jax.tree_util.keystr(path), f"ranks {first} and {rank} differ")
                )
            mesh.part(out, spec, rank)[...] = part
        return out

    return jax.tree_util.tree_map_with_path(
        join, specs, *trees, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def gather(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Gathers the serial tree on every rank, inside a step: one all-gather for each dimension that
    is cut.

    A rank receives what it does not hold: for saving and sampling, not for every step.
    """
    to = "invarying" if checks_varying() else "varying"

    def one(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, entry in enumerate(spec):
            for axis in reversed(named((entry,))):  # neighbours differ in the last one
                if mesh.size((axis,)) > 1:
                    leaf = jax.lax.all_gather(leaf, axis, axis=dim, tiled=True, to=to)
        return leaf

    return jax.tree.map(one, tree, specs)


def state_specs(tx: optax.GradientTransformation, params: optax.Params, specs: PyTree) -> PyTree:
    """Returns the specs of `tx`'s state: a parameter's for what is shaped like it, none for
    counters. Computes nothing.

    What `optax.masked` leaves out of the state has no spec either.
    """
    state = jax.eval_shape(tx.init, params)
    replicated = PartitionSpec()

    def masked(value: object) -> bool:
        return isinstance(value, optax.MaskedNode)

    return optax.tree.map_params(
        tx,
        lambda value, spec: value if masked(value) else spec,
        state,
        specs,
        transform_non_params=lambda _: replicated,
        is_leaf=masked,
    )


def replica_spread(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """For each leaf and rank, inside a step, how far a rank's copy is from the first rank's that
    should hold the same.

    0 if equal, inf if one of them is not finite. An all-reduce of each leaf, and one of a number a
    rank; a tree of vectors `[ranks]`, the same on every rank. Hand it to `check_replicas` before
    the first step.

    Args:
        tree: What this rank holds: parameters; or a batch, whose specs are all
            `PartitionSpec(mesh.batch or None)`.
        specs: Of each leaf.
        mesh: The ranks.
    """
    every = tuple(a for a, size in mesh.axes.items() if size > 1)

    def one(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        over = tuple(a for a in every if a not in named(tuple(spec)))
        if not over:
            return jnp.zeros(mesh.ranks)
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        wide = jnp.asarray(
            leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32 if floating else jnp.int32)
        )
        first = jax.lax.psum(
            jnp.where(jax.lax.axis_index(over) == 0, wide, jnp.zeros_like(wide)), over
        )
        apart = jnp.abs(
            wide - first if floating else wide.astype(jnp.float32) - first.astype(jnp.float32)
        )
        # Large integers may differ and round to the same number.
        apart = jnp.max(
            jnp.where(wide != first, jnp.maximum(apart, jnp.finfo(jnp.float32).tiny), 0), initial=0
        )
        # XLA's maximum on a CPU may lose a NaN.
        apart = jnp.where(jnp.all(jnp.isfinite(wide) & jnp.isfinite(first)), apart, jnp.inf)
        here = jnp.arange(mesh.ranks) == jax.lax.axis_index(every)
        return jax.lax.psum(jnp.where(here, apart, 0), every)

    return jax.tree.map(one, tree, specs)


def check_replicas(spread: PyTree, *, batch: bool = False) -> None:
    """Refuses leaves whose copies differ between ranks; call it with the result of
    `replica_spread`. Sends nothing.

    Args:
        spread: Of parameters, or of a batch.
        batch: Whether it is that of a batch.

    Raises:
        ValueError: A leaf's copies differ: says which, on which ranks, and by how much.
    """
    for path, apart in jax.tree.leaves_with_path(spread):
        apart = np.asarray(apart)
        ranks = np.flatnonzero(apart)
        if not ranks.size:
            continue
        several = len(ranks) > 1
        how = (
            f"{'those' if several else 'that'} of rank{'s' * several} {', '.join(map(str, ranks))} "
            f"{'are' if several else 'is'} up to {float(apart.max()):g} apart from that of the "
            "first rank which holds the same part"
        )
        raise ValueError((_different_rows if batch else _unequal)(jax.tree_util.keystr(path), how))


def _unequal(path: str, how: str) -> str:
    return (
        f"The parts of `{path}` that several ranks hold are not equal: {how}. Steps would drift "
        "apart. Initialise every rank from one key, or from one checkpoint."
    )


def _different_rows(path: str, how: str) -> str:
    return (
        f"The rows of the batch's `{path}` that several ranks compute together are not equal: "
        f"{how}. Losses would be equal and wrong: along `tensor` and `col` ranks share their rows. "
        "Draw the same global batch on every rank, and pass `mesh.local_batch(global rows, rank)`."
    )


def _mesh_of(model: nn.Module) -> Mesh:
    mesh = getattr(model, "mesh", None)
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`{type(model).__name__}` has no field `mesh` that is a `jaxcross.tensor.Mesh`."
        )
    return mesh


def _whole(model: nn.Module) -> nn.Module:
    return model.clone(mesh=_mesh_of(model).as_whole())
