"""Whether an optimizer works element by element, as one must that steps flat parts of leaves: told by its jaxpr."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import optax

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED

# What makes an element of others, and bits that each rank would draw alike for parts that are not.
_ACROSS = re.compile(
    r"reduce(?!_precision)|arg(max|min)|cum|dot_general|ragged_dot|conv_general|sort|(approx_)?top_k|fft|select_and_"
    r"|svd|qr|eigh?|cholesky|lu|schur|triangular_solve|householder"
)
# What may put an element in the place of another.
_MOVES = re.compile(r"slice|dynamic_(update_)?slice|split|concatenate|gather|scatter|rev|transpose|pad")
_DRAWS = re.compile(r"random_bits|random_gamma|rng_")
_CALLS = INLINED | {"cond"}
# They differ between a leaf and its flat part, and compute nothing.
_SHAPES = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze"}
_NOTHING, _PLACES, _ELEMENT, _JOINED, _CUT, _OTHERS = range(6)
_Level = tuple[int, str]
"""Of neither updates nor parameters, of places alone, of the same element's, of whole leaves joined to a vector (as by
`optax.flatten`), of a piece cut out of such a vector, or of others', and what made it so."""


def check_elementwise(
    optimizer: optax.GradientTransformation, whole: Any, part: Any, state: Any, what: str, *, axis: Any = None,
    **extra: Any,
) -> None:  # fmt: skip
    """Refuses an optimizer that does something else to flat parts of leaves than to leaves. Computes nothing.

    Args:
        optimizer: Given to `what`.
        whole: Updates and parameters, or None, in their own shapes: arrays, or what tells their types.
        part: The same as they are stepped.
        state: Of the optimizer on `part`.
        what: Whose optimizer it is, for the error.
        axis: Over whose ranks the parts are.
        extra: Of `update`.

    Raises:
        ValueError: It is no element-wise one, or exchanges over `axis`.
    """

    def traced(updates: Any, state: Any, params: Any) -> Any:
        made = jax.make_jaxpr(lambda *args: optimizer.update(*args, **extra))(updates, state, params)
        return compat.open_jaxpr(made)[0]

    (updates, params), state, whole = _types(part), _types(state), _types(whole)
    on_part = traced(updates, state, params)
    if (name := _speaks_of(on_part, axis)) is not None:
        raise ValueError(
            f"the optimizer of {what} exchanges over `{axis}` itself, by `{name}`: every rank steps another part of"
            " each leaf, and unlike elements would be mixed. It gets the mean of the gradients: leave the exchange out."
        )
    level, where = _of_updates(on_part, *(jax.tree.leaves(tree) for tree in (updates, state, params)))
    if level in (_PLACES, _OTHERS):
        raise ValueError(
            f"the optimizer of {what} does not work element by element: its updates depend on {where}. Every rank steps"
            " flat parts of the leaves, and would take a norm, for example, of its own part. Put such an optimizer"
            " behind `jaxcross.exchange.mean`."
        )
    start = jax.eval_shape(optimizer.init, whole[0] if whole[1] is None else whole[1])
    on_whole = traced(whole[0], start, whole[1])
    for leaf, flat in itertools.zip_longest(_operations(on_whole), _operations(on_part), fillvalue="nothing"):
        if leaf != flat:
            raise ValueError(
                f"the optimizer of {what} computes `{leaf}` on leaves where it computes `{flat}` on flat parts of them,"
                " which is what every rank steps: it looks at shapes, perhaps in a `mask` that is a function. Make a"
                " tree of booleans of that."
            )


def _speaks_of(jaxpr: Any, axis: Any) -> str | None:
    """The first exchange over an axis."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("axis_index", "pcast", "pvary"):
            continue
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if axis is not None and axis in (named if isinstance(named, tuple | list) else (named,)):
            return str(eqn.primitive.name)
        for sub in compat.sub_jaxprs(eqn):
            if (found := _speaks_of(compat.open_jaxpr(sub)[0], axis)) is not None:
                return found
    return None


def _types(tree: Any) -> Any:
    # Without what types hold besides, for example over which axes values vary.
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda x: x, tree))


def _of_updates(jaxpr: Any, updates: Sequence[Any], state: Sequence[Any], params: Sequence[Any]) -> _Level:
    """The highest level of the new updates, whatever came of it in earlier steps into the state."""
    elements: _Level = (_ELEMENT, "")
    sizes = {math.prod(x.shape) for x in (*updates, *params) if x.ndim}
    levels = [(_NOTHING, "") if x.ndim == 0 else elements for x in state]
    while True:
        out = _levels(jaxpr, [elements] * len(updates) + levels + [elements] * len(params), sizes)
        kept = len(out) - len(state)
        after = [max(pair) for pair in zip(levels, out[kept:], strict=True)]
        if after == levels:
            return max(out[:kept], default=(_NOTHING, ""))
        levels = after


def _levels(jaxpr: Any, given: Sequence[_Level], sizes: AbstractSet[int]) -> list[_Level]:
    """Of a jaxpr's results, from those of its arguments; a count of as many as one of `sizes` is of a leaf's places."""
    known: dict[Any, _Level] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> _Level:
        nothing = (_NOTHING, "")
        return nothing if isinstance(atom, compat.Literal) else known.get(atom, nothing)

    for eqn in jaxpr.eqns:
        operands = [of(v) for v in eqn.invars]
        highest, name = max(operands, default=(_NOTHING, "")), eqn.primitive.name
        made = [highest] * len(eqn.outvars)
        counted = [level for level in operands if level[0] == _PLACES]
        if _DRAWS.match(name) or (highest[0] >= _ELEMENT and _ACROSS.match(name)):
            made = [max(highest, (_OTHERS, f"`{name}`"))] * len(made)
        elif name == "iota" and _size(eqn.outvars[0]) in sizes:
            made = [(_PLACES, "`iota`")]
        elif inner := [compat.open_jaxpr(sub)[0] for sub in compat.sub_jaxprs(eqn)]:
            if name in _CALLS:  # a body's arguments are the last operands
                bodies = [_levels(sub, operands[len(operands) - len(sub.invars) :], sizes) for sub in inner]
                chosen = operands[0] if name == "cond" else (_NOTHING, "")
                made = [max(chosen, *levels) for levels in zip(*bodies, strict=True)]
            else:  # in a loop anything may come of anything; a kernel returns nothing, but writes what it makes
                bodies = [_levels(sub, [highest] * len(sub.invars), sizes) for sub in inner]
                written = [(_OTHERS, f"`{n}`") for sub in inner if highest[0] and not sub.outvars for n in _across(sub)]
                made = [max([highest, *written, *itertools.chain(*bodies)])] * len(made)
        elif highest[0] == _PLACES:  # a number that is made of them is one like any other
            made = [highest if v.aval.shape else (_NOTHING, "") for v in eqn.outvars]
        elif counted and highest[0] < _OTHERS:
            made = [(_OTHERS, counted[0][1])] * len(made)
        elif _ELEMENT <= highest[0] < _OTHERS:
            made = [max(highest, (_moved(eqn, operands, v), f"`{name}`")) for v in eqn.outvars]
        known.update(zip(eqn.outvars, made, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _moved(eqn: Any, operands: Sequence[_Level], made: Any) -> int:
    """The level of one of its results, beside those of the operands: is an element still in its place?"""
    name, size = eqn.primitive.name, _size(made)
    held = [(v, level) for v, (level, _) in zip(eqn.invars, operands, strict=True) if level >= _ELEMENT]
    # Rows are put upon another, or taken off.
    rows = len(made.aval.shape) > 1 or len(eqn.invars[0].aval.shape) > 1
    rows = rows and all(v.aval.shape[-1:] == made.aval.shape[-1:] for v, _ in held)
    if rows and name in ("concatenate", "stack", "slice", "split"):
        return _ELEMENT
    if any(_size(v) < size for v, _ in held) and name != "concatenate":
        return _OTHERS  # one element has become many
    if not _MOVES.match(name) or (name == "gather" and operands[0][0] < _ELEMENT):
        return _ELEMENT  # a table that is no parameter may be looked up
    if name == "concatenate":
        return _JOINED if all(level == _ELEMENT for _, level in held) else _OTHERS
    if name in ("slice", "split"):
        if _size(eqn.invars[0]) == size:
            return _ELEMENT
        return _CUT if operands[0][0] == _JOINED else _OTHERS
    return _OTHERS


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _across(jaxpr: Any) -> Iterator[str]:
    """What in a jaxpr makes an element of others."""
    for operation in _operations(jaxpr):
        name, *_ = operation.split()
        if _ACROSS.match(name):
            yield name


def _operations(jaxpr: Any) -> Iterator[str]:
    """What is computed, in order, with the numbers that stand in it."""
    for eqn in jaxpr.eqns:
        inner = list(compat.sub_jaxprs(eqn))
        for sub in inner:
            yield from _operations(compat.open_jaxpr(sub)[0])
        if not inner and eqn.primitive.name not in _SHAPES:
            yield " ".join([eqn.primitive.name, *(str(v.val) for v in eqn.invars if isinstance(v, compat.Literal))])
