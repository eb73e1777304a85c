"""Cuts a flat jaxpr into a program: decides which equation runs in which segment.

A program alternates between compute segments and collective segments, which make the exchanges:
compute 0, collective 0, compute 1, collective 1, and so on, up to a last compute segment, the tail.
The *position* of an equation is the index, in this sequence, of the segment in which it runs. So
computation is at even positions, and exchanges are at odd ones.

**Problem.** XLA runs a compute segment as a whole. With a single cut, no gradient can be sent
before the whole backward pass has run. With more cuts, the first gradients travel while the last
ones are still being computed, but XLA can't fuse operations across a cut, and values that later
segments read have to stay in memory. So the number of cuts is up to the user (`cut=`), and this
module decides which equation goes where.

**Order of decisions.** We place the exchanges first. Exchanges of one level, i.e. with the same
number of exchanges before them, form a group. We join adjacent groups if the work between them is
cheapest on the host, and split a group into several if `cut` asks for more segments.

Then we place everything that an exchange needs, as early as that exchange needs it. The remaining
equations, such as metrics and the optimizer, come last, and are placed where they keep the fewest
bytes alive.

**All ranks must agree.** Every rank has to put the same exchanges into the same segments, even if
other shapes differ between ranks, e.g. because the last batch is short on one of them. So whatever
we decide about exchanges may depend only on the order of the equations, on the exchanges, and on
shapes that follow from the exchanges.

**Alternatives.** A gradient's place in the jaxpr would be a simpler measure of when it's ready, but
a misleading one (`_by_readiness`). Similarly, if all freed memory counted when we place the last
equations, an optimizer's own sums would pull its next state in front of the commit (`_positions`).
docs/explanation/cutting.md explains the cut rules by the numbers that are used here, and lists the
ideas that we rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from jaxcross import _jax_compat as compat
from jaxcross._arguments import is_whole
from jaxcross.errors import CutError
from jaxcross.program.assemble import assemble
from jaxcross.program.carried import (
    carried_exchanges,
    host_ops_before,
    may_repeat,
    work_before_commit,
)
from jaxcross.program.graph import Graph, Group, Placement, nbytes, variables
from jaxcross.program.hand_over import on_accelerator
from jaxcross.program.host_work import HostWork
from jaxcross.program.ir import Program
from jaxcross.program.mpi4jax_unit import calls_mpi4jax, unit_of, with_host_ops
from jaxcross.program.op_cost import (
    HOST_OPS,
    MOST_TOUCHED,
    exchanged_arrays,
    recompute,
    sized_by_exchanges,
)
from jaxcross.program.verify import verify

if TYPE_CHECKING:
    from jaxcross.program.trace import Traced

Cut = Literal["whole", "auto"] | int
# Below this size, copying an operand into a shared buffer costs less than the latency of a separate
# message.
BUCKET_BYTES = 1 << 20
# Bytes of gradients per segment under cut="auto". This gives four segments for ResNet-50.
AUTO_BYTES = 25_000_000


def cut(traced: Traced, cut: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """Cuts a traced step into a verified program.

    Doesn't wait or communicate. The exchanges are cut in the same way on every rank.

    Args:
        traced: A step without a `cond` that the host still has to decide (`Traced.undecided` is
            None).
        cut: `"whole"` makes all exchanges together, between the computation that they need and the
            rest. A number splits the exchanges that don't depend on one another into that many
            collective segments, in the order in which their operands become ready. `"auto"` makes
            one collective segment per 25 MB of gradients, but at most 8. Ignored if the step calls
            mpi4jax, because all of its exchanges then form one segment.
        bucket_bytes: Exchanges smaller than this share flat buffers of up to this size.

    Raises:
        CutError: The host must decide a `cond` first.
        ValueError: `cut` is none of these, or `bucket_bytes` is not a number of bytes.
    """
    if traced.undecided is not None:
        raise CutError(
            "the host decides a conditional at each step: cut one of its "
            f"{traced.undecided.branches} branches, as in `step.trace(...).decide(0).cut()`"
        )
    n_segments = checked_cut(cut)
    limit = checked_bytes(bucket_bytes)
    graph = Graph(traced)
    accelerator = on_accelerator()
    placement = place_equations(graph, n_segments, accelerator=accelerator)
    return verify(assemble(graph, placement, limit, pack_on_device=accelerator))


def place_equations(graph: Graph, cut: Cut, *, accelerator: bool) -> Placement:
    """Chooses the position of every equation. The exchanges' positions are the same on all ranks.

    Args:
        graph: A step. Each `cond` that the host can decide has been decided already.
        cut: See `cut`.
        accelerator: Whether compute segments run on a device other than the host.
    """
    # Calls of mpi4jax may differ between ranks, e.g. one rank sends what another one receives. If
    # the calls were in several segments, the ranks would have no common order in which to run these
    # segments. So all calls stay together in a single segment, the unit.
    unit = calls_mpi4jax(graph)
    n_segments = 1 if unit else _n_segments(cut, graph)
    host_work = HostWork(graph) if accelerator and not unit else None
    groups = [unit_of(graph)] if unit else _merge_over_host_ops(graph, _levels(graph), host_work)
    if n_segments > 1:
        depth = _depths(graph)
        groups = [part for group in groups for part in _split(graph, group, n_segments, depth)]
    if host_work is not None:
        groups = [
            replace(group, before=group.before | host_work.repeated(group.between))
            for group in groups
        ]
    position = _positions(graph, groups)
    # On a CPU, all segments run on the same cores, so there's no advantage in computing outside of
    # the unit.
    if unit and not accelerator:
        groups[0] = with_host_ops(graph, groups[0], position)
        position.update(dict.fromkeys(groups[0].between, 1))
    # If there's only one collective segment, we only recompute operations whose result is bitwise
    # identical wherever they're compiled. This excludes arithmetic: XLA may contract an arithmetic
    # operation with the one that reads its result, which rounds differently.
    recomputed = recompute(graph, position, exact=n_segments == 1)
    return Placement(groups=groups, position=position, recomputed=recomputed)


def checked_cut(value: Any) -> Cut:
    """Returns `value` as a cut, whole numbers as `int`; raises `ValueError` if it isn't a cut."""
    if isinstance(value, str) and value in ("whole", "auto"):
        return value
    if not is_whole(value) or value < 1:
        raise ValueError(
            f'cut must be "whole", "auto" or a positive number of exchange segments, not {value!r}'
        )
    return int(value)


def checked_bytes(value: Any) -> int:
    """Returns `value` as `bucket_bytes`; raises `ValueError` if it isn't a number of bytes."""
    if not is_whole(value) or value < 0:
        raise ValueError(
            f"`bucket_bytes` is `{value!r}`: it counts bytes and must be a whole number from 0 on; "
            "at 0 no exchanges share buffers."
        )
    return int(value)


def _n_segments(cut: Cut, graph: Graph) -> int:
    total = sum(x.nbytes for found in graph.wires.values() for x in found)
    if cut == "whole":
        return 1
    if cut == "auto":
        return min(max(round(total / AUTO_BYTES), 1), 8)
    return cut


def _levels(graph: Graph) -> list[Group]:
    """Groups exchanges that don't depend on one another, in an order in which they can be made.

    The level of an exchange says how many other exchanges have to be made before it, one after
    another. The exchanges of one level form a group. Only a loop forms a group by itself, because
    we can't separate the exchanges inside it from its computation.

    Carried exchanges, which need only the step's inputs, come first. They can start right away,
    whereas other exchanges of the same level may have to wait for the whole backward pass.
    """
    carried = carried_exchanges(graph)
    by_level: dict[int, list[int]] = {}
    for i in graph.wires:
        by_level.setdefault(graph.level[i], []).append(i)
    groups = (
        [Group((carried,), carried=True, before=host_ops_before(graph, carried))] if carried else []
    )
    for _, members in sorted(by_level.items()):
        plain = tuple(i for i in members if i not in graph.opaque and i not in carried)
        groups += [Group((plain,))] if plain else []
        groups += [Group(((i,),)) for i in members if i in graph.opaque]
    return groups


def _merge_over_host_ops(
    graph: Graph, groups: list[Group], host_work: HostWork | None
) -> list[Group]:
    """Joins adjacent groups if the work between them is cheapest on the host (cut rule 4).

    Otherwise, this work becomes a compute segment between two collective segments.
    """
    merged: list[_Merged] = []
    for group in groups:
        if not merged or not merged[-1].adds(graph, group, host_work):
            merged.append(_Merged(graph, group))
    return [each.group() for each in merged]


class _Merged:
    """Adjacent groups of exchanges that become one group.

    Adding a group only extends the fields, so that joining many groups takes linear time.
    """

    __slots__ = (
        "before",
        "between",
        "carried",
        "inside",
        "known",
        "least",
        "levels",
        "loop",
        "moved",
    )

    def __init__(self, graph: Graph, group: Group) -> None:
        self.levels = list(group.levels)
        self.between: set[int] = set()
        self.before = set(group.before)
        self.carried = group.carried
        self.inside = dict.fromkeys(group.exchanges)
        self.known = exchanged_arrays(graph, group.exchanges)
        self.least = min(graph.level[i] for i in group.exchanges)
        self.loop = any(i in graph.opaque for i in group.exchanges)
        self.moved = _exchanged_bytes(graph, group)

    def adds(self, graph: Graph, group: Group, host_work: HostWork | None) -> bool:
        """Tries to add the next group; returns whether it was added.

        It's added if the work between it and the groups so far is cheapest on the host.
        """
        if self.loop or any(i in graph.opaque for i in group.exchanges):
            return False
        if self.carried and not self._stays_carried(graph, group):
            return False
        between = graph.ancestors(group.exchanges, self.inside, above=self.least)
        if any(i in graph.wires for i in between):
            return False
        # We update these fields before we know whether the group will be added. That does no harm:
        # if it isn't added, the group starts a new object of this class, and nothing is added to
        # this one any more.
        self.known |= exchanged_arrays(graph, group.exchanges)
        self.moved += _exchanged_bytes(graph, group)
        cheap = _is_cheap(graph, between, self.known, self.moved)
        if not cheap and host_work is not None:
            cheap = host_work.costs_less(
                between, group.exchanges, inside=self.inside, known=self.known, moved=self.moved
            )
        if not cheap:
            return False
        self.levels += group.levels
        self.between |= between
        self.inside.update(dict.fromkeys((*group.exchanges, *between)))
        return True

    def group(self) -> Group:
        """Returns the joined groups as one group."""
        return Group(
            tuple(self.levels),
            frozenset(self.between),
            carried=self.carried,
            before=frozenset(self.before),
        )

    def _stays_carried(self, graph: Graph, group: Group) -> bool:
        """Whether the next group needs only these exchanges and the step's inputs.

        Carried exchanges don't wait for any computation of the step, and that must remain true if
        another group joins them. The next group may need some operations on the step's inputs as
        well. If the host may run these operations, they're added to `before`, i.e. to what the host
        computes ahead of the exchanges.
        """
        needed = {
            i for i in graph.ancestors(group.exchanges, self.inside) if graph.level[i] == 0
        } - self.before
        allowed = may_repeat(
            graph, needed, group.exchanges, {*self.inside, *self.before, *needed, *group.exchanges}
        )
        self.before |= needed if allowed else set()
        return allowed


def _is_cheap(graph: Graph, between: Collection[int], known: set[Any], moved: int) -> bool:
    """Whether equations only pass over memory and make few bytes per exchanged byte.

    All ranks must decide the same, so the decision is based on shapes that follow from the
    exchanged arrays, which have the same shapes everywhere. The `known` set contains the arrays for
    which this has been shown, and this function adds all others that it finds.
    """
    if any(graph.eqns[i].primitive.name not in HOST_OPS for i in between):
        return False
    touched = sum(nbytes(v) for i in between for v in graph.eqns[i].outvars)
    return touched <= MOST_TOUCHED * moved and sized_by_exchanges(graph, between, known)


def _exchanged_bytes(graph: Graph, group: Group) -> int:
    return sum(x.nbytes for i in group.exchanges for x in graph.wires[i])


def _split(graph: Graph, group: Group, n_segments: int, depth: Sequence[int]) -> list[Group]:
    """Splits a group by readiness into parts of about equal exchanged bytes (cut rule 2).

    The whole step is split into about `n_segments` parts, of which this group gets its share. An
    exchange that depends on other exchanges goes into the same part as the last of these. Within a
    part, the exchanges are in the order in which the step makes them, because that order is the
    same on all ranks, even if their shapes differ.
    """
    first = group.levels[0]
    if len(first) == 1 or group.carried:
        return [group]
    weight = {i: sum(x.nbytes for x in graph.wires[i]) for i in first}
    # The group's number of parts is proportional to its share of the step's exchanged bytes.
    everything = sum(x.nbytes for found in graph.wires.values() for x in found)
    share = sum(x.nbytes for i in group.exchanges for x in graph.wires[i]) / max(everything, 1)
    count = max(1, min(len(weight), round(n_segments * share)))
    total = sum(weight.values())
    done = 0
    part_of: dict[int, int] = {}
    for i in _by_readiness(graph, first, depth):
        # To get parts of about the same size, imagine all exchanged bytes in a row, sorted by
        # readiness, and divide this row into equal parts. An exchange goes into the part that
        # contains its middle byte, so no part is much larger than the others.
        part_of[i] = min(int((done + weight[i] / 2) * count / max(total, 1)), count - 1)
        done += weight[i]
    # So far, only the exchanges of the first level have been assigned to a part. Each of the
    # others, and any work between exchanges, goes into the last part from which it reads a result.
    # If calls must stay in order, none of them goes into an earlier part than the call before it.
    earliest = latest = min(part_of.values())
    for i in sorted((*group.exchanges, *group.between)):
        if i not in part_of:
            part_of[i] = max(
                (part_of[p] for p in graph.makers(i) if p in part_of), default=earliest
            )
        if i in graph.ordered:
            part_of[i] = latest = max(part_of[i], latest)
    parts = []
    for n in sorted(set(part_of.values())):
        levels = [tuple(i for i in level if part_of[i] == n) for level in group.levels]
        parts.append(
            Group(
                tuple(tuple(sorted(level)) for level in levels if level),
                frozenset(i for i in group.between if part_of[i] == n),
            )
        )
    return parts


def _depths(graph: Graph) -> list[int]:
    """Returns the length of the longest chain of costly equations that ends at each equation.

    Operations that are cheap enough for the host don't count.
    """
    depth: list[int] = []
    for i, eqn in enumerate(graph.eqns):
        costly = eqn.primitive.name not in HOST_OPS
        depth.append(costly + max((depth[p] for p in graph.makers(i)), default=0))
    return depth


def _by_readiness(graph: Graph, exchanges: Sequence[int], depth: Sequence[int]) -> list[int]:
    """Sorts exchanges in the order in which their operands become ready.

    We estimate when an operand becomes ready by the longest chain of costly equations that leads to
    it (`depth`). The order in which the step is written would be misleading. For example, if the
    step casts all gradients after the backward pass, they would all seem to become ready at the
    end.
    """
    when: dict[int, int] = {}
    latest = 0
    for i in sorted(exchanges):
        when[i] = depth[i]
        if i in graph.ordered:
            when[i] = latest = max(when[i], latest)
    return sorted(exchanges, key=lambda i: (when[i], i))


def _positions(graph: Graph, groups: Sequence[Group]) -> dict[int, int]:
    """Returns the position of every equation.

    Compute segments are at even positions, and collective segments at odd ones. An exchange gets
    the position of its group's collective segment. Everything that it needs goes into the compute
    segment before the first group that needs it, so that each exchange can start as early as
    possible.

    If there are carried exchanges, the work that overlaps with them may be placed even earlier,
    together with everything it needs.
    """
    position: dict[int, int] = {}
    for g, group in enumerate(groups):
        inside = (*group.exchanges, *group.between)
        needed = graph.ancestors(inside, position) - set(inside)
        position.update(dict.fromkeys(needed, 2 * g))
        position.update(dict.fromkeys(inside, 2 * g + 1))
    if any(group.carried for group in groups):
        # The costly work is supposed to overlap with the carried exchanges. If we placed it after
        # the last exchange, it would have to wait for that exchange, because the step's state may
        # be overwritten there. So we place it before the last group whose exchanges don't depend on
        # another exchange, or earlier.
        #
        # If a later exchange needs some of this work, that part is moved there as well. At the
        # later exchange's position, it would wait for the carried exchanges.
        last = max(g for g, group in enumerate(groups) if graph.level[group.exchanges[0]] == 0)
        # Moving this work to an earlier compute segment is safe. The work doesn't depend on any
        # exchange, so all of it is in compute segments, and everything that it needs is moved as
        # well. So no equation ends up after an equation that reads its result.
        position |= {
            i: min(position.get(i, 2 * last), 2 * last) for i in sorted(work_before_commit(graph))
        }
    # An equation may be placed early if this frees memory (`_place_rest`). With carried exchanges,
    # we only count the memory of results whose equations already have a position. Otherwise, an
    # optimizer's sums of its own products would seem to free memory, and would pull the optimizer's
    # next state in front of the commit, where the old state is still alive.
    holders = position.keys() if any(group.carried for group in groups) else range(len(graph.eqns))
    _place_rest(graph, position, tail=2 * len(groups), holders=frozenset(holders))
    return position


def _place_rest(graph: Graph, position: dict[int, int], tail: int, holders: frozenset[int]) -> None:
    """Places the equations that no exchange needs, so that they keep the fewest bytes alive.

    Equations that no exchange needs, e.g. metrics and the optimizer, mustn't delay an exchange.
    Suppose such an equation reads the result of exchange 1, and we placed it in a segment that
    exchange 2 needs. Then exchange 2 would have to wait for exchange 1, although it doesn't depend
    on it.

    The only exception is an equation whose results are read at two positions, if that leaves no
    other choice.
    """
    rest = [i for i in range(len(graph.eqns)) if i not in position]
    awaited, behind = _awaited(graph, position, tail)
    earliest: dict[int, int] = {}
    inner, _ = compat.open_jaxpr(graph.traced.jaxpr)
    late = {inner.invars[len(graph.traced.consts) + p] for p in graph.traced.commit_flag_inputs}
    # Forward pass: find the earliest position at which each equation can run. It must come after
    # all equations whose results it reads. In addition, this position must already wait for all the
    # exchanges that the equation needs. Otherwise, the equation would make everything else at that
    # position wait for them, too.
    for i in rest:
        for p in graph.makers(i):
            awaited[i] |= awaited[p]
        # The commit flag is only known after the last exchange, so whatever reads it is in the
        # tail.
        if late and not late.isdisjoint(variables(graph.eqns[i].invars)):
            earliest[i] = tail
            continue
        after = [(earliest[p] if p in earliest else position[p]) for p in graph.makers(i)]
        # The result of an exchange can be read from the next position on.
        first = max((a + a % 2 for a in after), default=0)
        earliest[i] = next(at for at in range(first, tail + 1, 2) if not awaited[i] & ~behind[at])
    # Backward pass: choose a position for each equation. We go from last to first, so everything
    # that reads the equation's results already has a position. An equation that frees more memory
    # than it allocates, because it's the last to read its operands, goes as early as possible. Any
    # other equation goes as late as possible.
    for i in reversed(rest):
        eqn = graph.eqns[i]
        readers = [position[r] for v in eqn.outvars for r in graph.readers.get(v, ())]
        readers += [position[n] for n in graph.followers.get(i, ())]
        latest = min(readers, default=tail)
        made = sum(nbytes(v) for v in eqn.outvars)
        held = sum(
            nbytes(v)
            for v in variables(eqn.invars)
            if graph.maker.get(v) in holders
            and all(
                position.get(r, earliest.get(r, 0)) < latest for r in graph.readers[v] if r != i
            )
        )
        position[i] = earliest[i] if made < held else latest
        common = -1  # exchanges that all its readers wait for anyway, as bits
        for at in readers:
            common &= behind[at]
        # Equations that read the result may then have to wait for exchanges that they don't need.
        # If so, take the last position at which that isn't the case.
        if behind[position[i]] & ~common:
            choices = (at for at in range(latest, earliest[i] - 1, -2) if not behind[at] & ~common)
            position[i] = next(choices, latest)


def _awaited(graph: Graph, position: dict[int, int], tail: int) -> tuple[list[int], list[int]]:
    """Returns the exchanges' positions that each equation and each position waits for, as bits.

    Both results are lists of integers. If bit n is set in one of them, the equation or position has
    to wait for the exchanges at position n. The tail, i.e. the last segment, waits for all
    exchanges. An equation that doesn't have a position yet gets 0, so it waits for nothing.

    A compute position that's still empty may wait for whatever the exchanges right after it wait
    for, because that delays nothing.
    """
    behind = [0] * tail + [-1]
    for i in sorted(position, key=lambda i: position[i]):
        for p in graph.makers(i):
            if position[p] < position[i]:
                behind[position[i]] |= behind[position[p]] | (position[p] % 2) << position[p]
    filled = set(position.values())
    for at in range(0, tail, 2):
        if at not in filled:
            behind[at] = behind[at + 1]
    awaited = [0] * len(graph.eqns)
    for i, at in position.items():
        awaited[i] = behind[at] | (at % 2) << at
    return awaited, behind
