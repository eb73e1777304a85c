"""Labels identify each exchange of a step, so that ranks can check that they make the same ones in
the same order.

By the signature two exchanges may both be sums of three floats. Ranks that loop over names in
different orders have equal signatures, and each would receive the values of the other exchange. A
label is the same on all ranks that make the same exchange. It does not depend on the order of
tracing, nor, but for the last kind below, on shapes, which may differ on one rank.

An exchange has up to four labels of its origin and use together. They are hashes of

- the leaves of the step's arguments that its operand comes from and of the step's results that it
  reaches, through layout and element-wise equations only;
- these leaves and the other equations at which such paths end, each with the leaves around it: for
  exchanges between products, for example, also where ranks add up the results in different orders;
- all equations before and after it by name, which tells any two exchanges of one step apart;
- the leaves and other equations, each with the part of the array (a slice, an index) and the
  constant factors on the way: for exchanges of parts of one leaf. Left out where the parts that the
  results go to do not tell it from another exchange: ranks may take the parts of a batch in any
  order if the results are added up.

A result may go to a place in a list or tuple, and what stands there follows from the order of
tracing: where names are iterated in two orders, the first exchange is of "loss" for `result[0]` on
one rank, and of "acc" for `result[0]` on the other. No label of origin and use together is then on
both ranks. Hence an exchange has the same four labels for its origin alone, and four for its use
alone. Those of the origin are left out where another exchange is for the same parts of the results,
and those of the use where another one is of the same parts of the arguments: the two may be
swapped.

A label that occurs twice on a rank identifies nothing and is left out. Ranks may take turns: one
exchanges its value where the others exchange zeros, as in `[psum(x if n == rank else zeros) for n
in range(ranks)]`. So zeros have no labels, nor do other values that add nothing, such as the least
number in a `pmax`, and two ranks may have one label at two places if each exchanges such a value at
the other's place. In a pipeline or on a ring, a rank sends what its neighbour needs next, so
permutations have only the label of all equations before and after them, and mpi4jax's
point-to-point calls have none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Any

import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross._pytree import TreeDef
from jaxcross.program.graph import exchanges_of
from jaxcross.program.ir import Exchange, Program
from jaxcross.program.provenance import Mark, Scope, hash_of_text, leaf_hashes, marked, mixed
from jaxcross.program.trace import Traced

_KINDS = 4
_LABELS = 3 * _KINDS  # of origin and use, of the origin, of the use
_DIGITS = 16  # of a label as text
_NO_LABEL = "0" * _DIGITS
_EMPTY = "f" * _DIGITS  # in place of each label of zeros
_POINT_TO_POINT = frozenset({"mpi.send", "mpi.recv", "mpi.sendrecv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """One array that a traced step exchanges.

    Attributes:
        exchange: How it travels, without the buffer that it may share.
        origin: Where it comes from.
        use: Where the result goes.
        empty: Whether its operand is zeros, infinities, or the least or greatest number of its
            type, written as such: what a rank exchanges that adds nothing.
        labels: By leaves, by leaves and the equations around them, by all equations, by parts; 0
            for one that it does not have. First those of its origin and use, then those of its
            origin alone and of its use alone.
    """

    exchange: Exchange
    origin: Mark
    use: Mark
    empty: bool
    labels: tuple[int, ...]


def labelled(traced: Traced) -> dict[int, list[Labelled]]:
    """Returns the arrays that each equation of a traced step exchanges, by equation. Computed once.

    Does not wait or communicate.
    """
    if "labelled" not in traced.memo:
        traced.memo["labelled"] = _labelled(traced)
    return traced.memo["labelled"]


def _labelled(traced: Traced) -> dict[int, list[Labelled]]:
    scope = marked(traced)
    found = {}
    for i, eqn in enumerate(scope.eqns):
        exchanges = exchanges_of(eqn, traced)
        if exchanges:
            ends = zip(exchanges, _ends(traced, scope, i), strict=True)
            found[i] = [
                Labelled(exchange=x, origin=a, use=b, empty=empty, labels=_labels(x, a, b))
                for x, (a, b, empty) in ends
            ]
    return found


def _labels(x: Exchange, origin: Mark, use: Mark) -> tuple[int, ...]:
    if x.op in _POINT_TO_POINT:
        return (0,) * _LABELS
    kind = hash_of_text(x.line())
    if x.op == "ppermute":
        return 0, 0, mixed(3, kind, origin.exact, use.exact), *(0,) * (_LABELS - 3)
    pairs = (origin, use), (origin, Mark()), (Mark(), use)
    return tuple(
        label for n, pair in enumerate(pairs) for label in _hashes(_KINDS * n, kind, *pair)
    )


def _hashes(before: int, kind: int, origin: Mark, use: Mark) -> Iterator[int]:
    """Yields one label of each kind, which differ from those with another number `before` them."""
    yield mixed(before + 1, kind, origin.leaves, use.leaves) if origin.leaves or use.leaves else 0
    yield mixed(before + 2, kind, origin[:2], use[:2])
    yield mixed(before + 3, kind, origin.exact, use.exact)
    yield mixed(before + 4, kind, origin.placed, use.placed)


def _ends(traced: Traced, scope: Scope, i: int) -> Iterator[tuple[Mark, Mark, bool]]:
    """Yields the marks of each exchange of an equation, and whether its operand is empty, in
    `exchanges_of` order.
    """
    eqn = scope.eqns[i]
    found = traced.wire.recognise(eqn, traced.axes)
    if found is None:
        for inner, _, _ in scope.inside[i]:
            for n in range(len(inner.eqns)):
                yield from _ends(traced, inner, n)
        return
    for n in range(len(found)):  # one of mpi4jax's may have no operand, or no result
        use = scope.use(eqn.outvars[n]) if n < len(eqn.outvars) else Mark()
        if n < len(eqn.invars):
            yield scope.origin(eqn.invars[n]), use, _is_empty(eqn.invars[n], scope.makers)
        else:
            yield Mark(), use, False


def _is_empty(atom: compat.Atom, makers: Mapping[Any, Any]) -> bool:
    while not isinstance(atom, compat.Literal):
        eqn = makers.get(atom)
        if eqn is None:
            return False
        if eqn.primitive.name == "mul" and any(
            isinstance(a, compat.Literal) and a.val == 0 for a in eqn.invars
        ):
            return True
        if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
            return False
        atom = eqn.invars[0]
    return atom.val in (0, math.inf, -math.inf, *_extremes(compat.array_type(atom).dtype))


def _extremes(dtype: Any) -> tuple[Any, ...]:
    """Returns the least and the greatest number of a type, which `pmax` and `pmin` ignore; none for
    others.
    """
    if jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer):
        of = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
        return of.min, of.max
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An array in a program's order of exchanges.

    Attributes:
        number: Of the exchange, counted from 1.
        part: Its place in the buffer that it shares with others, counted from 1; 0 if it travels
            alone.
        labelled: What it is.
    """

    number: int
    part: int
    labelled: Labelled


def order_of(program: Program) -> list[Member]:
    """Returns the arrays that a program exchanges, in the order in which they travel. Does not wait
    or communicate.

    Empty for a parsed program, whose equations are unknown.
    """
    if program.traced is None:
        return []
    travel = _travelling(program)
    order = []
    for number, exchange in enumerate(program.exchanges, 1):
        parts = dict(exchange.params).get("parts")  # "4 0c5e..." if four arrays share the buffer
        if parts is None:
            order.append(Member(number=number, part=0, labelled=next(travel)))
        else:
            several = islice(travel, int(parts.split()[0]))
            order += [Member(number=number, part=n, labelled=x) for n, x in enumerate(several, 1)]
    return order


def _travelling(program: Program) -> Iterator[Labelled]:
    """Yields the exchanged arrays of a program, segment by segment."""
    known = labelled(program.traced)
    eqns = compat.open_jaxpr(program.traced.jaxpr)[0].eqns
    by_equation = {id(eqns[i]): i for i in known}
    by_result = {v: i for i in known for v in eqns[i].outvars}
    for segment in program.collectives:
        for eqn in compat.open_jaxpr(segment.jaxpr)[0].eqns:
            if id(eqn) in by_equation:
                yield from known[by_equation[id(eqn)]]
            else:
                # A shared buffer has an equation of its own. Its parts are found by their results,
                # which keep names.
                yield from (known[by_result[v]][0] for v in eqn.outvars if v in by_result)


def label_text(order: Sequence[Member]) -> str:
    """Returns the labels that are unique on this rank, as text of a fixed length: 192 bytes for
    each array.
    """
    members = [member.labelled for member in order]
    origins = Counter((x.exchange.line(), x.origin.placed) for x in members)
    uses = Counter((x.exchange.line(), x.use.placed) for x in members)
    known = []
    for x in members:
        labels = list(x.labels)
        if uses[x.exchange.line(), x.use.placed] > 1:
            labels[_KINDS - 1 : 2 * _KINDS] = [0] * (_KINDS + 1)
        if origins[x.exchange.line(), x.origin.placed] > 1:
            labels[2 * _KINDS :] = [0] * _KINDS
        known.append(labels)
    seen = Counter(label for labels in known for label in labels)

    def text(x: Labelled, label: int) -> str:
        if x.empty:
            return _EMPTY
        return f"{label if seen[label] == 1 else 0:0{_DIGITS}x}"

    return "".join(
        text(x, label) for x, labels in zip(members, known, strict=True) for label in labels
    )


def find_swapped(
    texts: Sequence[str], peers: Callable[[int, int], Collection[int]]
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Finds two ranks that make the same exchange at different places of their orders.

    Args:
        texts: `label_text` the order of each rank, in rank order. The orders have equal signatures.
        peers: Place, rank -> the ranks with which that rank makes the exchange at that place. It
            matters only to them that another place holds another exchange.

    Returns:
        Each rank with its place; None if no label has different places on two ranks that exchange
        with one another, apart from ranks that take turns.
    """
    alike: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        alike.setdefault(text, []).append(rank)
    found: dict[str, dict[int, list[int]]] = {}
    empty: set[tuple[int, int]] = set()
    for text, ranks in alike.items():
        for n, start in enumerate(range(0, len(text), _DIGITS)):
            label = text[start : start + _DIGITS]
            place = n // _LABELS
            if label == _EMPTY:
                empty.update((rank, place) for rank in ranks)
            elif label != _NO_LABEL:
                found.setdefault(label, {}).setdefault(place, []).extend(ranks)
    for places in found.values():
        for (here, ranks), (there, others) in combinations(sorted(places.items()), 2):
            for one, other in product(ranks, others):
                in_turns = (one, there) in empty and (other, here) in empty
                if not in_turns and (other in peers(here, one) or other in peers(there, one)):
                    return min(((one, here), (other, there)), ((other, there), (one, here)))
    return None


def describe(traced: Traced, member: Member) -> str:
    """Describes an exchange by its number, the leaves that it comes from and goes to, and the
    user's line.
    """
    x = member.labelled
    arguments, results = traced.paths
    part = f"part {member.part} of " if member.part else ""
    origin = _listed(x.origin.leaves, traced.in_tree, arguments) or "a computed value"
    use = _listed(x.use.leaves, traced.out_tree, results) or "further computation"
    return (
        f"{part}exchange {member.number}: `{x.exchange.op}` of {origin} for {use}, at "
        f"{x.exchange.source}"
    )


def _listed(leaves: Sequence[int], tree: TreeDef, paths: Sequence[str]) -> str:
    names = [
        f"`{path}`" for leaf, path in zip(leaf_hashes(tree), paths, strict=True) if leaf in leaves
    ]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
