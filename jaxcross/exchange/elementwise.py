"""Checks that an optimizer works element by element, by analysing its jaxpr.

A sharded optimizer only ever runs on a flat 1/P of each leaf. That's correct only if each element
of the update depends on nothing but scalars and the same element of the gradients, the state and
the parameters. To check this, we trace the update, follow every value through the jaxpr, and assign
it a level: the higher the level, the more the value may depend on.

Following values like this misses optimizers that look at shapes, e.g. to treat vectors and matrices
differently. On flat parts, such an optimizer runs different operations, and these may well be
elementwise. So we also trace the update on whole leaves, and require both traces to contain the
same operations.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import optax

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED, Atom, Equation, Jaxpr, Var
from jaxcross._pytree import PyTree

# Primitives that combine different elements: reductions, products, sorts, decompositions.
_ACROSS = re.compile(
    r"reduce(?!_precision)|arg(max|min)|cum|dot_general|ragged_dot|conv_general|sort|(approx_)?top_k|fft|select_and_"
    r"|svd|qr|eigh?|cholesky|lu|schur|triangular_solve|householder"
)
# Primitives that may move elements to other positions.
_MOVES = re.compile(
    r"slice|dynamic_(update_)?slice|split|concatenate|gather|scatter|rev|transpose|pad"
)
# Primitives that draw random numbers. These only depend on the key and the shape, so every rank
# would draw the same numbers for its part of a leaf, even though the parts are different.
_DRAWS = re.compile(r"random_bits|random_gamma|rng_")
_CALLS = INLINED | {"cond"}
# Primitives that compute nothing, and may differ between a leaf and its flat part.
_SHAPES = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze"}
# The levels, in ascending order. They state what an element of a value depends on:
_NOTHING = 0  # neither on updates nor on parameters
_POSITIONS = 1  # on its position, as in `iota`, which starts from 0 in each rank's part
_ELEMENT = 2  # on the same element of updates, state and parameters
_JOINED = 3  # ditto, within a vector of concatenated leaves (as in `optax.flatten`)
_CUT = 4  # ditto, within a slice of such a vector
_OTHERS = 5  # on other elements as well
_Level = tuple[int, str]
"""A value's level and, for the error message, the primitive that last raised it."""


def check_elementwise(
    optimizer: optax.GradientTransformation,
    whole: tuple[PyTree, PyTree],
    part: tuple[PyTree, PyTree],
    state: optax.OptState,
    what: str,
    *,
    axis: Hashable | None = None,
    instead: str = "put such an optimizer behind `jaxcross.exchange.mean`",
    **extra: Any,
) -> None:
    """Raises an error if an optimizer treats flat parts of leaves differently from whole leaves.

    Only traces the optimizer; nothing is computed.

    Args:
        optimizer: The optimizer that was passed to `what`.
        whole: Updates and parameters (or None) in their original shapes, as arrays or types.
        part: Updates and parameters as the optimizer will receive them, i.e. as flat parts.
        state: The optimizer's state for `part`.
        what: Name of whatever wraps the optimizer, for the error message.
        axis: Axis over which the leaves are split into parts.
        instead: What the error message suggests for optimizers that fail the check.
        extra: Extra arguments for `update`.

    Raises:
        ValueError: The optimizer does not work element by element, or exchanges over `axis`.
    """

    def traced(updates: optax.Updates, state: optax.OptState, params: optax.Params | None) -> Jaxpr:
        made = jax.make_jaxpr(lambda *args: optimizer.update(*args, **extra))(
            updates, state, params
        )
        return compat.open_jaxpr(made)[0]

    updates, params = _types(part)
    state = _types(state)
    whole = _types(whole)
    on_part = traced(updates, state, params)
    name = _exchange_over(on_part, axis)
    if name is not None:
        raise ValueError(
            f"the optimizer of {what} exchanges over `{axis}` itself, by `{name}`. Each rank "
            "updates a different part of each leaf, so this would mix up different elements. The "
            "optimizer already gets the mean of the gradients, so leave the exchange out."
        )
    level, where = _of_updates(
        on_part, *(jax.tree.leaves(tree) for tree in (updates, state, params))
    )
    # We tolerate slices of a vector that was joined from several leaves (`_CUT`), because
    # `optax.flatten` splits its vector exactly where it joined the leaves.
    if level in (_POSITIONS, _OTHERS):
        raise ValueError(
            f"the optimizer of {what} does not work element by element: its updates depend on the "
            f"result of {where}. Since it only receives a flat part of each leaf, a norm, for "
            f"example, would be computed over this part alone. Remedy: {instead}."
        )
    # The levels don't catch an optimizer that depends on shapes, e.g. through a mask that selects
    # matrices by their `ndim`. All flat parts are vectors, so the mask would select different
    # operations for them than for whole leaves. That's why we also trace the optimizer on whole
    # leaves, and insist on the same operations in the same order, with the same literals.
    start = jax.eval_shape(optimizer.init, whole[0] if whole[1] is None else whole[1])
    on_whole = traced(whole[0], start, whole[1])
    for leaf, flat in itertools.zip_longest(
        _operations(on_whole), _operations(on_part), fillvalue="nothing"
    ):
        if leaf != flat:
            raise ValueError(
                f"the optimizer of {what} computes `{leaf}` on whole leaves, but `{flat}` on "
                "flat parts of them, which is what it receives. So it depends on shapes, perhaps "
                "because its `mask` is a function. Pass a tree of booleans as `mask` instead."
            )


def _exchange_over(jaxpr: Jaxpr, axis: Hashable | None) -> str | None:
    """Returns the name of the first primitive that exchanges over `axis`, or None."""
    for eqn in jaxpr.eqns:
        # These primitives take an axis name but don't communicate.
        if eqn.primitive.name in ("axis_index", "pcast", "pvary"):
            continue
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if axis is not None and axis in (named if isinstance(named, tuple | list) else (named,)):
            return str(eqn.primitive.name)
        for sub in compat.sub_jaxprs(eqn):
            found = _exchange_over(compat.open_jaxpr(sub)[0], axis)
            if found is not None:
                return found
    return None


def _types(tree: PyTree) -> PyTree:
    # Strip everything but shapes and element types. Other properties, e.g. the axes over which a
    # value varies, would differ between traces.
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda x: x, tree)
    )


def _of_updates(
    jaxpr: Jaxpr,
    updates: Sequence[jax.ShapeDtypeStruct],
    state: Sequence[jax.ShapeDtypeStruct],
    params: Sequence[jax.ShapeDtypeStruct],
) -> _Level:
    """Returns the highest level of the new updates, for anything that the state may contain."""
    elements: _Level = (_ELEMENT, "")
    sizes = {math.prod(x.shape) for x in (*updates, *params) if x.ndim}
    # A scalar in the optimizer's state could be a harmless step counter, or something computed from
    # elements, such as a norm. We start out assuming that it's a counter. If the update turns out
    # to compute it from elements, we raise the scalar's level and analyse the update again. Since
    # levels only ever grow, this terminates.
    levels = [(_NOTHING, "") if x.ndim == 0 else elements for x in state]
    while True:
        out = _levels(jaxpr, [elements] * len(updates) + levels + [elements] * len(params), sizes)
        kept = len(out) - len(state)
        after = [max(pair) for pair in zip(levels, out[kept:], strict=True)]
        if after == levels:
            return max(out[:kept], default=(_NOTHING, ""))
        levels = after


def _levels(jaxpr: Jaxpr, given: Sequence[_Level], sizes: AbstractSet[int]) -> list[_Level]:
    """Returns the levels of a jaxpr's results, given those of its arguments.

    Args:
        jaxpr: Open jaxpr.
        given: Levels of its arguments.
        sizes: Sizes of leaves. An `iota` of one of these sizes enumerates the positions in a leaf.
    """
    known: dict[Var, _Level] = dict(zip(jaxpr.invars, given, strict=True))

    def level_of(atom: Atom) -> _Level:
        nothing = (_NOTHING, "")
        return nothing if isinstance(atom, compat.Literal) else known.get(atom, nothing)

    for eqn in jaxpr.eqns:
        operands = [level_of(v) for v in eqn.invars]
        highest = max(operands, default=(_NOTHING, ""))
        name = eqn.primitive.name
        inner = [compat.open_jaxpr(sub)[0] for sub in compat.sub_jaxprs(eqn)]
        # By default, results depend on everything that any of the operands depends on.
        made = [highest] * len(eqn.outvars)
        counted = [level for level in operands if level[0] == _POSITIONS]
        if _DRAWS.match(name) or (highest[0] >= _ELEMENT and _ACROSS.match(name)):
            made = [max(highest, (_OTHERS, f"`{name}`"))] * len(made)
        elif name == "iota" and _size(eqn.outvars[0]) in sizes:
            made = [(_POSITIONS, "`iota`")]
        elif inner:
            if name in _CALLS:
                # If an equation calls another jaxpr, its last operands are the arguments of that
                # jaxpr. A `cond` takes an extra operand in front, the index of the branch. All
                # results depend on which branch is taken, so their level can't be lower than that
                # of the index.
                bodies = [
                    _levels(sub, operands[len(operands) - len(sub.invars) :], sizes)
                    for sub in inner
                ]
                chosen = operands[0] if name == "cond" else (_NOTHING, "")
                made = [max(chosen, *levels) for levels in zip(*bodies, strict=True)]
            else:
                # We don't track individual values through a loop. Instead, we assume that any value
                # may reach any other, so all results get the highest level among the operands and
                # the values computed inside the loop.
                #
                # The body of a kernel, e.g. from Pallas, writes to references and has no results.
                # If it combines different elements anywhere, we assume that everything it writes
                # depends on other elements.
                bodies = [_levels(sub, [highest] * len(sub.invars), sizes) for sub in inner]
                written = [
                    (_OTHERS, f"`{n}`")
                    for sub in inner
                    if highest[0] and not sub.outvars
                    for n in _across(sub)
                ]
                made = [max([highest, *written, *itertools.chain(*bodies)])] * len(made)
        elif highest[0] == _POSITIONS:
            # A scalar computed from positions, e.g. the largest position, isn't tied to any
            # particular position, so we treat it like any other number.
            made = [highest if _shape(v) else (_NOTHING, "") for v in eqn.outvars]
        elif counted and highest[0] < _OTHERS:
            # Here, elements are combined with their positions, e.g. multiplied by their index.
            # Positions start from 0 again in each rank's part of a leaf, so we'd get a different
            # result than on the whole leaf.
            made = [(_OTHERS, counted[0][1])] * len(made)
        elif _ELEMENT <= highest[0] < _OTHERS:
            made = [max(highest, (_moved(eqn, operands, v), f"`{name}`")) for v in eqn.outvars]
        known.update(zip(eqn.outvars, made, strict=True))
    return [level_of(v) for v in jaxpr.outvars]


def _moved(eqn: Equation, operands: Sequence[_Level], made: Var) -> int:
    """Returns the level that an equation by itself assigns to one of its results.

    The level depends on whether elements keep their positions.
    """
    name = eqn.primitive.name
    size = _size(made)
    held = [
        (v, level) for v, (level, _) in zip(eqn.invars, operands, strict=True) if level >= _ELEMENT
    ]
    # Some operations merely stack rows of equal length, or separate them. Elements then stay in
    # their column, i.e. keep their position within the row, so we don't count this as a move.
    rows = len(_shape(made)) > 1 or len(_shape(eqn.invars[0])) > 1
    rows = rows and all(_shape(v)[-1:] == _shape(made)[-1:] for v, _ in held)
    if rows and name in ("concatenate", "stack", "slice", "split"):
        return _ELEMENT
    if any(_size(v) < size for v, _ in held) and name != "concatenate":
        return _OTHERS  # one element turns into many, as in a broadcast
    if not _MOVES.match(name) or (name == "gather" and operands[0][0] < _ELEMENT):
        return _ELEMENT  # a lookup in a table that isn't a parameter
    if name == "concatenate":
        return _JOINED if all(level == _ELEMENT for _, level in held) else _OTHERS
    if name in ("slice", "split"):
        # `optax.flatten` joins all leaves into one vector and later slices it back into leaves. We
        # allow this by giving slices of joined leaves their own level. Slicing a single leaf isn't
        # allowed, because it shifts elements to other positions.
        if _size(eqn.invars[0]) == size:
            return _ELEMENT
        return _CUT if operands[0][0] == _JOINED else _OTHERS
    return _OTHERS


def _shape(var: Atom) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _size(var: Atom) -> int:
    return math.prod(_shape(var))


def _across(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields the primitives of a jaxpr that combine different elements."""
    for operation in _operations(jaxpr):
        name, *_ = operation.split()
        if _ACROSS.match(name):
            yield name


def _operations(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields the primitives that actually compute something, in order, with literal operands."""
    for eqn in jaxpr.eqns:
        inner = list(compat.sub_jaxprs(eqn))
        for sub in inner:
            yield from _operations(compat.open_jaxpr(sub)[0])
        if not inner and eqn.primitive.name not in _SHAPES:
            yield " ".join(
                [
                    eqn.primitive.name,
                    *(str(v.val) for v in eqn.invars if isinstance(v, compat.Literal)),
                ]
            )
