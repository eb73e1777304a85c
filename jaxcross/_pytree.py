"""Converts a job's state to named arrays on the host, and back; tells static leaves from arrays.

Checkpoints and comparisons of replicas both need each leaf of a state as plain bytes with a name.
The difficulty is that a state contains more than JAX arrays (random keys, NumPy arrays and scalars,
Python numbers), and that after a restart, each leaf must have the same kind and type as before, and
be on the same device. So we store a description of each leaf (`Form`) alongside its array. Nothing
in this module communicates or accesses files.

A tree may also have static leaves, i.e. leaves that JAX can't trace. In an Equinox module, for
example, activation functions are leaves next to the weights. Before a step is traced, `hold_static`
wraps each of them in `Static`, a node without leaves. They're then part of the tree's structure, so
wherever we compare structures, we compare them too. Checkpoints and comparisons of replicas leave
static leaves out, and `rebuild` takes them from its target.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcross._jax_compat import ArrayImpl, is_array_type, weakly_typed

PyTree: TypeAlias = Any  # nested containers of arrays, for which JAX has no type
# This is `jax.tree_util.PyTreeDef`, which comes from a compiled module without types.
TreeDef: TypeAlias = Any

# Python's types of numbers, and the types in which they're stored on disk.
_NUMBERS: dict[str, tuple[type, type]] = {
    "bool": (bool, np.bool_),
    "int": (int, np.int64),
    "float": (float, np.float64),
    "complex": (complex, np.complex128),
}
_NUMBER = bool | int | float | complex
_ARRAY_TYPES = frozenset({ArrayImpl, np.ndarray})
KINDS = frozenset({"jax", "key", "numpy", "generic", *_NUMBERS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The kind, type and shape of a leaf, but not its values.

    Attributes:
        kind: The kind of the leaf: `jax` for a JAX array, `key` for a random key, `numpy` for a
            NumPy array, `generic` for a NumPy scalar, or the name of a Python type, such as `int`.
        dtype: The element type of the array on disk. For a random key, it's the type of its raw
            data.
        shape: The shape of the array on disk.
        weak: Whether JAX treats the array as weakly typed, like a Python number. This affects the
            types of results.
        impl: The random number generator of a key; "" for other leaves.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    weak: bool = False
    impl: str = ""

    def __str__(self) -> str:
        what = f"key<{self.impl}>" if self.impl else self.dtype
        return f"{what}{list(self.shape)}"

    def fits(self, other: Form) -> bool:
        """Whether JAX sees the same shape and type in both, so a step would accept either."""
        mine, theirs = (jax.dtypes.canonicalize_dtype(np.dtype(f.dtype)) for f in (self, other))
        return (self.shape, self.impl, mine) == (other.shape, other.impl, theirs)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf on the host. `digest` covers its form and its bytes."""

    form: Form
    array: np.ndarray
    digest: str


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """A static leaf as part of a tree's structure: a pytree node that has no leaves itself."""

    value: object

    def _key(self) -> tuple[type, object]:
        # 1, True and 1.0 are equal but compile differently, as do 0.0 and -0.0. NaN isn't even
        # equal to itself, so the step would be traced again on every call.
        value = self.value
        return type(value), repr(value) if isinstance(value, float | complex) else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and (
            self.value is other.value or self._key() == other._key()
        )

    def __hash__(self) -> int:
        return hash(self._key())


def static_places(leaves: Sequence[object], tree: PyTree) -> tuple[int, ...]:
    """Returns the positions of the static leaves among the leaves of `tree`.

    A leaf is static if JAX can't trace it, e.g. a function or a string. A Python number is traced,
    as in `jax.jit`, unless it's in an Equinox module. There, it's a setting such as the probability
    or the `inference` flag of a dropout layer, which Python code in the module branches on, so it's
    static, as in `eqx.filter_jit`.
    """
    # This runs on every call with a NumPy array, so check for the most frequent type first.
    others = [(n, leaf) for n, leaf in enumerate(leaves) if type(leaf) is not ArrayImpl]
    places = [n for n, leaf in others if not _is_traced(leaf)]
    numbers = [n for n, leaf in others if isinstance(leaf, _NUMBER) and not _is_numpy(leaf)]
    if numbers:
        inside = _in_equinox_modules(tree)
        places = sorted({*places, *inside.intersection(numbers)})
    return tuple(places)


def hold_static(tree: PyTree) -> PyTree:
    """Returns `tree` with each static leaf wrapped in `Static`."""
    leaves, structure = jax.tree.flatten(tree)
    places = static_places(leaves, tree)
    if not places:
        return tree
    for n in places:
        leaves[n] = Static(leaves[n])
    return jax.tree.unflatten(structure, leaves)


def release_static(tree: PyTree) -> PyTree:
    """Undoes `hold_static`."""
    return jax.tree.map(lambda x: x.value if _is_static(x) else x, tree, is_leaf=_is_static)


@dataclass(frozen=True, slots=True)
class StaticSplit:
    """Which leaves of a tree are static.

    Attributes:
        whole: The structure of the tree, in which static leaves are leaves.
        structure: The structure after `hold_static`, in which they aren't.
        static: The static leaves, each with its position, in ascending order.
    """

    whole: TreeDef
    structure: TreeDef
    static: tuple[tuple[int, object], ...] = ()

    def matches(self, leaves: Sequence[object], whole: TreeDef) -> bool:
        """Whether another tree has this structure and, at the same positions, the same objects."""
        return self.whole == whole and all(leaves[n] is x for n, x in self.static)

    def arrays_of(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves that aren't static, out of all leaves."""
        if not self.static:
            return leaves
        rest = leaves.copy()
        for n, _ in reversed(self.static):
            del rest[n]
        return rest


def not_arrays(leaves: Sequence[object]) -> list[object]:
    """Returns the leaves that aren't arrays of JAX or NumPy."""
    # Checking a leaf's exact type is much faster than `isinstance(leaf, jax.Array)`.
    return [x for x in leaves if type(x) not in _ARRAY_TYPES and not isinstance(x, jax.Array)]


def why_not_static(leaf: Any) -> str | None:
    """Returns why a leaf that isn't an array can't be static either. None if it can."""
    kind = type(leaf)
    try:
        hash(leaf)
        bool(leaf == leaf)
    except Exception as error:
        return f"it cannot be hashed and compared ({error})"
    if kind.__eq__ is not object.__eq__ or kind.__hash__ is not object.__hash__:
        owner = leaf.__self__ if isinstance(leaf, MethodType) else None
    elif callable(leaf):
        owner = leaf
    else:
        return "it has no `__eq__`, so a step could not tell that its attributes have changed"
    attributes = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, partial):
        attributes |= {"args": owner.args, "keywords": owner.keywords}
    for name, value in attributes.items():
        try:
            leaves = jax.tree.leaves(value)
        except Exception as error:
            return f"its attribute `{name}` cannot be flattened ({error})"
        if any(isinstance(x, jax.Array | np.ndarray) for x in leaves):
            return f"its attribute `{name}` holds arrays, which JAX cannot see"
    return None


def is_static_leaf(leaf: object) -> bool:
    """Whether a leaf of a state is static, i.e. neither an array nor a number.

    Numbers in Equinox modules don't count as static here, because checkpoints can store them.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or _is_numpy(leaf):
        return False
    is_number = any(type(leaf) is kind for kind, _ in _NUMBERS.values())
    return not is_number and why_not_static(leaf) is None


def described_static(leaf: Any) -> str:
    """Describes a static leaf by a text that is the same in every process."""
    name = getattr(leaf, "__qualname__", None)
    if isinstance(name, str):
        return f"`{getattr(leaf, '__module__', '')}.{name}`"
    if isinstance(leaf, frozenset):  # its order depends on the process's hash seed
        return f"frozenset of {', '.join(sorted(map(described_static, leaf)))}"
    text = repr(leaf)
    # The default `repr` contains an address in memory.
    return f"a `{type(leaf).__name__}`" if " at 0x" in text else text


def _is_traced(leaf: object) -> bool:
    """Whether JAX can trace a leaf. Includes NumPy's types that JAX lacks, which raise an error."""
    return isinstance(leaf, jax.ShapeDtypeStruct) or _is_numpy(leaf) or is_array_type(leaf)


def _is_numpy(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


def _is_static(node: object) -> bool:
    return isinstance(node, Static)


def _in_equinox_modules(tree: PyTree) -> set[int]:
    """Returns the positions of the leaves that are somewhere inside an Equinox module."""
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None:  # Equinox hasn't been imported, so there can't be any modules
        return set()
    found: set[int] = set()
    start = 0
    for part in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module)):
        count = jax.tree.structure(part).num_leaves
        if isinstance(part, module):
            found.update(range(start, start + count))
        start += count
    return found


def forms_of(state: Any) -> dict[str, Form]:
    """Returns the form of each leaf that isn't static, by path. Doesn't wait for the values.

    Raises:
        TypeError: A leaf is neither an array nor a number, and can't be static.
    """
    return {path: _form(path, leaf) for path, leaf in _paths(state)}


def snapshot(state: Any) -> dict[str, Leaf]:
    """Copies all leaves but the static ones to the host, and returns them by path.

    Waits until they're computed.

    Raises:
        TypeError: A leaf is neither an array nor a number, and can't be static.
    """
    pairs = [(path, leaf, _form(path, leaf)) for path, leaf in _paths(state)]
    for _, leaf, form in pairs:
        if form.kind == "jax":
            leaf.copy_to_host_async()
    taken = {}
    for path, leaf, form in pairs:
        values = jax.random.key_data(leaf) if form.kind == "key" else leaf
        # Make an explicit copy. On CPUs, NumPy would otherwise share the JAX array's memory, which
        # the next step may overwrite if the array is donated to it.
        array = np.array(values, dtype=np.dtype(form.dtype), order="C", copy=True)
        taken[path] = Leaf(form, array, digest(form, array))
    return taken


def digests(state: Any, paths: Collection[str]) -> dict[str, str]:
    """Returns the digests of the leaves at these paths. Waits until they're computed.

    On CPUs, the leaves are read in place, without a copy.

    Raises:
        TypeError: A leaf is neither an array nor a number, and can't be static.
    """
    return {
        path: digest(_form(path, leaf), on_host(leaf))
        for path, leaf in _paths(state)
        if path in paths
    }


def on_host(leaf: Any) -> np.ndarray:
    """Waits for a leaf, and returns it as a contiguous NumPy array. For a key, that's its raw
    data.
    """
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf, order="C")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a random key."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def digest(form: Form, array: np.ndarray) -> str:
    """Returns a digest of a leaf's form and bytes."""
    # We use SHA-256 because many processors have dedicated instructions for it: we measured 1.5
    # GB/s, compared with 0.6 GB/s for blake2b.
    content = hashlib.sha256(repr(form).encode())
    content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()


def unlike(wanted: Mapping[str, Form], found: Mapping[str, Form]) -> str | None:
    """Returns a text about the first difference that keeps `found` from replacing `wanted`.

    Returns None if there's no such difference.
    """
    for path, form in wanted.items():
        if path not in found:
            return f"it has no leaf `{path or 'state'}`"
        if not form.fits(found[path]):
            return f"its leaf `{path or 'state'}` is {found[path]}, not {form}"
    more = next((path for path in found if path not in wanted), None)
    return (
        None if more is None else f"it has a leaf `{more or 'state'}`, for which there is no place"
    )


def narrowed(found: Mapping[str, Form]) -> str | None:
    """Returns a text about the first array that JAX would convert to 32 bits here, or None.

    JAX converts 64-bit types to 32 bits unless `jax_enable_x64` is set.
    """
    for path, form in found.items():
        if form.kind == "jax" and jax.dtypes.canonicalize_dtype(np.dtype(form.dtype)) != np.dtype(
            form.dtype
        ):
            return (
                f"its leaf `{path or 'state'}` is {form}, which JAX has only with `jax_enable_x64`"
            )
    return None


def rebuild(target: Any, forms: Mapping[str, Form], arrays: Mapping[str, np.ndarray]) -> Any:
    """Builds a state with the structure and static leaves of `target`.

    Its arrays are on the same devices.
    """
    _paths(target)  # checks that they're unique

    def leaf(path: Any, like: Any) -> Any:
        name = jax.tree_util.keystr(path)
        return like if is_static_leaf(like) else _leaf(forms[name], arrays[name], like)

    return jax.tree_util.tree_map_with_path(leaf, target)


def leaves_with_paths(state: PyTree) -> list[tuple[str, Any]]:
    """Returns the path and the value of each leaf, including static leaves."""
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]


def _paths(state: Any) -> list[tuple[str, Any]]:
    pairs = [(path, leaf) for path, leaf in leaves_with_paths(state) if not is_static_leaf(leaf)]
    names = [path for path, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(path for n, path in enumerate(names) if path in names[:n])
        raise TypeError(
            f"two leaves of the state have the same path `{twice}`, so a checkpoint could not tell "
            "them apart: rename one of them"
        )
    return pairs


def _form(path: str, leaf: Any) -> Form:
    if isinstance(leaf, jax.Array):
        if is_key(leaf):
            data = jax.eval_shape(jax.random.key_data, leaf)
            return Form(
                kind="key",
                dtype=data.dtype.name,
                shape=data.shape,
                impl=str(jax.random.key_impl(leaf)),
            )
        return Form(kind="jax", dtype=leaf.dtype.name, shape=leaf.shape, weak=bool(leaf.weak_type))
    if isinstance(leaf, np.ndarray | np.generic) and numeric(leaf.dtype):
        kind = "numpy" if isinstance(leaf, np.ndarray) else "generic"
        return Form(kind=kind, dtype=leaf.dtype.name, shape=leaf.shape)
    name = type(leaf).__name__
    if name in _NUMBERS and type(leaf) is _NUMBERS[name][0]:
        return Form(kind=name, dtype=np.dtype(_NUMBERS[name][1]).name, shape=())
    raise TypeError(
        f"`{path or 'state'}` of the state is of type `{name}`, but a checkpoint can only hold "
        "arrays, numbers, and static leaves such as functions. Leave it out of the state."
    )


def shape_and_type(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and type that JAX would use for a leaf.

    Raises:
        TypeError: The leaf can't be an array, e.g. because it's a string.
    """
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype


def numeric(dtype: np.dtype) -> bool:
    """Whether arrays of this type contain numbers or booleans. Includes JAX's additional types."""
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def _leaf(form: Form, array: np.ndarray, like: Any) -> Any:
    if form.kind in _NUMBERS:
        return _NUMBERS[form.kind][0](array[()])
    if form.kind in ("numpy", "generic"):
        return np.array(array) if form.kind == "numpy" else array[()]
    # A JAX array may or may not be committed to a device. If it isn't, JAX is free to move it, e.g.
    # to the device of the other operand of an addition. Restore that property, too, by committing
    # the new array only if the target's array is committed.
    place = like.sharding if isinstance(like, jax.Array) and like.committed else None
    if form.kind == "key":
        # Take the generator from the target, because we couldn't look up a user-defined generator
        # by name.
        key = jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(like))
        return key if place is None else jax.device_put(key, place)
    value = jax.device_put(np.array(array), place)
    return weakly_typed(value) if form.weak else value


def buffer_of(array: jax.Array) -> Hashable:
    """Returns a key that is equal for arrays that share the same memory.

    Different JAX array objects may refer to the same buffer.
    """
    try:
        if array.is_fully_addressable and len(array.sharding.device_set) > 1:
            return tuple(shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards)
        return array.unsafe_buffer_pointer()
    except (AttributeError, RuntimeError, ValueError):
        # The backend can't return a pointer, or the array has been donated and has no buffer.
        return id(array)


def arrays_by_buffer(tree: PyTree) -> dict[Hashable, jax.Array]:
    """Returns a tree's JAX arrays by buffer. Leaves out donated arrays."""
    arrays = (
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not leaf.is_deleted()
    )
    return {buffer_of(array): array for array in arrays}
