"""Labels the exchanges of a step, so that ranks can check whether theirs match up.

Exchanges are matched up by order alone, so all ranks must make the same exchanges in the same
order. Comparing the signatures of programs isn't enough to check this, because different exchanges
can look the same, e.g. if both are sums of three floats. If ranks loop over names in different
orders, their signatures agree, and yet they would mix up each other's values.

So we give each exchange a set of labels, which are hashes of what it's computed from and what it's
used for. All ranks come up with the same labels for the same exchange, regardless of the order in
which they traced it. Except for the last kind below, the labels don't depend on shapes either,
because these may differ on one rank.

**Kinds of labels.** An exchange's *origin* is everything that its operand is computed from, and its
*use* is everything that's computed from its result. There are up to four labels for origin and use
together, which are hashes of the following:

- leaves: the leaves of the step's arguments that the operand comes from, and the leaves of the
  step's results that the exchange reaches, following only layout and elementwise equations;
- leaves and equations: these leaves, plus any other equations at which such paths end, each with
  the leaves around it. This identifies exchanges between products, for example, even if ranks add
  up the results in different orders;
- everything: the names of all equations before and after the exchange, which tell any two exchanges
  of a step apart;
- parts: the leaves and the other equations, each with the part of the array (a slice, an index) and
  the constant factors along the way. This identifies exchanges of different parts of the same leaf.
  It's omitted if another exchange goes to the same parts of the results: for example, when results
  are added up, ranks are free to take the parts of a batch in any order.

**Origin alone, use alone.** If a result goes into a list or tuple, its index may depend on the
order of tracing. When two ranks iterate over names in different orders, the first exchange might
turn "loss" into `result[0]` on one rank, but "acc" into `result[0]` on the other. Then no label of
origin and use together occurs on both ranks. That's why there are four more labels for the origin
alone, and another four for the use alone.

Sometimes it's legitimate to swap two exchanges, so we omit labels that would forbid it: those of
the origin if another exchange goes to the same parts of the results, and those of the use if
another exchange comes from the same parts of the arguments.

**Exceptions.** A label that occurs twice on a rank doesn't identify anything, so we drop it.

Ranks may also take turns, where one rank exchanges its value while the others exchange zeros, as in
`[psum(x if n == rank else zeros) for n in range(ranks)]`. So zeros don't get any labels, and
neither do other values that contribute nothing, such as the smallest number in a `pmax`. Two ranks
may then have the same label at different places, as long as each of them exchanges such an empty
value at the other's place.

Finally, in a pipeline or ring, each rank sends whatever its neighbour needs next. So permutations
only get the label of all equations before and after them, and mpi4jax's point-to-point calls have
no labels at all.
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
    """An array that a traced step exchanges.

    Attributes:
        exchange: How it travels, not counting any buffer that it may share.
        origin: Where it comes from.
        use: Where the result goes.
        empty: Whether the operand consists of literal zeros, infinities, or the smallest or
            greatest number of its type, which is what a rank exchanges to contribute nothing.
        labels: Four labels of origin and use together, followed by four of the origin and four of
            the use alone. Each set of four is in the order of kinds: leaves, leaves and equations,
            everything, parts. Missing labels are 0.
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
    # Exchanges with different operations, axes, types, shapes or parameters never share a label.
    kind = hash_of_text(x.line())
    if x.op == "ppermute":
        return 0, 0, mixed(3, kind, origin.exact, use.exact), *(0,) * (_LABELS - 3)
    pairs = (origin, use), (origin, Mark()), (Mark(), use)
    return tuple(
        label for n, pair in enumerate(pairs) for label in _hashes(_KINDS * n, kind, *pair)
    )


def _hashes(before: int, kind: int, origin: Mark, use: Mark) -> Iterator[int]:
    """Yields a label of each kind, which never coincides with the labels for another `before`."""
    yield mixed(before + 1, kind, origin.leaves, use.leaves) if origin.leaves or use.leaves else 0
    yield mixed(before + 2, kind, origin[:2], use[:2])
    yield mixed(before + 3, kind, origin.exact, use.exact)
    yield mixed(before + 4, kind, origin.placed, use.placed)


def _ends(traced: Traced, scope: Scope, i: int) -> Iterator[tuple[Mark, Mark, bool]]:
    """Yields each exchange's origin, use and emptiness, in the same order as `exchanges_of`."""
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
        # A product with a literal 0 contributes nothing, no matter what the other operand is.
        if eqn.primitive.name == "mul" and any(
            isinstance(a, compat.Literal) and a.val == 0 for a in eqn.invars
        ):
            return True
        if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
            return False
        atom = eqn.invars[0]
    return atom.val in (0, math.inf, -math.inf, *_extremes(compat.array_type(atom).dtype))


def _extremes(dtype: Any) -> tuple[Any, ...]:
    """Returns the smallest and greatest number of a float or integer type, otherwise nothing.

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
                # This exchange sends a buffer that several small arrays share. The traced step
                # doesn't contain it, but has a separate exchange for each array. Since the results
                # of those exchanges are still the same variables, we can look up each array by its
                # result.
                yield from (known[by_result[v]][0] for v in eqn.outvars if v in by_result)


def label_text(order: Sequence[Member]) -> str:
    """Returns the labels that are unique on this rank, as text of 192 bytes per array."""
    members = [member.labelled for member in order]
    origins = Counter((x.exchange.line(), x.origin.placed) for x in members)
    uses = Counter((x.exchange.line(), x.use.placed) for x in members)
    known = []
    for x in members:
        labels = list(x.labels)
        # If several exchanges are used in the same way, e.g. their results are added up, ranks may
        # make them in any order. So we drop labels that only distinguish them by their origin.
        # Likewise, if several exchanges come from the same parts of the arguments, we drop labels
        # that only distinguish them by their use.
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
    """Finds two ranks that make the same exchange at different places in their order.

    Args:
        texts: The `label_text` of each rank's order, in rank order. All orders have equal
            signatures.
        peers: Maps a place and a rank to the ranks that it makes the exchange at that place with.
            Ranks that aren't peers may make the same exchange at different places.

    Returns:
        Each of the two ranks with its place. None if every label is at the same place on all ranks
        that exchange with one another, apart from ranks that take turns.
        that exchange with one another, apart from ranks that take turns.
    """
    # Group ranks by their text, so that each distinct text is only parsed once.
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
