"""Marks each value of a traced step by what it's computed from and what reads it.

`exchange_labels` uses these marks to recognise the same exchange on different ranks. Shape and type
aren't enough for that, because different exchanges may look alike. Positions in the jaxpr don't
help either: ranks may trace independent equations in different orders, e.g. because they iterate
over a set of names. So a mark must depend on nothing but the graph of equations.

Each variable gets two marks. A forward pass (`_origins`) computes the first from the equations that
lead to the variable, and a backward pass (`_uses`) the second from the equations that read it. The
forward pass starts at the leaves of the arguments, the backward pass at those of the results. Each
leaf is represented by a hash of its tree path. From there, sets of hashes propagate by these rules:

- Layout and elementwise equations pass on the union of their operands' sets, because each element
  of the result comes from single elements of the operands.
- Any other equation ends these paths. Its result's set contains a single hash of the equation's
  name and the marks around it.
- Exchanges end the paths as well, but separately for each operand and its result.
- Calls are transparent, and a `cond` yields the union over its branches.

In addition, each mark contains a single hash of all equations in its direction (`Mark.exact`).
Shapes and the values of constants don't affect a mark, because they may differ on a rank whose
batch is short. The exception is `Mark.placed`, because some exchanges differ only in a constant
factor, or in which part of an array they're for.

Each equation is visited twice, once per direction, and sets are limited in size, so the cost is
linear in the number of equations. If a function is called several times, each call counts
separately.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from jaxcross import _jax_compat as compat
from jaxcross._jax_compat import INLINED
from jaxcross._pytree import TreeDef
from jaxcross.program.op_cost import ARITHMETIC, EXACT
from jaxcross.program.trace import Traced

# These only change the layout of an array. Treat them like elementwise equations, because each
# element of their result also comes from single elements of their operands.
_LAYOUT = frozenset(
    [
        "bitcast_convert_type",
        "concatenate",
        "dynamic_slice",
        "dynamic_update_slice",
        "pcast",
        "pvary",
        "split",
    ]
)
_FUNCTIONS = frozenset(
    {
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "ceil",
        "complex",
        "conj",
        "cos",
        "cosh",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "imag",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "nextafter",
        "pow",
        "real",
        "rem",
        "round",
        "sin",
        "sinh",
        "tan",
        "tanh",
    }
)
_ELEMENTWISE = (EXACT - {"argmax", "iota"}) | ARITHMETIC | _LAYOUT | _FUNCTIONS

# Maximum size of a set of hashes. We keep the smallest hashes; otherwise, the cost of a union would
# grow with the number of leaves.
_KEPT = 32
_BITS = 2**64 - 1


class Mark(NamedTuple):
    """A value's surroundings in one direction: towards the step's inputs or its results.

    Attributes:
        leaves: Leaves reached through layout and elementwise equations alone, each as a hash of its
            path.
        others: Other equations where such paths end, each as a hash of its name and the marks
            around it.
        exact: A hash of all equations in that direction, including their names and the order of
            their operands.
        placed: The leaves and other equations again, each combined with the array parts and
            constant factors along the way.
    """

    leaves: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    exact: int = 0
    placed: tuple[int, ...] = ()


_NOTHING = Mark()


@dataclass(slots=True)
class Scope:
    """A jaxpr's equations and its variables' marks. Each call of a jaxpr has its own scope.

    Attributes:
        inputs, eqns, outputs: The jaxpr's inputs, equations and results.
        origins: Each variable's mark towards the inputs.
        uses: Each variable's mark towards the results.
        inside: Equation -> the jaxprs it holds; see `_inside`.
        makers: The equation that computes each variable.
    """

    inputs: Sequence[Any]
    eqns: Sequence[compat.Equation]
    outputs: Sequence[Any]
    origins: dict[Any, Mark] = field(default_factory=dict)
    uses: dict[Any, Mark] = field(default_factory=dict)
    inside: dict[int, list[tuple[Scope, Sequence[int], bool]]] = field(default_factory=dict)
    makers: dict[Any, Any] = field(default_factory=dict)

    def origin(self, atom: compat.Atom) -> Mark:
        return _CONSTANT if isinstance(atom, compat.Literal) else self.origins.get(atom, _CONSTANT)

    def use(self, var: compat.Var) -> Mark:
        return self.uses.get(var, _NOTHING)


def marked(traced: Traced) -> Scope:
    """Marks all variables of a traced step. Doesn't wait or communicate.

    If the steps of several ranks compute the same thing, their values get the same marks, even if
    the ranks have traced the equations in different orders. The arrays' shapes may differ, too;
    they only affect `Mark.placed`.
    """
    inputs = [_mark_of(leaf) for leaf in leaf_hashes(traced.in_tree)]
    scope = _origins(traced, traced.jaxpr, [*(_CONSTANT for _ in traced.consts), *inputs])
    _uses(traced, scope, [_mark_of(leaf) for leaf in leaf_hashes(traced.out_tree)])
    return scope


def _mark_of(leaf: int) -> Mark:
    return Mark((leaf,), (), leaf, (leaf,))


def leaf_hashes(tree: TreeDef) -> list[int]:
    """Returns a hash of the path to each leaf.

    A path consists of dictionary keys and of indices into tuples and lists. We hash each index
    together with the length of its tuple or list, because the same index may mean something else in
    a sequence of a different length.
    """
    return list(_leaf_hashes(tree, 0))


def _leaf_hashes(tree: TreeDef, above: int) -> Iterator[int]:
    if tree.num_nodes == tree.num_leaves == 1:
        yield above
        return
    kind, keys = tree.node_data()
    children = tree.children()
    for n, child in enumerate(children):
        key = repr(keys[n]) if kind is dict else f"{n} of {len(children)}"
        yield from _leaf_hashes(child, mixed(above, hash_of_text(key)))


@functools.cache
def hash_of_text(text: str) -> int:
    """Returns a 64-bit hash of a text that's the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def mixed(*parts: object) -> int:
    """Returns a 64-bit hash of (nested tuples of) integers that's the same in every process.

    Unlike hashes of strings, Python's hashes of integers aren't salted per process.
    """
    return hash(parts) & _BITS


_CONSTANT = Mark(exact=hash_of_text("constant"))


def _origins(traced: Traced, jaxpr: compat.Jaxpr, args: Sequence[Mark]) -> Scope:
    """Returns a jaxpr's scope with all marks towards the inputs, given its arguments' marks."""
    inner, consts = compat.open_jaxpr(jaxpr)
    scope = Scope([*inner.constvars[len(consts) :], *inner.invars], inner.eqns, inner.outvars)
    scope.origins.update(zip(scope.inputs, args, strict=False))
    for i, eqn in enumerate(scope.eqns):
        operands = [scope.origin(a) for a in eqn.invars]
        inside = scope.inside[i] = []
        for sub, given, returns in _inside(eqn):
            inside.append((_origins(traced, sub, [operands[n] for n in given]), given, returns))
        scope.origins.update(
            zip(eqn.outvars, _made(traced, eqn, operands, scope, inside), strict=True)
        )
        scope.makers.update((v, eqn) for v in eqn.outvars)
    return scope


def _inside(eqn: compat.Equation) -> Iterator[tuple[Any, Sequence[int], bool]]:
    """Yields the jaxprs inside an equation.

    Each comes with the indices of the equation's operands that it takes (empty if we can't tell),
    and a flag that says whether its results are those of the equation.
    """
    name = eqn.primitive.name
    params = eqn.params
    for n, sub in enumerate(compat.sub_jaxprs(eqn)):
        inner, consts = compat.open_jaxpr(sub)
        given: Sequence[int] = range(len(eqn.invars))
        returns = len(inner.outvars) == len(eqn.outvars)
        if name == "cond":
            given = given[1:]
        elif name == "while":
            # A `while` has three groups of operands: the first is only read by its predicate, the
            # second only by its body, and the third is the carry, which both of them read.
            ahead = params["cond_nconsts"]
            both = ahead + params["body_nconsts"]
            returns = sub is not params["cond_jaxpr"]
            given = given[ahead:] if returns else [*given[:ahead], *given[both:]]
        if name in INLINED and n > 0:  # only the first is called
            given = ()
            returns = False
        known = len(given) == len(inner.constvars) - len(consts) + len(inner.invars)
        yield sub, given if known else (), returns


def _made(
    traced: Traced,
    eqn: compat.Equation,
    operands: Sequence[Mark],
    scope: Scope,
    inside: Sequence[Any],
) -> list[Mark]:
    """Returns the marks of an equation's results towards the inputs."""
    name = hash_of_text(eqn.primitive.name)
    count = range(len(eqn.outvars))
    bodies = [[inner.origin(a) for a in inner.outputs] for inner, _, returns in inside if returns]
    if bodies and _is_call(eqn):
        return [_alternatives(name, marks) for marks in zip(*bodies, strict=True)]
    if eqn.primitive.name == "optimization_barrier":
        return list(operands)
    if eqn.primitive.name in _ELEMENTWISE:
        union = _union(operands)
        exact = mixed(name, *[o.exact for o in operands])
        ways = [_ways_through(eqn, scope.makers, n) for n in count]
        return [
            Mark(
                *union,
                mixed(exact, n),
                _along((o.placed, way) for o, way in zip(operands, ways[n], strict=True)),
            )
            for n in count
        ]
    if _is_parallel(traced, eqn):
        return [_exchanged(name, o) for o in operands]
    # Any other equation, e.g. a matrix product, ends the paths from the leaves. Mark its results
    # with a hash of its name and its operands' marks, plus the marks inside the jaxprs it contains,
    # if any.
    around = mixed(name, *(m[:2] for m in operands), *(m[:2] for body in bodies for m in body))
    exact = mixed(name, *(m.exact for m in operands), *(m.exact for body in bodies for m in body))
    made = [_end(mixed(around, n), mixed(exact, n)) for n in count]
    ways = _ways_by_index(eqn, scope.makers) if _picks(eqn) else None
    if ways is not None:
        placed = _along((o.placed, way) for o, way in zip(operands, ways, strict=True))
        return [made[0]._replace(placed=placed)]
    return made


def _exchanged(name: int, mark: Mark) -> Mark:
    return Mark(
        (),
        (mixed(name, mark.leaves, mark.others),),
        mixed(name, mark.exact),
        (mixed(name, mark.placed),),
    )


def _end(around: int, exact: int) -> Mark:
    """Returns the mark of a value where paths through layout and elementwise equations end."""
    return Mark((), (around,), exact, (around,))


def _along(ways: Iterable[tuple[tuple[int, ...], str | None]]) -> tuple[int, ...]:
    """Merges the `placed` sets at the end of several ways; see `_ways_through`."""
    found: tuple[int, ...] = ()
    for placed, way in ways:
        if way and placed:
            part = hash_of_text(way)
            placed = tuple(sorted(mixed(place, part) for place in placed))
        if way is not None:
            found = _smallest(found, placed)
    return found


def _uses(traced: Traced, scope: Scope, results: Sequence[Mark]) -> None:
    """Adds the variables' marks towards the results, given the marks of the results."""

    def add(atom: compat.Atom, mark: Mark) -> None:
        if not isinstance(atom, compat.Literal):
            known = scope.uses.get(atom)
            if known is not None:
                # Several equations may read the same value, and ranks may trace these in different
                # orders. Combine their hashes with a sum, which doesn't depend on the order.
                mark = _merged((known, mark), (known.exact + mark.exact) & _BITS)
            scope.uses[atom] = mark

    for atom, mark in zip(scope.outputs, results, strict=False):
        add(atom, mark)
    for i, eqn in reversed(list(enumerate(scope.eqns))):
        results = [scope.use(v) for v in eqn.outvars]
        for inner, _, returns in scope.inside[i]:
            _uses(traced, inner, results if returns else ())
        for atom, mark in zip(
            eqn.invars, _read(traced, eqn, scope, results, scope.inside[i]), strict=True
        ):
            add(atom, mark)


def _read(
    traced: Traced,
    eqn: compat.Equation,
    scope: Scope,
    results: Sequence[Mark],
    inside: Sequence[Any],
) -> list[Mark]:
    """Returns the marks towards the results that an equation contributes to its operands."""
    name = hash_of_text(eqn.primitive.name)
    operands = [scope.origin(a) for a in eqn.invars]
    if inside and _is_call(eqn):
        found: list[list[Mark]] = [[] for _ in operands]
        for inner, given, _ in inside:
            for n, var in zip(given, inner.inputs, strict=False):
                found[n].append(inner.use(var))
        return [_alternatives(name, marks) for marks in found]
    if eqn.primitive.name == "optimization_barrier":
        return list(results)
    if eqn.primitive.name in _ELEMENTWISE:
        union = _union(results)
        exact = mixed(name, *[m.exact for m in (*operands, *results)])
        ways = [_ways_through(eqn, scope.makers, n) for n in range(len(results))]
        return [
            Mark(
                *union,
                mixed(exact, n),
                _along((r.placed, way[n]) for r, way in zip(results, ways, strict=True)),
            )
            for n in range(len(operands))
        ]
    if _is_parallel(traced, eqn):
        return [_exchanged(name, r) for r in results]
    around = mixed(name, *(m[:2] for m in (*operands, *results)))
    exact = mixed(name, *(m.exact for m in (*operands, *results)))
    read = [_end(mixed(around, n), mixed(exact, n)) for n in range(len(operands))]
    ways = _ways_by_index(eqn, scope.makers) if _picks(eqn) else None
    if ways is not None:
        return [
            m if way is None else m._replace(placed=_along([(results[0].placed, way)]))
            for m, way in zip(read, ways, strict=True)
        ]
    return read


def _is_call(eqn: compat.Equation) -> bool:
    """Whether an equation merely runs the jaxprs inside it, or one of them."""
    return eqn.primitive.name in INLINED or eqn.primitive.name == "cond"


def _is_parallel(traced: Traced, eqn: compat.Equation) -> bool:
    """Whether an equation exchanges each operand separately, with a result for each."""
    found = traced.wire.recognise(eqn, traced.axes)
    return found is not None and len(found) == len(eqn.invars) == len(eqn.outvars)


def _alternatives(name: int, marks: Sequence[Mark]) -> Mark:
    """Returns the mark of a value that may be any of several, such as a `cond`'s result."""
    if len(marks) == 1:
        return marks[0]
    return _merged(marks, mixed(name, *(m.exact for m in marks)))


def _merged(marks: Sequence[Mark], exact: int) -> Mark:
    return Mark(*_union(marks), exact, _along((m.placed, "") for m in marks))


def _union(marks: Sequence[Mark]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the union of several marks' leaves, and the union of their others."""
    leaves: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    for mark in marks:
        leaves = _smallest(leaves, mark.leaves)
        others = _smallest(others, mark.others)
    return leaves, others


def _smallest(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    if not other or one == other:
        return one
    return tuple(sorted({*one, *other})[:_KEPT]) if one else other


# Two exchanges may differ only in which part of an array they exchange, or in a constant factor. To
# tell them apart, the functions below describe, as text, which part of an array an equation reads
# or writes, or what constant it multiplies by.
_THROUGH = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})


def _ways_through(
    eqn: compat.Equation, makers: Mapping[Any, Any], result: int
) -> Sequence[str | None]:
    """Describes how each operand of a layout or elementwise equation reaches one of its results.

    Args:
        eqn: The equation.
        makers: The equation that computes each variable.
        result: The index of the result.

    Returns:
        An entry per operand: the part or the constant factor as text, or None if the operand
        doesn't reach the result (or only as an index). The text is empty if the whole operand
        passes through unscaled, or if the part or factor isn't a literal in the code.
    """
    name = eqn.primitive.name
    params = eqn.params
    ways: list[str | None] = [""] * len(eqn.invars)
    if name == "slice":
        ways[0] = _slice(
            params["start_indices"],
            params["limit_indices"],
            params["strides"],
            compat.array_type(eqn.invars[0]).shape,
        )
    elif name == "split":
        ways[0] = f"{params['axis']} {result} of {params['sizes']}"
    elif name == "concatenate":
        dim = params["dimension"]
        ends = list(accumulate(compat.array_type(a).shape[dim] for a in eqn.invars))
        if len(ends) > 1:
            ways = [f"{dim} to {end} of {ends[-1]}" for end in ends]
    elif name in ("dynamic_slice", "dynamic_update_slice"):
        n = 0 if name == "dynamic_slice" else 1
        starts = [_constant(a, makers) for a in eqn.invars[n + 1 :]]
        ways[n + 1 :] = [None] * len(starts)
        if None not in starts:
            ways[n] = f"{starts} of {compat.array_type(eqn.invars[0]).shape}"
    elif name in ("mul", "div"):
        for n, atom in enumerate(eqn.invars[::-1]):
            if isinstance(atom, compat.Literal):
                ways[n] = f"{name} {n} {atom.val}"
    return ways


def _picks(eqn: compat.Equation) -> bool:
    """Whether an equation with one result reads or writes elements by an index."""
    return eqn.primitive.name.startswith("scatter") or eqn.primitive.name == "gather"


def _ways_by_index(eqn: compat.Equation, makers: Mapping[Any, Any]) -> Sequence[str | None] | None:
    """Like `_ways_through`, for equations that `_picks`; None if the index isn't a literal."""
    at = _constant(eqn.invars[1], makers)
    if at is None:
        return None
    part = f"{at} of {compat.array_type(eqn.invars[0]).shape}"
    return [part, None] if eqn.primitive.name == "gather" else ["", None, part]


def _slice(
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int] | None,
    shape: Sequence[int],
) -> str:
    """Describes the dimensions that a slice cuts.

    Other dimensions are left out, because their size may differ between ranks, e.g. if a batch is
    short.
    """
    steps = strides or [1] * len(shape)
    cut = [
        x
        for x in zip(range(len(shape)), starts, limits, steps, shape, strict=True)
        if x[1:4] != (0, x[4], 1)
    ]
    return str(cut) if cut else ""


def _constant(atom: compat.Atom, makers: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """Returns the integers of an index, or None if they aren't literals in the code."""
    if isinstance(atom, compat.Literal):
        return (int(atom.val),)
    eqn = makers.get(atom)
    if eqn is not None and eqn.primitive.name in _THROUGH:
        return _constant(eqn.invars[0], makers)
    if eqn is not None and eqn.primitive.name == "concatenate":
        parts = [_constant(a, makers) for a in eqn.invars]
        return None if None in parts else tuple(n for part in parts for n in part or ())
    return None
