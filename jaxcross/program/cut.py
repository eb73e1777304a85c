"""Cuts a flat jaxpr into a program: decides which equation runs in which segment.

Compute and collective segments alternate: compute 0, collective 0, compute 1, collective 1, ...,
tail. The *position* of an equation is an index into that sequence. Even positions compute, odd
positions exchange, and the last position is the tail.

The exchanges are placed first. Exchanges of one level, i.e. with the same number of exchanges
before them, form a group. Adjacent groups are joined if the work between them is cheapest on the
host, and a group is split into several if `cut` asks for more segments. Then every equation that an
exchange needs is placed as early as that exchange needs it. Last come the equations that no
exchange needs, such as metrics and the optimizer: they go where they keep the fewest bytes alive.

All ranks must put the same exchanges into the same segments, even if other shapes differ between
them (e.g. because the last batch is short on one rank). So the decisions about exchanges may only
depend on the order of the equations, on the exchanges, and on shapes that follow from the
exchanges.

Rule numbers refer to docs/explanation/cutting.md, which also lists the alternatives that we
rejected.
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
# Below this size, an exchange's latency costs more than copying its operand into a shared buffer.
BUCKET_BYTES = 1 << 20
# Bytes of gradients per segment under cut="auto". This gives four segments for ResNet-50.
AUTO_BYTES = 25_000_000


def cut(traced: Traced, cut: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """Cuts a traced step into a verified program.

    Does not wait or communicate. The result is the same on every rank.

    Args:
        traced: A step without a `cond` that the host still has to decide (`Traced.undecided` is
            None).
        cut: `"whole"` computes, makes all exchanges, and computes the rest. A number splits the
            exchanges that don't depend on one another into that many collective segments, in the
            order in which their operands become ready. `"auto"` makes one collective segment per 25
            MB of gradients, but at most 8. Ignored if the step calls mpi4jax.
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
    """Chooses the segment of every equation. All ranks get the same segments of exchanges.

    Args:
        graph: A step whose `cond`s are already decided, as far as the host can decide them.
        cut: See `cut`.
        accelerator: Whether compute segments run on another device than the host.
    """
    # mpi4jax calls may differ between ranks, so the ranks couldn't agree on an order for parts of
    # them. Therefore all of them stay together in one unit.
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
    # On a CPU all segments run on the same cores, so a compute segment that's separate from the
    # unit gains nothing.
    if unit and not accelerator:
        groups[0] = with_host_ops(graph, groups[0], position)
        position.update(dict.fromkeys(groups[0].between, 1))
    # Without a cut, recompute only operations that give the same bits anywhere: arithmetic may be
    # contracted with its new reader.
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

    A loop forms a group by itself, because the exchanges and the computation inside it can't be
    separated. Carried exchanges come first: they wait for nothing, whereas other exchanges of their
    level may wait for the whole backward pass.
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
    """Joins adjacent groups if the work between them is cheapest on the host (cut rule 4)."""
    merged: list[_Merged] = []
    for group in groups:
        if not merged or not merged[-1].adds(graph, group, host_work):
            merged.append(_Merged(graph, group))
    return [each.group() for each in merged]


class _Merged:
    """Adjacent groups of exchanges that become one group.

    The fields are extended with each group, so that joining many groups takes linear time.
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
        # Updated before the decision. If this group isn't added, no later group will be, and `self`
        # isn't asked again.
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

        If so, adds to `before` the operations on inputs that the group needs. Any other group might
        wait for computation, which carried exchanges don't.
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
    """Whether equations just pass over memory, and make few bytes per byte that is exchanged.

    The ranks must reach the same decision, so all shapes involved must follow from the exchanges.
    `known` holds the arrays for which they do; this function adds to it.
    """
    if any(graph.eqns[i].primitive.name not in HOST_OPS for i in between):
        return False
    touched = sum(nbytes(v) for i in between for v in graph.eqns[i].outvars)
    return touched <= MOST_TOUCHED * moved and sized_by_exchanges(graph, between, known)


def _exchanged_bytes(graph: Graph, group: Group) -> int:
    return sum(x.nbytes for i in group.exchanges for x in graph.wires[i])


def _split(graph: Graph, group: Group, n_segments: int, depth: Sequence[int]) -> list[Group]:
    """Splits a group by readiness into parts of about equal exchanged bytes (cut rule 2).

    There are about `n_segments` parts in the whole step. An exchange of a later level goes with the
    last exchange that it depends on. Within a part, exchanges are in the order in which they are
    written, which is identical even on ranks whose shapes differ.
    """
    first = group.levels[0]
    if len(first) == 1 or group.carried:
        return [group]
    weight = {i: sum(x.nbytes for x in graph.wires[i]) for i in first}
    # A group's number of parts is proportional to its share of the step's exchanged bytes.
    everything = sum(x.nbytes for found in graph.wires.values() for x in found)
    share = sum(x.nbytes for i in group.exchanges for x in graph.wires[i]) / max(everything, 1)
    count = max(1, min(len(weight), round(n_segments * share)))
    total = sum(weight.values())
    done = 0
    piece: dict[int, int] = {}
    for i in _by_readiness(graph, first, depth):
        # An exchange goes to the part in which its middle byte falls, so that no part is much
        # larger than the others.
        piece[i] = min(int((done + weight[i] / 2) * count / max(total, 1)), count - 1)
        done += weight[i]
    # All others go with the equations they read from. Calls that must stay in order never move to
    # an earlier part than the call before them.
    earliest = latest = min(piece.values())
    for i in sorted((*group.exchanges, *group.between)):
        if i not in piece:
            piece[i] = max((piece[p] for p in graph.makers(i) if p in piece), default=earliest)
        if i in graph.ordered:
            piece[i] = latest = max(piece[i], latest)
    parts = []
    for n in sorted(set(piece.values())):
        levels = [tuple(i for i in level if piece[i] == n) for level in group.levels]
        parts.append(
            Group(
                tuple(tuple(sorted(level)) for level in levels if level),
                frozenset(i for i in group.between if piece[i] == n),
            )
        )
    return parts


def _depths(graph: Graph) -> list[int]:
    """Returns, for each equation, the length of the longest chain of costly equations up to it.

    Cheap host operations don't count.
    """
    depth: list[int] = []
    for i, eqn in enumerate(graph.eqns):
        costly = eqn.primitive.name not in HOST_OPS
        depth.append(costly + max((depth[p] for p in graph.makers(i)), default=0))
    return depth


def _by_readiness(graph: Graph, exchanges: Sequence[int], depth: Sequence[int]) -> list[int]:
    """Sorts exchanges in the order in which their operands become ready.

    Their order in the step says less: operations on each gradient may be written after the whole
    backward pass.
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

    An exchange is at the odd position of its group. An equation that exchanges need is at the even
    position before the first group that needs it, so that each exchange can begin as early as
    possible. If there are carried exchanges, the work that overlaps with them, and what that work
    needs, may be placed earlier.
    """
    position: dict[int, int] = {}
    for g, group in enumerate(groups):
        inside = (*group.exchanges, *group.between)
        needed = graph.ancestors(inside, position) - set(inside)
        position.update(dict.fromkeys(needed, 2 * g))
        position.update(dict.fromkeys(inside, 2 * g + 1))
    if any(group.carried for group in groups):
        # After the last exchange this work would wait for that exchange, because the step's state
        # may be overwritten there. So we place it at the latest before the last group whose
        # exchanges need no other exchange. A part of the work that a later exchange needs isn't
        # left at that exchange's position, where it would wait for the carried exchanges.
        last = max(g for g, group in enumerate(groups) if graph.level[group.exchanges[0]] == 0)
        # This work needs no exchange, so all of it is at even positions, and no equation ends up
        # after an equation that reads its result.
        position |= {
            i: min(position.get(i, 2 * last), 2 * last) for i in sorted(work_before_commit(graph))
        }
    # If there are carried exchanges, only the results of equations placed so far count as memory
    # that an early equation could free. Otherwise, sums of an optimizer's own products would pull
    # its next state in front of the commit, while the old state is still alive.
    holders = position.keys() if any(group.carried for group in groups) else range(len(graph.eqns))
    _place_rest(graph, position, tail=2 * len(groups), holders=frozenset(holders))
    return position


def _place_rest(graph: Graph, position: dict[int, int], tail: int, holders: frozenset[int]) -> None:
    """Places equations that no exchange needs, so that they keep the fewest bytes alive.

    These are metrics, statistics and the optimizer. They must not make an exchange wait for another
    one that it doesn't depend on, unless readers at two positions leave no choice.
    """
    rest = [i for i in range(len(graph.eqns)) if i not in position]
    awaited, behind = _awaited(graph, position, tail)
    earliest: dict[int, int] = {}
    inner, _ = compat.open_jaxpr(graph.traced.jaxpr)
    late = {inner.invars[len(graph.traced.consts) + p] for p in graph.traced.commit_flag_inputs}
    # Forward pass: the earliest position of each equation. This is after the equations it reads
    # from, at a position that already waits for all exchanges that the equation needs.
    for i in rest:
        for p in graph.makers(i):
            awaited[i] |= awaited[p]
        # The commit flag is known only after the last exchange.
        if late and not late.isdisjoint(variables(graph.eqns[i].invars)):
            earliest[i] = tail
            continue
        after = [(earliest[p] if p in earliest else position[p]) for p in graph.makers(i)]
        # An exchange's result is read one position later.
        first = max((a + a % 2 for a in after), default=0)
        earliest[i] = next(at for at in range(first, tail + 1, 2) if not awaited[i] & ~behind[at])
    # Backward pass, so that all readers already have positions. An equation goes early if its
    # results are smaller than the operands that it's the last to read, and late otherwise.
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
        # If a reader would wait for more, take the last position at which none does.
        if behind[position[i]] & ~common:
            choices = (at for at in range(latest, earliest[i] - 1, -2) if not behind[at] & ~common)
            position[i] = next(choices, latest)


def _awaited(graph: Graph, position: dict[int, int], tail: int) -> tuple[list[int], list[int]]:
    """Returns the exchanging positions that each equation and each position wait for, as bits.

    Equations without a position get 0. The tail waits for all exchanges. An empty compute position
    may wait for everything that the exchanges after it wait for.
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
