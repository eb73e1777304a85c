"""Places of equations -> segments with their jaxprs, values, last uses and buckets."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxcross import _jax_compat as compat
from jaxcross.program import buffers
from jaxcross.program.graph import Graph, Group, by_place, exchanges_of, variables
from jaxcross.program.ir import Aval, Exchange, Program, Segment
from jaxcross.program.jaxpr_utils import drop_unread
from jaxcross.program.nonfinite import masked_by

_BUCKETED = frozenset({"psum", "pmax", "pmin"})  # elementwise over ranks, so operands may share a buffer


def assemble(
    graph: Graph, groups: Sequence[Group], place: Mapping[int, int], copies: Mapping[int, set[int]], bucket_bytes: int
) -> Program:
    """Builds the program. Unverified."""
    traced = graph.traced
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    tail = 2 * len(groups)
    bodies: list[list[Any]] = []  # equations of each place
    parts: dict[Any, str] = {}  # flat buffer -> what lies in it
    placed = by_place(place)
    for here in range(tail + 1):
        members = sorted({*placed.get(here, ()), *copies.get(here, ())})
        if here % 2:
            bodies.append(_collective_body(graph, groups[here // 2], bucket_bytes, parts))
        else:
            bodies.append([graph.eqns[i] for i in members])

    results = {a for a in inner.outvars if not isinstance(a, compat.Literal)}
    owner = {v: place[i] for v, i in graph.maker.items()}
    reads = [_reads(body) for body in bodies]
    wanted = set(results)
    for here in range(tail, -1, -1):  # what a place must hand on, and what of its equations is still needed for that
        body = drop_unread(
            bodies[here], [v for e in bodies[here] for v in e.outvars if v in wanted and owner.get(v) == here]
        )
        bodies[here] = bodies[here] if here % 2 else body
        reads[here] = _reads(bodies[here])
        wanted |= set(reads[here])

    ids: dict[Any, int] = {}
    values: list[Aval] = []

    def new_value(aval: Any) -> int:
        dtype = aval.dtype
        values.append(
            Aval(shape=tuple(aval.shape), dtype=str(dtype), weak_type=bool(getattr(aval, "weak_type", False)))
        )
        return len(values) - 1

    for var in inner.invars:
        ids[var] = new_value(var.aval)
    last_read = {v: here for here in range(tail + 1) for v in reads[here]}
    segments: list[Segment] = []
    literal_results = [a for a in inner.outvars if isinstance(a, compat.Literal)]
    literal_ids: list[int] = []
    for here, body in enumerate(bodies):
        made = [v for e in body for v in e.outvars if not isinstance(v, compat.DropVar)]
        outs = [
            v for v in dict.fromkeys(made) if owner.get(v) == here and (last_read.get(v, -1) > here or v in results)
        ]
        literals = literal_results if here == tail else []
        if not body and not literals:
            continue
        for v in outs:
            ids[v] = new_value(v.aval)
        literal_ids += [new_value(a.aval) for a in literals]
        dies = [v for v in reads[here] if last_read[v] == here and v not in results]
        masked = masked_by(graph, groups[here // 2], body, outs) if here % 2 else []
        counts = [v for v in made if v in traced.decisions]
        jaxpr = compat.make_jaxpr_of(reads[here], [*outs, *literals, *masked, *counts], body, traced.jaxpr)
        segments.append(Segment(
            index=len(segments), kind="collective" if here % 2 else "compute",
            inputs=tuple(ids[v] for v in reads[here]),
            outputs=(*(ids[v] for v in outs), *literal_ids) if literals else tuple(ids[v] for v in outs),
            dies=tuple(ids[v] for v in dies),
            exchanges=_exchanges(body, graph, parts) if here % 2 else (),
            decisions=tuple(traced.decisions[v] for v in counts), jaxpr=jaxpr,
        ))  # fmt: skip

    remaining = iter(literal_ids)
    outputs = tuple(next(remaining) if isinstance(a, compat.Literal) else ids[a] for a in inner.outvars)
    constants = len(traced.consts)
    donated = frozenset(ids[inner.invars[constants + p]] for p in traced.donated)
    read = {v for s in segments for v in s.inputs}
    late = frozenset(v for p in traced.late if (v := ids[inner.invars[constants + p]]) in read)
    return Program(
        name=traced.name, axes=tuple(traced.axes.items()), values=tuple(values),
        inputs=tuple(ids[v] for v in inner.invars), outputs=outputs, segments=tuple(segments), constants=constants,
        donated=donated, late=late, traced=traced,
    )  # fmt: skip


def _reads(body: Sequence[Any]) -> list[Any]:
    """Variables that a body reads and does not make, in order of first use."""
    made: set[Any] = set()
    reads: dict[Any, None] = {}
    for eqn in body:
        for a in eqn.invars:
            if not isinstance(a, compat.Literal) and a not in made:
                reads[a] = None
        made.update(eqn.outvars)
    return list(reads)


def _exchanges(body: Sequence[Any], graph: Graph, parts: Mapping[Any, str]) -> tuple[Exchange, ...]:
    """What a segment puts on the wire. Ranks compare what lies in shared buffers, too, not only how large they are."""
    found: list[Exchange] = []
    for eqn in body:
        shared = next((parts[a] for a in variables(eqn.invars) if a in parts), None)
        extra = () if shared is None else (("parts", shared),)
        found += [replace(x, params=(*x.params, *extra)) for x in exchanges_of(eqn, graph.traced)]
    return tuple(found)


def _collective_body(graph: Graph, group: Group, bucket_bytes: int, parts: dict[Any, str]) -> list[Any]:
    """Equations of one collective segment: level by level, small exchanges of one kind in shared buffers.

    Of each buffer adds to `parts` how many operands it holds, and a hash of their sizes.
    """
    if group.as_written:
        return [graph.eqns[i] for i in sorted((*group.exchanges, *group.between))]
    body: list[Any] = []
    between = deque(sorted(group.between, key=lambda i: (graph.level[i], i)))
    for level in group.levels:
        here = min(graph.level[i] for i in level)
        while between and graph.level[between[0]] <= here:
            body.append(graph.eqns[between.popleft()])
        body += _bucketed(graph, level, bucket_bytes, parts)
    return body + [graph.eqns[i] for i in between]  # what exchanges of a later piece read


def _bucketed(graph: Graph, level: Sequence[int], bucket_bytes: int, parts: dict[Any, str]) -> list[Any]:
    """The exchanges of one level; large ones as they are, small ones of one kind through flat buffers (cut rule 3)."""
    buckets: dict[tuple[Any, ...], list[list[int]]] = {}
    filled: dict[tuple[Any, ...], int] = {}  # bytes of each kind's latest bucket
    out: list[tuple[int, list[Any]]] = []
    for i in level:
        eqn, found = graph.eqns[i], graph.wires[i]
        small = (
            len(found) == len(eqn.invars) == 1 and eqn.primitive.name in _BUCKETED and found[0].nbytes < bucket_bytes
        )
        small = small and not isinstance(eqn.invars[0], compat.Literal)
        small = small and any(graph.traced.axes[a] > 1 for a in found[0].axes)
        # A reduction that also names array dimensions (`vmap` inside the step) has none left in a flat buffer.
        small = small and "positions" not in dict(found[0].params)
        if not small:
            out.append((i, [eqn]))
            continue
        x = found[0]
        kind = (x.op, x.axes, x.dtype, x.params)
        if kind not in filled or filled[kind] + x.nbytes > bucket_bytes:
            buckets.setdefault(kind, []).append([])
            filled[kind] = 0
        filled[kind] += x.nbytes
        buckets[kind][-1].append(i)
    for several in buckets.values():
        for members in several:
            eqns = [graph.eqns[i] for i in members]
            out.append((max(members), eqns if len(eqns) == 1 else _share_buffer(eqns, graph, parts)))
    return [eqn for _, eqns in sorted(out, key=lambda item: item[0]) for eqn in eqns]


def _share_buffer(eqns: Sequence[Any], graph: Graph, parts: dict[Any, str]) -> list[Any]:
    """Concatenate, exchange once, split again."""
    primitive, params = eqns[0].primitive, eqns[0].params

    def shared(*arrays: Any) -> list[Any]:
        out = primitive.bind(buffers.packed(arrays), **params)
        return buffers.unpacked(out[0] if primitive.multiple_results else out, [x.shape for x in arrays])

    args = [jax.ShapeDtypeStruct(e.invars[0].aval.shape, e.invars[0].aval.dtype) for e in eqns]
    closed = jax.make_jaxpr(shared, axis_env=list(graph.traced.axes.items()))(*args)
    inner, _ = compat.open_jaxpr(closed)
    env = dict(zip(inner.invars, (e.invars[0] for e in eqns), strict=True))
    # A part that is a whole operand keeps its name; everything in between gets a fresh one.
    env.update(zip(inner.outvars, (e.outvars[0] for e in eqns), strict=True))
    out = []
    for eqn in inner.eqns:
        for v in eqn.outvars:
            env.setdefault(v, compat.new_var(v.aval))
        invars = [a if isinstance(a, compat.Literal) else env[a] for a in eqn.invars]
        outvars = [env[v] for v in eqn.outvars]
        out.append(eqn.replace(invars=invars, outvars=outvars, source_info=eqns[0].source_info))  # the user's line
        if eqn.primitive is primitive:
            sizes = ",".join(str(x.size) for x in args)
            parts[invars[0]] = f"{len(args)} {hashlib.sha256(sizes.encode()).hexdigest()[:8]}"
    return out
