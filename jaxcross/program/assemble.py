"""Builds the program from a placement: each segment's jaxpr, values, last uses and buckets.

`cut` decides which segment each equation of the step runs in, i.e. its *position*, and this module
turns that decision into a program. The equations at each position are collected into a list, the
*body*. Small exchanges are packed into shared buffers, and equations whose results nobody reads are
dropped.

The last step is to work out which values each segment takes and returns. Positions that end up
empty don't get a segment.

Small exchanges are packed twice, once here and once on the wire (`wire/coalesce`), for different
reasons. Packing here changes the program: exchanges of the same level that are smaller than
`bucket_bytes` are merged into a single exchange of a shared buffer. That way, only one array has to
be copied between the accelerator and the host, the program gets smaller, and ranks can compare
their buffers before the first step.

`coalesce`, by contrast, leaves the program alone and only decides which of a segment's sums (shared
buffers included) go into the same message.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

from jaxcross import _jax_compat as compat
from jaxcross.program import shared_buffers
from jaxcross.program.graph import Graph, Group, Placement, by_place, exchanges_of, variables
from jaxcross.program.ir import Aval, Exchange, Program, Segment
from jaxcross.program.jaxpr_utils import drop_unread
from jaxcross.program.nonfinite import masked_by

if TYPE_CHECKING:
    from jaxcross.program.trace import Traced

# Elementwise reductions, whose operands can share a buffer.
_BUCKETED = frozenset({"psum", "pmax", "pmin"})


def assemble(
    graph: Graph, placement: Placement, bucket_bytes: int, *, pack_on_device: bool = False
) -> Program:
    """Builds the program without verifying it.

    Args:
        graph: The equations of the traced step.
        placement: The position at which each equation runs.
        bucket_bytes: Exchanges smaller than this are packed into flat buffers of up to this size.
        pack_on_device: Whether these buffers are packed and unpacked by compute segments rather
            than collective segments.
    """
    traced = graph.traced
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    results = set(variables(inner.outvars))
    place_of_input = _places(inner.invars)
    place_of_result = _places(variables(inner.outvars))
    owner = {v: placement.position[i] for v, i in graph.maker.items()}
    shared = _SharedBuffers()
    bodies = _bodies(graph, placement, bucket_bytes, shared)
    if pack_on_device:
        carried = {2 * g + 1 for g, group in enumerate(placement.groups) if group.carried}
        _pack_on_device(bodies, shared, owner, traced.decisions, carried)
    # A segment has to return whatever later segments read, so we need the equations at every
    # position before we can build the first segment.
    reads = _prune(bodies, owner, results)
    last_read = {v: at for at, variables_read in enumerate(reads) for v in variables_read}
    values: list[Aval] = []

    def new_value(atom: Any) -> int:
        weak = bool(getattr(atom.aval, "weak_type", False))
        values.append(
            Aval(shape=tuple(atom.aval.shape), dtype=str(atom.aval.dtype), weak_type=weak)
        )
        return len(values) - 1

    ids = {v: new_value(v) for v in inner.invars}
    segments: list[Segment] = []
    literal_ids: list[int] = []
    for at, body in enumerate(bodies):
        # No equation computes the literals that a step returns, so it's up to the tail to return
        # them.
        literals = []
        if at == len(bodies) - 1:
            literals = [a for a in inner.outvars if isinstance(a, compat.Literal)]
        if not body and not literals:
            continue
        made = [v for e in body for v in e.outvars if not isinstance(v, compat.DropVar)]
        # An equation can run in several segments if recomputing its result is cheaper than keeping
        # it in memory. Only the segment that owns the equation returns the result to other
        # segments; the rest recompute it for their own use.
        outs = [
            v
            for v in dict.fromkeys(made)
            if owner.get(v) == at and (last_read.get(v, -1) > at or v in results)
        ]
        ids.update({v: new_value(v) for v in outs})
        literal_ids += [new_value(a) for a in literals]
        collective = at % 2 == 1
        read = reads[at]
        if not collective:
            # XLA reuses donated inputs for results of the same shape, matching them up in order:
            # the n-th result of a given shape is written into the n-th such input. So we list a
            # segment's inputs and results in the same order as the step does, just like `jax.jit`
            # would. That way, when a segment may overwrite the whole state, each array of the state
            # stays in its own buffer.
            read = sorted(read, key=place_of_input)
            outs = sorted(outs, key=place_of_result)
        masked = masked_by(graph, placement.groups[at // 2], body, outs) if collective else []
        # Results that are only needed for checks go last. `Execution` relies on this to split them
        # off from the segment's own results.
        counts = [v for v in made if v in traced.decisions]
        jaxpr = compat.make_jaxpr_of(read, [*outs, *literals, *masked, *counts], body, traced.jaxpr)
        segments.append(
            Segment(
                index=len(segments),
                kind="collective" if collective else "compute",
                inputs=tuple(ids[v] for v in read),
                outputs=(*(ids[v] for v in outs), *literal_ids),
                last_uses=tuple(ids[v] for v in read if last_read[v] == at and v not in results),
                exchanges=_exchanges(body, graph, shared.parts) if collective else (),
                decisions=tuple(traced.decisions[v] for v in counts),
                jaxpr=jaxpr,
            )
        )

    return _program(traced, ids, literal_ids, values, segments)


def _program(
    traced: Traced,
    ids: Mapping[Any, int],
    literal_ids: Sequence[int],
    values: Sequence[Aval],
    segments: Sequence[Segment],
) -> Program:
    inner, _ = compat.open_jaxpr(traced.jaxpr)
    remaining = iter(literal_ids)
    arguments = [ids[v] for v in inner.invars[len(traced.consts) :]]
    read = {v for s in segments for v in s.inputs}
    return Program(
        name=traced.name,
        axes=tuple(traced.axes.items()),
        values=tuple(values),
        inputs=tuple(ids[v] for v in inner.invars),
        outputs=tuple(
            next(remaining) if isinstance(a, compat.Literal) else ids[a] for a in inner.outvars
        ),
        segments=tuple(segments),
        constants=len(traced.consts),
        donated=frozenset(arguments[p] for p in traced.donated),
        commit_flag_inputs=frozenset(arguments[p] for p in traced.commit_flag_inputs) & read,
        traced=traced,
    )


@dataclass(frozen=True, slots=True)
class _SharedBuffers:
    """Flat buffers, each of which holds the operands of several exchanges.

    Attributes:
        parts: The number of operands in each buffer, followed by a hash of their sizes.
        filled: Results of the equations that copy operands into the buffers.
        emptied: Results of the equations that split the buffers after the exchange.
    """

    parts: dict[Any, str] = field(default_factory=dict)
    filled: set[Any] = field(default_factory=set)
    emptied: set[Any] = field(default_factory=set)


def _pack_on_device(
    bodies: list[list[Any]],
    shared: _SharedBuffers,
    owner: dict[Any, int],
    checked: Collection[Any],
    carried: Collection[int],
) -> None:
    """Moves the packing and unpacking of shared buffers into the neighbouring compute bodies.

    That way, only the shared buffer itself has to be transferred between the accelerator and the
    host. If the exchange packed it on the host, every operand would need a transfer of its own,
    which takes a tenth of a millisecond no matter how small the array is
    (`benchmarks/results/gpu_transfers.json`).

    An equation stays in the collective body if

    - the compute position it would move to is empty (the preceding position for packing, the next
      position for unpacking),
    - it packs the result of an equation that stays, or an equation that stays reads what it
      unpacks,
    - it computes one of the `checked` results, which a collective segment has to return itself, or
    - it packs a buffer at one of the `carried` positions, since carried exchanges mustn't wait for
      any computation.
    """
    for at in range(1, len(bodies), 2):
        body = bodies[at]
        made = {v for eqn in body for v in eqn.outvars}
        # First, move packing equations to the compute segment before the exchange. An equation has
        # to stay if it reads the result of an equation that stays, so we go through them in order.
        first = []
        rest = []
        for eqn in body:
            ready = made.isdisjoint(variables(eqn.invars))
            if (
                bodies[at - 1]
                and at not in carried
                and ready
                and shared.filled.issuperset(eqn.outvars)
            ):
                first.append(eqn)
                made.difference_update(eqn.outvars)
            else:
                rest.append(eqn)
        # Then, move unpacking equations to the compute segment after the exchange. Here, an
        # equation has to stay if an equation that stays reads its result, so we go backwards.
        read: set[Any] = set()
        kept = []
        last = []
        for eqn in reversed(rest):
            free = read.isdisjoint(eqn.outvars) and not any(v in checked for v in eqn.outvars)
            if bodies[at + 1] and free and shared.emptied.issuperset(eqn.outvars):
                last.append(eqn)
            else:
                kept.append(eqn)
                read.update(variables(eqn.invars))
        bodies[at - 1] = bodies[at - 1] + first
        bodies[at] = kept[::-1]
        bodies[at + 1] = last[::-1] + bodies[at + 1]
        # Update where each variable is computed. That includes packing and unpacking equations that
        # stay put: they were only just created, so they don't have a position yet.
        for place, eqns in ((at - 1, first), (at, bodies[at]), (at + 1, last)):
            owner.update(
                {v: place for eqn in eqns for v in eqn.outvars if place != at or v not in owner}
            )


def _bodies(
    graph: Graph, placement: Placement, bucket_bytes: int, shared: _SharedBuffers
) -> list[list[Any]]:
    """Returns the equations at each position, and records the shared buffers in `shared`."""
    placed = by_place(placement.position)
    bodies = []
    for at in range(2 * len(placement.groups) + 1):
        if at % 2:
            bodies.append(_collective_body(graph, placement.groups[at // 2], bucket_bytes, shared))
        else:
            members = {*placed.get(at, ()), *placement.recomputed.get(at, ())}
            bodies.append([graph.eqns[i] for i in sorted(members)])
    return bodies


def _prune(
    bodies: list[list[Any]], owner: Mapping[Any, int], results: Collection[Any]
) -> list[list[Any]]:
    """Drops compute equations that no later position needs, and returns what each position reads.

    We walk backwards from the last position, because whether an equation is needed depends on what
    later positions read. Exchanges are always kept, even if this rank ignores the result, because
    the other ranks can't complete them on their own.
    """
    reads: list[list[Any]] = [[] for _ in bodies]
    wanted = set(results)
    for at in reversed(range(len(bodies))):
        if at % 2 == 0:
            passed_on = [
                v for e in bodies[at] for v in e.outvars if v in wanted and owner.get(v) == at
            ]
            bodies[at] = drop_unread(bodies[at], passed_on)
        reads[at] = _reads(bodies[at])
        wanted.update(reads[at])
    return reads


def _reads(body: Sequence[Any]) -> list[Any]:
    """Returns the variables that a body reads but doesn't compute, in order of first use."""
    made: set[Any] = set()
    reads: dict[Any, None] = {}
    for eqn in body:
        for a in eqn.invars:
            if not isinstance(a, compat.Literal) and a not in made:
                reads[a] = None
        made.update(eqn.outvars)
    return list(reads)


def _places(ordered: Sequence[Any]) -> Callable[[Any], int]:
    """Returns a sort key that orders variables as in `ordered`, followed by all others."""
    places = {v: n for n, v in enumerate(ordered)}
    return lambda v: places.get(v, len(places))


def _exchanges(body: Sequence[Any], graph: Graph, parts: Mapping[Any, str]) -> tuple[Exchange, ...]:
    """Returns the exchanges of a segment.

    Ranks compare the parameters of their exchanges before the first step. For a shared buffer,
    these include the number of arrays in it and a hash of their sizes; its total size alone
    wouldn't reveal that ranks had packed different arrays into it.
    """
    found: list[Exchange] = []
    for eqn in body:
        shared = next((parts[a] for a in variables(eqn.invars) if a in parts), None)
        extra = () if shared is None else (("parts", shared),)
        found += [replace(x, params=(*x.params, *extra)) for x in exchanges_of(eqn, graph.traced)]
    return tuple(found)


def _collective_body(
    graph: Graph, group: Group, bucket_bytes: int, shared: _SharedBuffers
) -> list[Any]:
    """Returns a collective segment's equations in order of level, with small exchanges packed."""
    if group.as_written:
        return [graph.eqns[i] for i in sorted((*group.exchanges, *group.between))]
    body: list[Any] = []
    between = deque(sorted((*group.between, *group.before), key=lambda i: (graph.level[i], i)))
    for level in group.levels:
        here = min(graph.level[i] for i in level)
        while between and graph.level[between[0]] <= here:
            body.append(graph.eqns[between.popleft()])
        body += _bucketed(graph, level, bucket_bytes, shared)
    return body + [graph.eqns[i] for i in between]  # exchanges of later segments read these


def _bucketed(
    graph: Graph, level: Sequence[int], bucket_bytes: int, shared: _SharedBuffers
) -> list[Any]:
    """Returns the exchanges of one level, packing small ones of the same kind (cut rule 3)."""
    buckets: dict[tuple[Any, ...], list[list[int]]] = {}
    filled: dict[tuple[Any, ...], int] = {}  # bytes in the latest bucket of each kind
    out: list[tuple[int, list[Any]]] = []
    for i in level:
        eqn = graph.eqns[i]
        found = graph.wires[i]
        small = (
            len(found) == len(eqn.invars) == 1
            and eqn.primitive.name in _BUCKETED
            and found[0].nbytes < bucket_bytes
        )
        small = small and not isinstance(eqn.invars[0], compat.Literal)
        # Nothing is sent along axes of size 1, so packing would only add copies.
        small = small and any(graph.traced.axes[a] > 1 for a in found[0].axes)
        # Under `vmap`, a reduction over ranks may reduce dimensions of its operand as well. A flat
        # buffer doesn't have these dimensions, so such operands can't be packed.
        small = small and "positions" not in dict(found[0].params)
        if not small:
            out.append((i, [eqn]))
            continue
        x = found[0]
        # Only exchanges with the same operation, axes, element type and parameters can share a
        # buffer. We fill the buffers one by one, looking at nothing but the sizes of the exchanged
        # arrays. Since these are identical across ranks, all ranks end up with the same arrays in
        # the same buffers.
        kind = (x.op, x.axes, x.dtype, x.params)
        if kind not in filled or filled[kind] + x.nbytes > bucket_bytes:
            buckets.setdefault(kind, []).append([])
            filled[kind] = 0
        filled[kind] += x.nbytes
        buckets[kind][-1].append(i)
    # A buffer can't be exchanged until all of its operands have been computed, so its exchange
    # takes the place of the last exchange it replaces.
    for several in buckets.values():
        for members in several:
            eqns = [graph.eqns[i] for i in members]
            out.append(
                (max(members), eqns if len(eqns) == 1 else _share_buffer(eqns, graph, shared))
            )
    return [eqn for _, eqns in sorted(out, key=lambda item: item[0]) for eqn in eqns]


def _share_buffer(eqns: Sequence[Any], graph: Graph, buffer: _SharedBuffers) -> list[Any]:
    """Returns equations that concatenate the operands, exchange the buffer and split it again."""
    primitive = eqns[0].primitive
    params = eqns[0].params

    def shared(*arrays: Any) -> list[Any]:
        out = primitive.bind(shared_buffers.packed(arrays), **params)
        return shared_buffers.unpacked(
            out[0] if primitive.multiple_results else out, [x.shape for x in arrays]
        )

    args = [jax.ShapeDtypeStruct(e.invars[0].aval.shape, e.invars[0].aval.dtype) for e in eqns]
    closed = jax.make_jaxpr(shared, axis_env=list(graph.traced.axes.items()))(*args)
    inner, _ = compat.open_jaxpr(closed)
    env = dict(zip(inner.invars, (e.invars[0] for e in eqns), strict=True))
    # Operands and results keep their variables because other equations refer to them. All other
    # variables are replaced with fresh variables.
    env.update(zip(inner.outvars, (e.outvars[0] for e in eqns), strict=True))
    out = []
    new = buffer.filled
    for eqn in inner.eqns:
        for v in eqn.outvars:
            env.setdefault(v, compat.new_var(v.aval))
        invars = [a if isinstance(a, compat.Literal) else env[a] for a in eqn.invars]
        outvars = [env[v] for v in eqn.outvars]
        # Keep the user's source line for error messages.
        out.append(eqn.replace(invars=invars, outvars=outvars, source_info=eqns[0].source_info))
        if eqn.primitive is primitive:
            sizes = ",".join(str(x.size) for x in args)
            buffer.parts[invars[0]] = (
                f"{len(args)} {hashlib.sha256(sizes.encode()).hexdigest()[:8]}"
            )
            new = buffer.emptied
        else:
            new.update(outvars)
    return out
