"""Labels each exchange of a step, so that ranks can check that their exchanges match up.

Exchanges match up by their order alone, so all ranks must make the same exchanges in the same
order. The program's signature isn't enough to check this, because two different exchanges may both
be sums of three floats. If ranks loop over names in different orders, their signatures are equal,
and yet each exchange would receive the values of another one.

To check the order, we give each exchange labels, which are hashes of what it's computed from and
what it's used for. They're the same on all ranks that make the same exchange, whatever the order in
which they traced it. Except for the last kind of label below, they don't depend on shapes either,
because these may differ on one rank.

**Kinds of labels.** The *origin* of an exchange is everything that its operand is computed from,
and its *use* is everything that's computed from its result. An exchange has up to four labels for
its origin and use together, which are hashes of the following:

- leaves: the leaves of the step's arguments that the operand comes from, and the leaves of the
  step's results that the exchange reaches, through layout and element-wise equations only;
- leaves and equations: these leaves, and the other equations at which such paths end, each with the
  leaves around it. This kind of label identifies e.g. exchanges between products, even if ranks add
  up the results in different orders;
- everything: the names of all equations before and after the exchange. This kind tells any two
  exchanges of a step apart;
- parts: the leaves and the other equations, each with the part of the array (a slice, an index) and
  the constant factors on the way. This kind identifies exchanges of parts of one leaf. It's left
  out if another exchange goes to the same parts of the results: for example, if the results are
  added up, ranks may take the parts of a batch in any order.

**Origin alone, use alone.** If a result goes into a list or tuple, its place there may depend on
the order of tracing. Suppose two ranks iterate over names in different orders. Then the first
exchange maps "loss" to `result[0]` on one rank, but "acc" to `result[0]` on the other, so no label
of origin and use together occurs on both ranks. That's why an exchange has the same four labels for
its origin alone, and four for its use alone.

Some exchanges may legitimately be swapped, so we leave out labels that would forbid this: those of
the origin if another exchange goes to the same parts of the results, and those of the use if
another exchange comes from the same parts of the arguments.

**Exceptions.** If a label occurs twice on a rank, it identifies nothing, so we leave it out.

Ranks may also take turns: one exchanges its value while the others exchange zeros, as in `[psum(x
if n == rank else zeros) for n in range(ranks)]`. Therefore zeros have no labels, and neither do
other values that contribute nothing, such as the smallest number in a `pmax`. Two ranks may then
have the same label at two places, provided that each of them exchanges such an empty value at the
other's place.

Finally, in a pipeline or on a ring, a rank sends what its neighbour needs next. So permutations
only have the label of all equations before and after them, and mpi4jax's point-to-point calls have
no label.
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
from jaxcross.errors import quoted
from jaxcross.program.graph import exchanges_of
from jaxcross.program.ir import Exchange, Program
from jaxcross.program.trace import Traced
from jaxcross.program.value_marks import Mark, Scope, hash_of_text, leaf_hashes, marked, mixed

_KINDS = 4
_LABELS = 3 * _KINDS  # of origin and use, of the origin alone, of the use alone
_DIGITS = 16  # hexadecimal digits of a label as text
_NO_LABEL = "0" * _DIGITS
_EMPTY = "f" * _DIGITS  # replaces each label of an empty operand
_POINT_TO_POINT = frozenset({"mpi.send", "mpi.recv", "mpi.sendrecv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """One array that a traced step exchanges.

    Attributes:
        exchange: How it travels, apart from a buffer that it may share.
        origin: Where it comes from.
        use: Where the result goes.
        empty: Whether its operand is made of literal zeros, infinities, or the smallest or greatest
            number of its type. A rank exchanges this to contribute nothing.
        labels: Four labels of origin and use together, then four of the origin alone, then four of
            the use alone. Within each four, the order is: by leaves, by leaves and equations, by
            all equations, and by parts. A label that the exchange doesn't have is 0.
    """

    exchange: Exchange
    origin: Mark
    use: Mark
    empty: bool
    labels: tuple[int, ...]


def labelled(traced: Traced) -> dict[int, list[Labelled]]:
    """Returns the arrays that each equation of a traced step exchanges. Computed once per step.

    Doesn't wait or communicate.
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
    # Exchanges that differ in their operation, axes, type, shape or parameters never have the same
    # label.
    kind = hash_of_text(x.line())
    if x.op == "ppermute":
        return 0, 0, mixed(3, kind, origin.exact, use.exact), *(0,) * (_LABELS - 3)
    pairs = (origin, use), (origin, Mark()), (Mark(), use)
    return tuple(
        label for n, pair in enumerate(pairs) for label in _hashes(_KINDS * n, kind, *pair)
    )


def _hashes(before: int, kind: int, origin: Mark, use: Mark) -> Iterator[int]:
    """Yields one label of each kind; they differ from the labels with a different `before`."""
    yield mixed(before + 1, kind, origin.leaves, use.leaves) if origin.leaves or use.leaves else 0
    yield mixed(before + 2, kind, origin[:2], use[:2])
    yield mixed(before + 3, kind, origin.exact, use.exact)
    yield mixed(before + 4, kind, origin.placed, use.placed)


def _ends(traced: Traced, scope: Scope, i: int) -> Iterator[tuple[Mark, Mark, bool]]:
    """Yields origin, use and emptiness of each exchange of an equation, in `exchanges_of` order."""
    eqn = scope.eqns[i]
    found = traced.wire.recognise(eqn, traced.axes)
    if found is None:
        for inner, _, _ in scope.inside[i]:
            for n in range(len(inner.eqns)):
                yield from _ends(traced, inner, n)
        return
    for n in range(len(found)):  # an mpi4jax call may have no operand, or no result
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
        # Multiplying by a literal 0 contributes nothing, whatever the other operand is.
        if eqn.primitive.name == "mul" and any(
            isinstance(a, compat.Literal) and a.val == 0 for a in eqn.invars
        ):
            return True
        if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
            return False
        atom = eqn.invars[0]
    return atom.val in (0, math.inf, -math.inf, *_extremes(compat.array_type(atom).dtype))


def _extremes(dtype: Any) -> tuple[Any, ...]:
    """Returns the smallest and the greatest number of a float or integer type, else nothing.

    `pmax` and `pmin` ignore these numbers.
    """
    if jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer):
        of = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
        return of.min, of.max
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An array in a program's order of exchanges.

    Attributes:
        number: The number of the exchange, counted from 1.
        part: The array's place in the buffer that it shares with others, counted from 1; 0 if it
            travels alone.
        labelled: What the array is.
    """

    number: int
    part: int
    labelled: Labelled


def order_of(program: Program) -> list[Member]:
    """Returns the arrays that a program exchanges, in the order in which they travel.

    Empty for a parsed program, whose equations are unknown. Doesn't wait or communicate.
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
                # This exchange is of a buffer that several small arrays share. It isn't in the
                # traced step, which contains a separate exchange for each array. But the results of
                # those exchanges still have the same variables, so we look up each array by its
                # result.
                yield from (known[by_result[v]][0] for v in eqn.outvars if v in by_result)


def label_text(order: Sequence[Member]) -> str:
    """Returns the labels that are unique on this rank, as text: 192 bytes for each array."""
    members = [member.labelled for member in order]
    origins = Counter((x.exchange.line(), x.origin.placed) for x in members)
    uses = Counter((x.exchange.line(), x.use.placed) for x in members)
    known = []
    for x in members:
        labels = list(x.labels)
        # If the results of several exchanges are used in the same way, e.g. added up, ranks may
        # make these exchanges in any order. So we drop the labels that tell them apart only by
        # their origin. Likewise, if they come from the same parts of the arguments, we drop the
        # labels that tell them apart only by their use.
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
        texts: The `label_text` of each rank's order, in rank order. The orders have equal
            signatures.
        peers: Maps a place and a rank to the ranks with which that rank makes the exchange at that
            place. Two ranks that aren't peers may have an exchange at different places.

    Returns:
        Each of the two ranks with its place. None if every label has the same place on all ranks
        that exchange with one another, apart from ranks that take turns.
    """
    # Handle ranks with equal texts together, so that each different text is parsed only once.
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
                # Ranks that take turns exchange an empty value at each other's place.
                in_turns = (one, there) in empty and (other, here) in empty
                if not in_turns and (other in peers(here, one) or other in peers(there, one)):
                    return min(((one, here), (other, there)), ((other, there), (one, here)))
    return None


def describe(traced: Traced, member: Member) -> str:
    """Describes an exchange by its number, the leaves it comes from and goes to, and its line."""
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
    names = [path for leaf, path in zip(leaf_hashes(tree), paths, strict=True) if leaf in leaves]
    return quoted(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
