"""Builds the program from a placement: each segment's jaxpr, values, last uses and buckets.

The module `cut` decides in which segment of the step each equation runs, i.e. at which *position*.
This module builds the program from that decision. It collects the equations of each position into a
list, the *body*, packs small exchanges into shared buffers, and drops equations whose results
nobody reads.

Finally, it works out which values each segment takes and returns. A position without equations gets
no segment.

Small exchanges are packed twice, here and on the wire (`wire/coalesce`), and we need both. The
packing in this module changes the program: exchanges of the same level that are smaller than
`bucket_bytes` become a single exchange of a shared buffer. As a result, only one array travels
between the accelerator and the host, the program is smaller, and the ranks can compare the buffers
before the first step.

In contrast, `coalesce` leaves the program as it is. It only decides which sums of a segment, shared
buffers included, travel in the same message.
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

# These reductions work element by element, so several operands can share one buffer.
_BUCKETED = frozenset({"psum", "pmax", "pmin"})


def assemble(
    graph: Graph, placement: Placement, bucket_bytes: int, *, pack_on_device: bool = False
) -> Program:
    """Builds the program without verifying it.

    Args:
        graph: The equations of the traced step.
        placement: Which position each equation runs at.
        bucket_bytes: Exchanges smaller than this share flat buffers of up to this size.
        pack_on_device: Whether compute segments fill and empty these buffers. Otherwise, collective
            segments do it.
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
    # A segment has to return whatever later segments read. To know what that is, we need the
    # equations of all positions before we can build the first segment.
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
        # If the step returns a literal, no equation computes that result, so the tail has to return
        # it.
        literals = []
        if at == len(bodies) - 1:
            literals = [a for a in inner.outvars if isinstance(a, compat.Literal)]
        if not body and not literals:
            continue
        made = [v for e in body for v in e.outvars if not isinstance(v, compat.DropVar)]
        # An equation may run in several segments, because recomputing its result can be cheaper
        # than keeping it in memory. Only the segment in which the equation was placed returns the
        # result to other segments. A segment that recomputes the result uses it internally.
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
            # XLA writes results into donated inputs of the same shape: the n-th result of a shape
            # goes into the n-th of these inputs. So we list a segment's inputs and results in the
            # order in which the step itself has them, like `jax.jit` would. If a segment may
            # overwrite the whole state, every array of the state then keeps its own buffer.
            read = sorted(read, key=place_of_input)
            outs = sorted(outs, key=place_of_result)
        masked = masked_by(graph, placement.groups[at // 2], body, outs) if collective else []
        # The results that are only needed for checks come last. `Execution` relies on this order
        # when it separates them from the segment's own results.
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
    """Flat buffers that carry the operands of several exchanges each.

    Attributes:
        parts: For each buffer, how many operands it holds, followed by a hash of their sizes.
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
    """Moves the equations that fill and empty shared buffers into the neighbouring compute bodies.

    Several small exchanges may share one flat buffer. If the compute segments before and after the
    exchange pack and unpack this buffer, only one array per buffer is transferred between the
    accelerator and the host. Otherwise, each operand is transferred by itself, and a transfer costs
    a tenth of a millisecond, however small the array is (`benchmarks/results/gpu_transfers.json`).

    An equation stays in the collective body if

    - the neighbouring compute position is empty (the one before it if it fills a buffer, the one
      after it if it empties one),
    - it fills a buffer from the result of an equation that stays, or it empties a buffer and an
      equation that stays reads its result,
    - its result is one of `checked`, because a collective segment has to return these, or
    - it fills a buffer at one of the `carried` positions, because carried exchanges mustn't wait
      for any computation.
    """
    for at in range(1, len(bodies), 2):
        body = bodies[at]
        made = {v for eqn in body for v in eqn.outvars}
        # First, move equations that fill shared buffers to the compute segment before the exchange.
        # An equation can't move if it reads the result of one that stays. Whether it can depends on
        # the equations before it, so we go forwards.
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
        # Then, move equations that empty shared buffers to the compute segment after the exchange.
        # An equation can't move if one that stays reads its result. Whether it can depends on the
        # equations after it, so we go backwards.
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
        # Record at which position each variable is computed now. For equations that have moved,
        # that's the new position. Equations that fill or empty a shared buffer have only just been
        # created, so even those that stay didn't have a position before.
        for place, eqns in ((at - 1, first), (at, bodies[at]), (at + 1, last)):
            owner.update(
                {v: place for eqn in eqns for v in eqn.outvars if place != at or v not in owner}
            )


def _bodies(
    graph: Graph, placement: Placement, bucket_bytes: int, shared: _SharedBuffers
) -> list[list[Any]]:
    """Returns the equations of each position, and adds the shared buffers to `shared`."""
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

    We go through the positions of the step from last to first, because an equation is needed only
    if a later position reads its result. Exchanges are always kept, even if this rank doesn't use
    their results, because the other ranks can't complete an exchange without this rank.
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
    """Returns a sort key: a variable's place in `ordered`; all other variables sort after these."""
    places = {v: n for n, v in enumerate(ordered)}
    return lambda v: places.get(v, len(places))


def _exchanges(body: Sequence[Any], graph: Graph, parts: Mapping[Any, str]) -> tuple[Exchange, ...]:
    """Returns the exchanges of a segment.

    Before the first step, the ranks compare the parameters of their exchanges. If an exchange
    carries a shared buffer, its parameters therefore include the number of arrays in the buffer and
    a hash of their sizes. If ranks only compared the buffer's total size, they wouldn't notice that
    they packed different arrays into it.
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
    """Returns the equations of a collective segment by level, with small exchanges packed."""
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
        # Along axes of size 1, nothing is sent, so packing would only add copies.
        small = small and any(graph.traced.axes[a] > 1 for a in found[0].axes)
        # Under `vmap`, a reduction over ranks may also reduce dimensions of its operand. Such an
        # operand can't share a buffer, because a flat buffer doesn't have these dimensions.
        small = small and "positions" not in dict(found[0].params)
        if not small:
            out.append((i, [eqn]))
            continue
        x = found[0]
        # Exchanges can share a buffer only if they have the same operation, axes, element type and
        # parameters. We fill one buffer after another, based on nothing but the sizes of the
        # exchanged arrays. These are identical across ranks, so all ranks put the same arrays into
        # the same buffers.
        kind = (x.op, x.axes, x.dtype, x.params)
        if kind not in filled or filled[kind] + x.nbytes > bucket_bytes:
            buckets.setdefault(kind, []).append([])
            filled[kind] = 0
        filled[kind] += x.nbytes
        buckets[kind][-1].append(i)
    # A buffer can only be exchanged once all operands in it have been computed. So its exchange
    # takes the place of the last one among the exchanges that it replaces.
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
    # Operands and results keep their variables, because other equations refer to them. All other
    # variables are replaced by new ones.
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
