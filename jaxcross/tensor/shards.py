"""Converts between the serial model's tree of parameters and each rank's.

`shard` cuts a serial model's parameters into the ranks' parts, and `unshard` puts these parts back
together. Both are pure functions that can be called from a single process, without the other ranks
of the mesh. So you can store every checkpoint in the form of the serial model, and load it on any
mesh.
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

from jaxcross._jax_compat import checks_varying, one_result
from jaxcross._pytree import PyTree
from jaxcross.tensor.mesh import Mesh, named

Tokens = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def partition(model: nn.Module, tokens: Tokens) -> PyTree:
    """Returns a `PartitionSpec` for each parameter of `model`. Computes and sends nothing.

    Args:
        model: A model with a field `mesh`, which it passes to its layers.
        tokens: Example input, or its `jax.ShapeDtypeStruct`. Only its shape and type are used.

    Raises:
        ValueError: A parameter can't be cut into equal parts.
    """
    abstract = jax.eval_shape(_whole(model).init, jax.random.key(0), tokens)
    return nn.get_partition_spec(abstract["params"])


def init(model: nn.Module, key: jax.Array, tokens: Tokens, rank: int = 0) -> PyTree:
    """Returns the parameters that `rank` holds. Sends nothing.

    The result is bit for bit the same as initialising the serial model with the same key and
    passing its parameters to `shard`. If the model's mesh is `Mesh()`, you get the serial model's
    parameters.

    A rank might not have enough memory for the serial model, so we draw the parameters one at a
    time and cut them right away. There are never more than a few copies of a single uncut parameter
    in memory.

    Args:
        model: A model with a field `mesh`.
        key: Must be the same on every rank.
        tokens: Example input, or its `jax.ShapeDtypeStruct`. Only its shape and type are used.
        rank: A rank of the mesh.

    Raises:
        ValueError: A parameter can't be cut into equal parts, or there's no such rank.
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
    """Returns the part of a serial tree that `rank` holds. Sends nothing.

    Works on the host as well as inside `jit`.

    Args:
        tree: Global arrays: either parameters, or an optimizer state with its `state_specs`.
        specs: Each leaf's spec.
        mesh: The ranks.
        rank: The rank whose part to return.

    Raises:
        ValueError: A leaf can't be cut into equal parts, or there's no such rank.
    """
    return jax.tree.map(lambda leaf, spec: mesh.part(leaf, tuple(spec), rank), tree, specs)


def unshard(trees: Sequence[PyTree], specs: PyTree, mesh: Mesh) -> PyTree:
    """Returns the serial tree as NumPy arrays, given all ranks' trees in order. Sends nothing.

    Raises:
        ValueError: The number of trees isn't the number of ranks, or ranks that should hold equal
            parts don't.
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
    """Gathers the serial tree on every rank, inside a step.

    Performs an all-gather for each dimension that's cut. Afterwards, every rank holds the whole
    model, most of which had to come from other ranks. That's fine for saving or sampling, but too
    much traffic to do on every step.
    """
    to = "invarying" if checks_varying() else "varying"

    def one(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, entry in enumerate(spec):
            # Start with the last axis: ranks that are adjacent along it hold adjacent parts.
            for axis in reversed(named((entry,))):
                if mesh.size((axis,)) > 1:
                    leaf = jax.lax.all_gather(leaf, axis, axis=dim, tiled=True, to=to)
        return leaf

    return jax.tree.map(one, tree, specs)


def state_specs(tx: optax.GradientTransformation, params: optax.Params, specs: PyTree) -> PyTree:
    """Returns the specs of an optimizer's state. Computes nothing.

    A spec says which axes an array is cut over. Arrays in the state that belong to a parameter,
    such as Adam's moments, get the parameter's spec. Everything else, such as a counter, is held in
    full by every rank and gets an empty spec. Parameters that `optax.masked` leaves out of the
    state don't get a spec.
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
    """Returns how far each rank's copy of each leaf is from the first rank's copy.

    Wherever several ranks are supposed to hold the same leaf, or the same part of a leaf, this
    compares what they actually hold. The distance is the largest absolute difference between two
    copies: 0 if they're equal, and infinite if either of them isn't finite. The result is a tree of
    vectors `[ranks]`, which is the same on every rank. Pass it to `check_replicas` before the first
    step.

    Call this inside a step. It performs two all-reduces per leaf: the first broadcasts the first
    rank's copy to the ranks that should have the same copy, and the second collects each rank's
    distance from it.

    Args:
        tree: What this rank holds, i.e. parameters or a batch. For a batch, all specs are
            `PartitionSpec(mesh.batch or None)`.
        specs: Each leaf's spec.
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
        # Different large integers may be rounded to the same float32, which would give them a
        # distance of 0. To prevent that, elements that differ are at least the smallest positive
        # number apart.
        apart = jnp.max(
            jnp.where(wide != first, jnp.maximum(apart, jnp.finfo(jnp.float32).tiny), 0), initial=0
        )
        # On a CPU, XLA's maximum may ignore NaN, so we check for it separately.
        apart = jnp.where(jnp.all(jnp.isfinite(wide) & jnp.isfinite(first)), apart, jnp.inf)
        here = jnp.arange(mesh.ranks) == jax.lax.axis_index(every)
        return jax.lax.psum(jnp.where(here, apart, 0), every)

    return jax.tree.map(one, tree, specs)


def check_replicas(spread: PyTree, *, batch: bool = False) -> None:
    """Raises an error if ranks hold different copies, according to `replica_spread`. Sends nothing.

    Args:
        spread: The result of `replica_spread` for parameters or for a batch.
        batch: Whether that's the result for a batch.

    Raises:
        ValueError: A leaf's copies differ. The error says which leaf, on which ranks, and by how
            much.
    """
    for path, apart in jax.tree.leaves_with_path(spread):
        apart = np.asarray(apart)
        ranks = np.flatnonzero(apart)
        if not ranks.size:
            continue
        several = len(ranks) > 1
        how = (
            f"rank{'s' * several} {', '.join(map(str, ranks))} differ{'s' * (not several)} by up "
            f"to {float(apart.max()):g} from the first rank that holds the same part"
        )
        raise ValueError((_different_rows if batch else _unequal)(jax.tree_util.keystr(path), how))


def _unequal(path: str, how: str) -> str:
    return (
        f"The copies of `{path}` on different ranks are not equal: {how}. The ranks would drift "
        "apart. Initialise every rank from the same key, or from the same checkpoint."
    )


def _different_rows(path: str, how: str) -> str:
    return (
        f"The copies of the batch's `{path}` on different ranks are not equal: {how}. Since ranks "
        "along `tensor` and `col` compute the same rows together, their losses would be equal but "
        "wrong. Draw the same global batch on every rank, and pass "
        "`mesh.local_batch(global rows, rank)`."
    )


def _mesh_of(model: nn.Module) -> Mesh:
    mesh = getattr(model, "mesh", None)
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`{type(model).__name__}` must have a field `mesh` of type `jaxcross.tensor.Mesh`, "
            f"got {mesh!r:.60}."
        )
    return mesh


def _whole(model: nn.Module) -> nn.Module:
    return model.clone(mesh=_mesh_of(model).as_whole())
