"""Binds a call's static arguments, and compares the types of the others.

Also produces the messages that say which argument is unusable or has changed its type, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import jax

from jaxcross._arguments import Selection, in_words
from jaxcross._jax_compat import ArrayImpl, ShapedArray, Tracer, aval_of
from jaxcross._pytree import PyTree, Static, TreeDef, hold_static

R = TypeVar("R")
ArgType = ShapedArray | tuple[ShapedArray, jax.sharding.Sharding | None]
"""The properties of an array that trigger a recompilation when they change.

The sharding only matters if there's more than one device the array could be on.
"""
StaticValue = tuple[int | str, type, object]
"""A static argument's number or name, type and value.

We need the type because 1, True and 1.0 are equal in Python but compile differently.
"""


def bind_static(
    step: Callable[..., R],
    name: str,
    static: Selection,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Callable[..., R], tuple[Any, ...], Mapping[str, Any]]:
    """Returns the step with its static arguments bound, and the other (positional, named)
    arguments.

    Args:
        step: The step.
        name: Name of the step.
        static: Says which arguments are static.
        args: All positional arguments.
        kwargs: All keyword arguments.
    """
    if not static:
        return step, tuple(args), kwargs
    places = static.places(len(args), kwargs)
    fixed = {place: args[place] for place in places if isinstance(place, int)}
    named = {place: kwargs[place] for place in places if isinstance(place, str)}

    def bound(*rest: Any, **others: Any) -> R:
        left = iter(rest)
        return step(
            *(fixed[n] if n in fixed else next(left) for n in range(len(fixed) + len(rest))),
            **named,
            **others,
        )

    bound.__name__ = name
    bound.static = tuple(  # type: ignore[attr-defined]
        (place, type(x), x) for place, x in (*fixed.items(), *named.items())
    )
    return (
        bound,
        tuple(a for n, a in enumerate(args) if n not in fixed),
        {key: x for key, x in kwargs.items() if key not in named},
    )


def check_hashable(name: str, static: Sequence[StaticValue]) -> None:
    """Checks that static arguments are hashable, because they're part of a cache key.

    Raises:
        ValueError: A value can't be hashed.
    """
    for place, kind, value in static:
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"static argument {in_words(place)} of `{name}` cannot be hashed: it is or holds a "
                f"`{kind.__name__}` ({error}). Compiled steps are looked up by the values of their "
                "static arguments, so pass something hashable (a tuple, a frozen dataclass), or "
                "pass arrays as an argument that is not static."
            ) from None


def arg_types_of(leaves: Sequence[Any]) -> list[ArgType]:
    """Returns the type of each leaf.

    Raises:
        TypeError: A leaf isn't an array.
    """
    many = _many_places()
    try:
        return (
            [(x.aval, x.sharding if x.committed else None) for x in leaves]
            if many
            else [x.aval for x in leaves]
        )
    except AttributeError:  # some leaf is a NumPy array or a Python number
        avals = [getattr(x, "aval", None) or aval_of(x) for x in leaves]
        return (
            [(a, getattr(x, "sharding", None)) for a, x in zip(avals, leaves, strict=True)]
            if many
            else avals
        )


def are_ready(leaves: Sequence[Any], arg_types: list[ArgType]) -> bool:
    """Whether all leaves are plain `jax.Array` objects of these types that haven't been donated.

    Takes tens of nanoseconds per leaf.
    """
    try:
        return not any(map(ArrayImpl.is_deleted, leaves)) and arg_types_of(leaves) == arg_types
    except TypeError:  # NumPy arrays, random keys, or something that isn't an array at all
        return False


def check_leaves(name: str, leaves: Sequence[object], args: PyTree, kwargs: PyTree) -> None:
    """Checks that the leaves have values.

    Raises:
        TypeError: A leaf is just a type, or is traced.
        ValueError: A leaf has been donated.
    """
    # This has to be fast: a step with a NumPy array or a random key among its arguments gets here
    # every time. Checking a leaf's exact type takes a tenth of the time of `isinstance(leaf,
    # jax.Array)`, so do that first.
    for n, leaf in enumerate(leaves):
        if type(leaf) is not ArrayImpl:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"`{name}` is called with a `jax.ShapeDtypeStruct`, which has no values. Pass "
                    f"arrays, or call `{name}.trace(...)`, which takes types."
                )
            if isinstance(leaf, Tracer):
                raise TypeError(
                    f"`{name}` is called with traced values: a crossover step runs its exchanges "
                    "from the host and cannot be called inside jit, grad or vmap. Put the "
                    "transformation inside the step."
                )
            if not isinstance(leaf, jax.Array):  # otherwise it's a random key
                continue
        if leaf.is_deleted():
            path = jax.tree_util.keystr(_paths(args, kwargs)[n][1:])
            raise ValueError(
                f"argument {path} of `{name}` was donated to an earlier step and is gone. Use the"
                " state that the step returned, or do not donate it."
            )


def describe_change(
    old: Sequence[ArgType], new: Sequence[ArgType], args: PyTree, kwargs: PyTree
) -> str | None:
    """Describes the first argument whose type has changed, giving both types.

    Returns None if nothing has changed.
    """
    for path, before, after in zip(_paths(args, kwargs), old, new, strict=False):
        if before != after:
            return (
                f"argument {jax.tree_util.keystr(path)} was {_short(before)}, is {_short(after)}"
                f"{_cure(before, after)}"
            )
    return None


def _paths(args: PyTree, kwargs: PyTree) -> list[jax.tree_util.KeyPath]:
    """Returns the paths of the leaves of `(args, kwargs)` that aren't static."""
    return [path for path, _ in jax.tree.leaves_with_path(hold_static((args, kwargs)))]


def describe_structures(old: TreeDef, new: TreeDef) -> str:
    """Describes the first difference between two structures of `(args, kwargs)`.

    For common causes, such as a new `optax` object, it also says how to avoid them.
    """
    path, before, after = _first_difference(old, new)
    if len(path) < 2:
        return "it got other arguments"
    which = (
        f"args[{path[1]}]"
        if path[0] == 0
        else f"kwargs[{old.children()[1].node_data()[1][path[1]]!r}]"
    )
    if before is not None and after is not None and before[0] is after[0] is Static:
        old_leaf, new_leaf = before[1].value, after[1].value
        cure = ""
        if type(old_leaf).__eq__ is object.__eq__:
            cure = ". Functions are compared by identity, so pass the same one each time"
        elif isinstance(new_leaf, int | float | complex):
            cure = ". Make a number that varies an array"
        return f"a static leaf of `{which}` was {old_leaf!r:.60}, is {new_leaf!r:.60}{cure}"
    if (
        before is None
        or after is None
        or before[0] is not after[0]
        or before[0] in (tuple, list, dict)
    ):
        return f"the structure of `{which}` changed"
    if "GradientTransformation" in f"{before[1]}{after[1]}":
        return (
            f"`{which}` holds another `optax` object. Make one for all jobs: with "
            "`optax.inject_hyperparams`, a value that differs can be set in its state, as "
            '`opt_state.hyperparams["learning_rate"] = rate`'
        )
    return f"what is static in `{which}`, of type `{after[0].__name__}`, is another object or value"


def _first_difference(
    old: TreeDef, new: TreeDef, path: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], Any, Any]:
    """Returns the path to the first differing node, and the node's data in each structure.

    A node's data consists of its type and static data; it's None for a leaf.
    """
    before, after = old.node_data(), new.node_data()
    if before == after and old.num_nodes > 1 and len(old.children()) == len(new.children()):
        for n, (mine, theirs) in enumerate(zip(old.children(), new.children(), strict=True)):
            if mine != theirs:
                return _first_difference(mine, theirs, (*path, n))
    return path, before, after


@cache
def _many_places() -> bool:
    """Whether there's more than one device an array could be on."""
    return jax.local_device_count() > 1 or jax.default_backend() != "cpu"


def _cure(before: ArgType, after: ArgType) -> str:
    """Suggests how to avoid a recompilation caused by a state that starts as a Python number.

    Suppose a step is first called with a Python number, which has a weak type, and returns an array
    in its place, which doesn't. The second call gets this array, so its argument types are
    different and the step is compiled again. Returns "" for any other change.
    """
    old, new = (t[0] if isinstance(t, tuple) else t for t in (before, after))
    if old.shape != new.shape or not old.weak_type or new.weak_type:
        return ""
    return f". Begin with the type that the step returns, `jnp.asarray(value, jnp.{new.dtype})`"


def _short(arg_type: ArgType) -> str:
    aval, sharding = arg_type if isinstance(arg_type, tuple) else (arg_type, None)
    weak = " (a Python number's weak type)" if aval.weak_type else ""
    return f"{aval.str_short()}{weak}{'' if sharding is None else f' on {sharding}'}"
