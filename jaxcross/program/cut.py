"""A flat jaxpr -> a program: which equation runs in which segment.

Segments alternate: compute 0, collective 0, compute 1, collective 1, ..., tail. An equation's *place* is an index into
that sequence: even places compute, odd places exchange, the last one is the tail. The rules are numbered as in
docs/design.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxcross import _jax_compat as compat
from jaxcross.program.assemble import assemble
from jaxcross.program.cheap import LIGHT, recompute
from jaxcross.program.graph import Graph, Group, nbytes, variables
from jaxcross.program.segments import Program
from jaxcross.program.trace import Traced

Cut = Literal["whole", "auto"] | int
BUCKET_BYTES = 1 << 20  # below, an exchange's latency costs more than copying its operand into a shared buffer
AUTO_BYTES = 25_000_000  # bytes of gradients per segment under cut="auto"; four segments for ResNet-50


def cut(traced: Traced, *, cut: Cut = "whole", bucket_bytes: int = BUCKET_BYTES) -> Program:
    """Cuts a traced step into a verified program. Does not wait, does not communicate; the same on every rank.

    Args:
        traced: A step whose `cond`s the host has decided (`Traced.undecided` is None).
        cut: `"whole"`: before, exchanges, after. A number: also split the exchanges that do not depend on one another
            into that many collective segments, in the order in which their operands become ready. `"auto"`: one
            segment per 25 MB of gradients, 8 at most.
        bucket_bytes: Exchanges smaller than this share flat buffers up to this size.

    Raises:
        ValueError: `cut` is none of these.
    """
    graph = Graph(traced)
    pieces = _pieces(cut, graph)
    groups = [part for group in _merge_light(graph, _levels(graph)) for part in _split(graph, group, pieces)]
    place = _places(graph, groups)
    copies = recompute(graph, place, exact=pieces == 1)
    return assemble(graph, groups, place, copies, bucket_bytes).verify()


def _pieces(cut: Cut, graph: Graph) -> int:
    total = sum(x.nbytes for found in graph.wires.values() for x in found)
    if cut == "whole":
        return 1
    if cut == "auto":
        return min(max(round(total / AUTO_BYTES), 1), 8)
    if isinstance(cut, bool) or not isinstance(cut, int) or cut < 1:
        raise ValueError(f'cut must be "whole", "auto" or a positive number of segments, not {cut!r}')
    return cut


def _levels(graph: Graph) -> list[Group]:
    """Exchanges that do not depend on one another, in the order in which they can be made. Loops stand alone."""
    by_level: dict[int, list[int]] = {}
    for i in graph.wires:
        by_level.setdefault(graph.level[i], []).append(i)
    groups = []
    for _, members in sorted(by_level.items()):
        plain = tuple(i for i in members if i not in graph.opaque)
        groups += [Group((plain,))] if plain else []
        groups += [Group(((i,),)) for i in members if i in graph.opaque]
    return groups


def _merge_light(graph: Graph, groups: list[Group]) -> list[Group]:
    """Joins neighbouring groups where only light work stands between them (cut rule 4)."""
    merged: list[Group] = []
    for group in groups:
        last = merged[-1] if merged else None
        if last is None or any(i in graph.opaque for i in (*last.exchanges, *group.exchanges)):
            merged.append(group)
            continue
        before = dict.fromkeys(last.exchanges)
        first = min(graph.level[i] for i in last.exchanges)
        needed = graph.ancestors(group.exchanges, before)
        between = {i for i in needed if graph.level[i] > first}
        moved = sum(x.nbytes for i in (*last.exchanges, *group.exchanges) for x in graph.wires[i])
        touched = sum(nbytes(v) for i in between for v in graph.eqns[i].outvars)
        light = all(graph.eqns[i].primitive.name in LIGHT and i not in graph.wires for i in between)
        if light and touched <= 8 * moved:
            merged[-1] = Group((*last.levels, *group.levels), last.between | between)
        else:
            merged.append(group)
    return merged


def _split(graph: Graph, group: Group, pieces: int) -> list[Group]:
    """Splits a group's exchanges by readiness into about `pieces` groups of equal bytes (cut rule 2)."""
    if pieces == 1 or len(group.levels) > 1 or len(group.exchanges) == 1:
        return [group]
    weight = {i: sum(x.nbytes for x in graph.wires[i]) for i in group.exchanges}
    everything = sum(x.nbytes for found in graph.wires.values() for x in found)
    total = sum(weight.values())
    count = max(1, min(len(weight), round(pieces * total / max(everything, 1))))
    ready = _by_readiness(graph, group.exchanges)
    parts: list[list[int]] = [[] for _ in range(count)]
    done = 0
    for i in ready:
        # An exchange belongs where its middle byte falls, so that no part is much larger than another.
        parts[min(int((done + weight[i] / 2) * count / max(total, 1)), count - 1)].append(i)
        done += weight[i]
    return [Group((tuple(part),)) for part in parts if part]


def _by_readiness(graph: Graph, exchanges: Sequence[int]) -> list[int]:
    """In the order in which their operands are computed: by how many equations stand one after another before each.

    Not by their place in the step, where what is done to each gradient may stand behind the whole backward pass.
    """
    depth: list[int] = []
    for i in range(len(graph.eqns)):
        depth.append(1 + max((depth[p] for p in graph.makers(i)), default=0))
    when: dict[int, int] = {}
    latest = 0
    for i in sorted(exchanges):
        when[i] = depth[i]
        if i in graph.ordered:  # none of these before one that is written earlier
            when[i] = latest = max(when[i], latest)
    return sorted(exchanges, key=lambda i: (when[i], i))


def _places(graph: Graph, groups: Sequence[Group]) -> dict[int, int]:
    """The place of every equation."""
    place: dict[int, int] = {}
    for g, group in enumerate(groups):
        inside = (*group.exchanges, *group.between)
        needed = graph.ancestors(inside, place) - set(inside)
        place.update(dict.fromkeys(needed, 2 * g))
        place.update(dict.fromkeys(inside, 2 * g + 1))
    _place_rest(graph, place, tail=2 * len(groups))
    return place


def _place_rest(graph: Graph, place: dict[int, int], tail: int) -> None:
    """Places what no exchange needs (metrics, statistics, the optimizer) where it keeps fewest bytes alive.

    Never where an exchange would come to wait for another that it does not depend on.
    """
    rest = [i for i in range(len(graph.eqns)) if i not in place]
    awaited, behind = _awaited(graph, place, tail)
    earliest: dict[int, int] = {}
    inner, _ = compat.open_jaxpr(graph.traced.jaxpr)
    late = {inner.invars[len(graph.traced.consts) + p] for p in graph.traced.late}
    for i in rest:
        for p in graph.makers(i):
            awaited[i] |= awaited[p]
        if late and not late.isdisjoint(variables(graph.eqns[i].invars)):
            earliest[i] = tail
            continue
        after = [(earliest[p] if p in earliest else place[p]) for p in graph.makers(i)]
        first = max((a + a % 2 for a in after), default=0)  # what an exchange makes is read one place later
        earliest[i] = next(at for at in range(first, tail + 1, 2) if not awaited[i] & ~behind[at])
    for i in reversed(rest):
        eqn = graph.eqns[i]
        readers = [place[r] for v in eqn.outvars for r in graph.readers.get(v, ())]
        latest = min(readers, default=tail)
        made = sum(nbytes(v) for v in eqn.outvars)
        held = sum(
            nbytes(v) for v in variables(eqn.invars)
            if v in graph.maker and all(place.get(r, earliest.get(r, 0)) < latest for r in graph.readers[v] if r != i)
        )  # fmt: skip
        place[i] = earliest[i] if made < held else latest


def _awaited(graph: Graph, place: dict[int, int], tail: int) -> tuple[list[int], list[int]]:
    """The exchanging places that must have been before each equation's result, and before each place, as bits.

    Of equations that are in no place yet nothing is known: 0. The tail waits for all.
    """
    behind = [0] * tail + [-1]
    for i in sorted(place, key=lambda i: place[i]):
        for p in graph.makers(i):
            if place[p] < place[i]:
                behind[place[i]] |= behind[place[p]] | (place[p] % 2) << place[p]
    awaited = [0] * len(graph.eqns)
    for i, at in place.items():
        awaited[i] = behind[at] | (at % 2) << at
    return awaited, behind
