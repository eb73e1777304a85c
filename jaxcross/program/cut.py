"""Cuts a flat jaxpr into a program: decides which equation runs in which segment.

A program alternates between compute segments and collective segments, which contain the exchanges:
compute 0, collective 0, compute 1, collective 1, and so on, ending with one last compute segment,
the tail. An equation's *position* is its place in this sequence: compute segments are at even
positions, and collective segments, which may include some of the host's work as well as exchanges,
are at odd positions. A position that ends up empty doesn't get a segment, so positions differ from
the numbers of the segments in the finished program.

**Problem.** A compute segment runs as a single XLA executable, so with just one cut, no gradient
can be sent until the entire backward pass has finished. With more cuts, the first gradients are in
flight while the last are still being computed. But XLA can't fuse operations across a cut, and
anything that later segments read has to stay in memory. How many cuts to make is therefore up to
the user (`cut=`), and this module decides which equation goes where.

**Order of decisions.** Exchanges are placed first. An exchange's level is the length of the longest
chain of exchanges leading up to it (see `Graph.level` for an exception), and exchanges of the same
level form a group. Adjacent groups are merged if the work between them is best done by the host,
and a group is split up if `cut` asks for more segments.

Next comes everything that the exchanges need, each equation right before the first exchange that
needs it. Whatever is left, such as metrics and the optimizer, goes where it keeps the fewest bytes
alive.

**All ranks must agree.** Every rank has to put the same exchanges into the same segments, even if
other shapes differ, say because one rank's last batch is short. So decisions about exchanges may
only depend on the step's operations and how they depend on one another, on the order and the shapes
of the exchanges, and on other shapes that follow from these.

**Alternatives.** A gradient's place in the jaxpr would be a simpler way to tell when it's ready,
but it's misleading (`_by_readiness`). When placing the last equations, it would also be simpler to
count all the memory that an equation frees. But with carried exchanges, that would often move the
optimizer ahead of the commit, where the old state has to stay in memory next to the new one
(`_positions`). For the cut rules, which are referred to here by number, and for other ideas that we
rejected, see docs/explanation/cutting.md.
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
# Below this size, copying an operand into a shared buffer is cheaper than the latency of a separate
# message.
BUCKET_BYTES = 1 << 20
# Exchanged bytes per collective segment under cut="auto". ResNet-50, for example, gets four.
AUTO_BYTES = 25_000_000


def cut(traced: Traced, cut: Cut = "whole", *, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """Cuts a traced step into a verified program.

    Doesn't wait or communicate. Exchanges are cut identically on every rank.

    Args:
        traced: A step with no `cond` left for the host to decide (`Traced.undecided` is None).
        cut: `"whole"` performs all exchanges that don't depend on one another together, after the
            computation they need and before the rest (except that a loop gets its own collective
            segment, and carried exchanges come first). A number spreads them over about that many
            collective segments, in the order in which their operands become ready. `"auto"` uses
            about one collective segment per 25 MB that the step exchanges, up to a maximum of 8.
            Ignored if the step calls mpi4jax, in which case all of its exchanges end up in a single
            segment.
        bucket_bytes: Exchanges smaller than this are packed into flat buffers of up to this size.

    Raises:
        CutError: The host must decide a `cond` first.
        ValueError: `cut` is none of these, or `bucket_bytes` is not a number of bytes.
    """
    if traced.undecided is not None:
        raise CutError(
            f"`{traced.name}` contains a conditional that the host decides in each step, so it "
            f"cannot be cut before one of the conditional's {traced.undecided.branches} branches "
            "is chosen. Choose one, as in `step.trace(...).decide(0).cut()`."
        )
    n_segments = checked_cut(cut)
    limit = checked_bytes(bucket_bytes)
    graph = Graph(traced)
    accelerator = on_accelerator()
    placement = place_equations(graph, n_segments, accelerator=accelerator)
    return verify(assemble(graph, placement, limit, pack_on_device=accelerator))


def place_equations(graph: Graph, cut: Cut, *, accelerator: bool) -> Placement:
    """Chooses each equation's position. Exchanges get the same position on all ranks.

    Args:
        graph: A step in which the host has already decided every `cond` that it can.
        cut: See `cut`.
        accelerator: Whether compute segments run on a device other than the host.
    """
    # Ranks may make different mpi4jax calls, e.g. one rank sends and another receives. If these
    # calls were spread over several segments, there'd be no common order in which all ranks could
    # run the segments. So we keep all calls together in a single segment, the unit.
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
    # On a CPU, all segments share the same cores, so there's nothing to be gained by computing
    # outside of the unit.
    if unit and not accelerator:
        groups[0] = with_host_ops(graph, groups[0], position)
        position.update(dict.fromkeys(groups[0].between, 1))
    # To save memory, cheap results aren't kept for later segments, which recompute them instead.
    # If the step is only cut where its exchanges require it (`n_segments == 1`), only do this for
    # operations whose results are bitwise identical no matter where they're compiled. That rules
    # out arithmetic, which XLA may contract with whatever reads the result, changing the rounding.
    recomputed = recompute(graph, position, exact=n_segments == 1)
    return Placement(groups=groups, position=position, recomputed=recomputed)


def checked_cut(value: Any) -> Cut:
    """Returns `value` as a cut (numbers as `int`); raises `ValueError` if it isn't a cut."""
    if isinstance(value, str) and value in ("whole", "auto"):
        return value
    if not is_whole(value) or value < 1:
        raise ValueError(
            '`cut` must be "whole", "auto" or a positive number of exchange segments, got '
            f"{value!r}."
        )
    return int(value)


def checked_bytes(value: Any) -> int:
    """Returns `value` as `bucket_bytes`; raises `ValueError` if it isn't a number of bytes."""
    if not is_whole(value) or value < 0:
        raise ValueError(
            "`bucket_bytes` must be a whole number of bytes, or 0 if exchanges should not share "
            f"buffers, got `{value!r}`."
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

    An exchange's level is the length of the longest chain of exchanges that it depends on, or more
    if its result is better computed late (`Graph.level`). Exchanges of the same level form a group,
    except that each loop gets its own group because we can't separate the exchanges inside it from
    its computation.

    Carried exchanges, which need nothing but the step's inputs, come first: they can start right
    away, whereas other exchanges of their level may have to wait for the whole backward pass.
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
    """Merges adjacent groups if the work between them is best done by the host (cut rule 4).

    The merged group becomes a single collective segment, which includes that work. If two groups
    aren't merged, the work between them goes into a compute segment.
    """
    merged: list[_Merged] = []
    for group in groups:
        if not merged or not merged[-1].adds(graph, group, host_work):
            merged.append(_Merged(graph, group))
    return [each.group() for each in merged]


class _Merged:
    """Adjacent groups of exchanges that are being merged.

    Adding a group only extends the existing fields, so merging many groups takes linear time.
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
        """Tries to add the next group, and returns whether that worked.

        This succeeds if the work between it and the groups so far is best done by the host.
        """
        if self.loop or any(i in graph.opaque for i in group.exchanges):
            return False
        if self.carried and not self._stays_carried(graph, group):
            return False
        between = graph.ancestors(group.exchanges, self.inside, above=self.least)
        if any(i in graph.wires for i in between):
            return False
        # It's fine to update these fields before we know whether the group can be added: if it
        # can't, it starts a new `_Merged`, and nothing more will be added to this object.
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
        return Group(
            tuple(self.levels),
            frozenset(self.between),
            carried=self.carried,
            before=frozenset(self.before),
        )

    def _stays_carried(self, graph: Graph, group: Group) -> bool:
        """Whether the next group needs nothing but these exchanges and the step's inputs.

        Carried exchanges don't wait for any of the step's computation, and that has to remain true
        when another group joins them. If the next group needs some operations on the step's inputs
        that the host is allowed to run, these are added to `before`, i.e. to what the host computes
        ahead of the exchanges.
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
    """Whether equations are simple passes over memory that write few bytes per exchanged byte.

    All ranks must come to the same decision, so we only look at shapes that follow from those of
    the exchanged arrays, which are identical everywhere. Arrays for which this has been established
    are in `known`, and any others that we find are added to it.
    """
    if any(graph.eqns[i].primitive.name not in HOST_OPS for i in between):
        return False
    touched = sum(nbytes(v) for i in between for v in graph.eqns[i].outvars)
    return touched <= MOST_TOUCHED * moved and sized_by_exchanges(graph, between, known)


def _exchanged_bytes(graph: Graph, group: Group) -> int:
    return sum(x.nbytes for i in group.exchanges for x in graph.wires[i])


def _split(graph: Graph, group: Group, n_segments: int, depth: Sequence[int]) -> list[Group]:
    """Splits a group by readiness into parts that exchange about equally many bytes (cut rule 2).

    The whole step is split into about `n_segments` parts, and this group gets its share of them. An
    exchange that depends on other exchanges goes into the same part as the last of them. Within a
    part, exchanges stay in the order in which the step makes them, which is the same on all ranks
    even if their shapes differ.
    """
    first = group.levels[0]
    if len(first) == 1 or group.carried:
        return [group]
    weight = {i: sum(x.nbytes for x in graph.wires[i]) for i in first}
    # The number of parts is proportional to this group's share of the bytes that the step
    # exchanges.
    everything = sum(x.nbytes for found in graph.wires.values() for x in found)
    share = sum(x.nbytes for i in group.exchanges for x in graph.wires[i]) / max(everything, 1)
    count = max(1, min(len(weight), round(n_segments * share)))
    total = sum(weight.values())
    done = 0
    part_of: dict[int, int] = {}
    for i in _by_readiness(graph, first, depth):
        # Imagine lining up all exchanged bytes by readiness and chopping the line into equal parts.
        # Each exchange goes into the part that contains its middle byte, which keeps any part from
        # getting much larger than the others.
        part_of[i] = min(int((done + weight[i] / 2) * count / max(total, 1)), count - 1)
        done += weight[i]
    # So far, only the exchanges of the first level have been assigned to a part. Each of the
    # others, and any work between exchanges, goes into the last part that it reads a result from.
    # Calls that must stay in order can't go into an earlier part than the call before them.
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
    """Returns the length of the longest chain of costly equations leading up to each equation.

    Doesn't count operations that are cheap enough for the host.
    """
    depth: list[int] = []
    for i, eqn in enumerate(graph.eqns):
        costly = eqn.primitive.name not in HOST_OPS
        depth.append(costly + max((depth[p] for p in graph.makers(i)), default=0))
    return depth


def _by_readiness(graph: Graph, exchanges: Sequence[int], depth: Sequence[int]) -> list[int]:
    """Sorts exchanges by when their operands become ready.

    As an estimate, we use the longest chain of costly equations leading up to the operand
    (`depth`). Going by the order in which the step is written would be misleading: if it casts all
    gradients after the backward pass, for example, they'd all seem to become ready at the very end.
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

    Exchanges go into the collective segment of their group, at an odd position. Everything they
    need goes into the compute segment right before the first group that needs it, at an even
    position. That way, each exchange can start as early as possible.

    If there are carried exchanges, the work that's meant to overlap with them may be placed even
    earlier, along with everything it needs.
    """
    position: dict[int, int] = {}
    for g, group in enumerate(groups):
        inside = (*group.exchanges, *group.between)
        needed = graph.ancestors(inside, position) - set(inside)
        position.update(dict.fromkeys(needed, 2 * g))
        position.update(dict.fromkeys(inside, 2 * g + 1))
    if any(group.carried for group in groups):
        # The costly work should overlap with the carried exchanges. If we placed it after the last
        # exchange, where the step's state may be overwritten, it would have to wait for that
        # exchange. So we place it no later than right before the last group whose exchanges don't
        # depend on any other exchange.
        #
        # That includes work needed by a later exchange. If we left it right before that exchange,
        # it would have to wait for the carried exchanges.
        last = max(g for g, group in enumerate(groups) if graph.level[group.exchanges[0]] == 0)
        # It's safe to move this work to an earlier compute segment. None of it depends on an
        # exchange, so it's all in compute segments, and everything it needs moves along with it.
        # That way, no equation can end up after an equation that reads its result.
        position |= {
            i: min(position.get(i, 2 * last), 2 * last) for i in sorted(work_before_commit(graph))
        }
    # Equations that free memory may be placed early (`_place_rest`). With carried exchanges, we
    # only count memory held by results whose equations already have a position. If we counted the
    # optimizer's own temporaries as well, an addition of two of them would seem to free memory.
    # That would move the computation of the next state ahead of the commit, where the old state has
    # to stay in memory as well.
    holders = position.keys() if any(group.carried for group in groups) else range(len(graph.eqns))
    _place_rest(graph, position, tail=2 * len(groups), holders=frozenset(holders))
    return position


def _place_rest(graph: Graph, position: dict[int, int], tail: int, holders: frozenset[int]) -> None:
    """Places the equations that no exchange needs, so that they keep the fewest bytes alive.

    Metrics, the optimizer and the like mustn't hold up any exchange. For example, if an equation
    that reads the result of exchange 1 were placed in a segment that exchange 2 needs, exchange 2
    would have to wait for exchange 1 even though it doesn't depend on it.

    There's one exception. If an equation's results are read at two positions, there may be no place
    for it that suits both readers. It then goes to the earlier reader's position, even if that
    makes the other reader wait for an exchange that it doesn't need.
    """
    rest = [i for i in range(len(graph.eqns)) if i not in position]
    awaited, behind = _awaited(graph, position, tail)
    earliest: dict[int, int] = {}
    inner, _ = compat.open_jaxpr(graph.traced.jaxpr)
    late = {inner.invars[len(graph.traced.consts) + p] for p in graph.traced.commit_flag_inputs}
    # Forward pass: find the earliest position at which each equation can run, i.e. after all
    # equations whose results it reads. That position must already be waiting for all exchanges that
    # the equation needs; otherwise, everything else there would have to wait for them, too.
    for i in rest:
        for p in graph.makers(i):
            awaited[i] |= awaited[p]
        # The commit flag is only known after the last exchange, so whatever reads it belongs in the
        # tail.
        if late and not late.isdisjoint(variables(graph.eqns[i].invars)):
            earliest[i] = tail
            continue
        after = [(earliest[p] if p in earliest else position[p]) for p in graph.makers(i)]
        # The result of an exchange is available from the next position on.
        first = max((a + a % 2 for a in after), default=0)
        earliest[i] = next(at for at in range(first, tail + 1, 2) if not awaited[i] & ~behind[at])
    # Backward pass: choose each equation's position, going from last to first so that all readers
    # of its results have already been placed. An equation that frees more memory than it allocates,
    # because it's the last to read its operands, goes as early as possible; any other equation goes
    # as late as possible.
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
        # If this makes any reader wait for exchanges that it doesn't need, fall back to the last
        # position that doesn't.
        if behind[position[i]] & ~common:
            choices = (at for at in range(latest, earliest[i] - 1, -2) if not behind[at] & ~common)
            position[i] = next(choices, latest)


def _awaited(graph: Graph, position: dict[int, int], tail: int) -> tuple[list[int], list[int]]:
    """Returns which exchanges (by position) each equation and each position waits for, as bits.

    Both results are lists of integers, in which bit n stands for having to wait for the exchanges
    at position n. The tail, i.e. the last segment, waits for all exchanges. Equations that don't
    have a position yet get 0, as if they didn't wait for anything.

    As long as a compute position is empty, it may wait for the same exchanges as the collective
    position right after it, because that doesn't hold anything up.
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
