"""Places of equations -> segments with their jaxprs, values, last uses and buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcross import _jax_compat as compat
from jaxcross.program.flatten import drop_unread
from jaxcross.program.graph import Graph, Group, exchanges_of
from jaxcross.program.segments import Aval, Exchange, Program, Segment

_BUCKETED = frozenset({"psum", "pmax", "pmin"})  # elementwise over ranks, so operands may share a buffer


def assemble(
    graph: Graph, groups: Sequence[Group], place: Mapping[int, int], copies: Mapping[int, set[int]], bucket_bytes: int
) -> Program:
    """Builds the program. Unverified."""
    traced = graph.traced
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    tail = 2 * len(groups)
    bodies: list[list[Any]] = []  # equations of each place
    for here in range(tail + 1):
        members = sorted({i for i, p in place.items() if p == here} | copies.get(here, set()))
        if here % 2:
            bodies.append(_collective_body(graph, groups[here // 2], bucket_bytes))
        else:
            bodies.append([graph.eqns[i] for i in members])

    results = [a for a in inner.outvars if not isinstance(a, compat.Literal)]
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
        jaxpr = compat.make_jaxpr_of(reads[here], [*outs, *literals], body, traced.jaxpr)
        segments.append(Segment(
            index=len(segments), kind="collective" if here % 2 else "compute",
            inputs=tuple(ids[v] for v in reads[here]),
            outputs=(*(ids[v] for v in outs), *literal_ids) if literals else tuple(ids[v] for v in outs),
            dies=tuple(ids[v] for v in dies),
            exchanges=_exchanges(body, graph) if here % 2 else (), jaxpr=jaxpr,
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


def _exchanges(body: Sequence[Any], graph: Graph) -> tuple[Exchange, ...]:
    return tuple(x for eqn in body for x in exchanges_of(eqn, graph.traced))


def _collective_body(graph: Graph, group: Group, bucket_bytes: int) -> list[Any]:
    """Equations of one collective segment: level by level, small exchanges of one kind in shared buffers."""
    body: list[Any] = []
    for level in group.levels:
        here = min(graph.level[i] for i in level)
        body += [graph.eqns[i] for i in sorted(group.between) if graph.level[i] == here]
        body += _bucketed(graph, level, bucket_bytes)
    return body


def _bucketed(graph: Graph, level: Sequence[int], bucket_bytes: int) -> list[Any]:
    """The exchanges of one level; large ones as they are, small ones of one kind through flat buffers (cut rule 3)."""
    buckets: dict[tuple[Any, ...], list[list[int]]] = {}
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
        open_buckets = buckets.setdefault((x.op, x.axes, x.dtype, x.params), [[]])
        if sum(graph.wires[j][0].nbytes for j in open_buckets[-1]) + x.nbytes > bucket_bytes:
            open_buckets.append([])
        open_buckets[-1].append(i)
    for kind in buckets.values():
        for members in kind:
            eqns = [graph.eqns[i] for i in members]
            out.append((max(members), eqns if len(eqns) == 1 else _share_buffer(eqns, graph)))
    return [eqn for _, eqns in sorted(out, key=lambda item: item[0]) for eqn in eqns]


def _share_buffer(eqns: Sequence[Any], graph: Graph) -> list[Any]:
    """Concatenate, exchange once, split again."""
    primitive, params = eqns[0].primitive, eqns[0].params

    def shared(*arrays: Any) -> list[Any]:
        flat = jnp.concatenate([x.reshape(-1) for x in arrays])
        out = primitive.bind(flat, **params)
        flat = out[0] if primitive.multiple_results else out
        parts, start = [], 0
        for x in arrays:
            parts.append(jax.lax.slice_in_dim(flat, start, start + x.size).reshape(x.shape))
            start += x.size
        return parts

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
    return out
