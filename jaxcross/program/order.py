"""The order of a program's segments: what each must run after, and hence what it may overwrite.

Exchanges are made in the order of the program's list, but compute segments run in any order that
their dependences allow, interleaved with segments of other jobs. So a segment may only overwrite a
value if all other segments that read it are certain to have run. This module works out when that's
the case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcross.program.ir import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of a program's segments.

    Attributes:
        after_commit: Segments, e.g. those of the optimizer, that may only run once every rank is
            known to have made the step's last exchange. As soon as any of them has overwritten the
            state, the step can no longer return the old state.
        readers: The segments that read each value.
        needs: For each segment, the segments whose results it reads, and those that read what it
            may overwrite. An update overwrites the step's donated arguments, so all their readers
            must run first, even if nothing else requires it. This costs no time, because they run
            on the same device anyway.
        after: For each segment, a bit set of the segments that must have run before it, because of
            `needs` or the commit. Empty if the segments can't run in list order (`verify` rejects
            such a program, and prints it).
        donates: For each segment, the values that it may overwrite because nothing can read them
            once it runs. Segments run in any order that their dependences allow, so it isn't enough
            for a value's other readers to come earlier in the list: this segment has to depend on
            them. Empty if `after` is.
        carried: The leading collective segments that depend only on one another, provided that some
            compute segment doesn't depend on them. They exchange values from the step's inputs, so
            they can overlap with this step's computation. Only leading segments qualify, because
            each rank makes exchanges in the program's order, even if ranks compute different
            things. Segments that exchange with no other rank are skipped.
    """

    after_commit: frozenset[int]
    readers: Mapping[int, Sequence[int]]
    needs: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]
    donates: tuple[frozenset[int], ...]
    carried: frozenset[int]


def order_of(
    segments: Sequence[Segment],
    *,
    inputs: frozenset[int],
    donated: frozenset[int],
    without_peers: frozenset[int],
) -> Order:
    """Works out the order of segments.

    Args:
        segments: The segments, in an order in which they may run.
        inputs: The values the step takes.
        donated: The inputs it may overwrite after its last exchange.
        without_peers: Collective segments that exchange with no other rank.
    """
    collectives = {s.index for s in segments if s.kind == "collective"}
    last = max(collectives, default=-1)
    after_commit = frozenset(s.index for s in segments if s.index > last >= 0)
    readers: dict[int, list[int]] = {}
    for segment in segments:
        for v in segment.inputs:
            readers.setdefault(v, []).append(segment.index)
    maker = {v: s.index for s in segments for v in s.outputs}
    needs = [{maker[v] for v in s.inputs if v in maker} for s in segments]
    after: list[int] = []
    donates: list[frozenset[int]] = []
    # Otherwise, the program is ill-formed: `verify` is going to raise, and needs to print it.
    runs_in_order = all(
        s.index == n and max(needs[n], default=-1) < n for n, s in enumerate(segments)
    )
    for n, segment in enumerate(segments if runs_in_order else ()):
        late = n in after_commit
        before = 0
        # Whatever must run before this segment's dependencies must also run before the segment
        # itself. The dependencies come earlier in the list, so their own sets are already complete.
        for m in needs[n] | collectives if late else needs[n]:
            before |= after[m] | 1 << m
        # A segment after the commit may overwrite donated arguments, so everything else that reads
        # these must have run first.
        for m in (
            m for v in donated.intersection(segment.last_uses) for m in readers.get(v, ()) if late
        ):
            if m < n and not before >> m & 1:
                needs[n].add(m)
                before |= after[m] | 1 << m
        after.append(before)
        donates.append(
            frozenset(
                v
                for v in segment.last_uses
                # The step's inputs must survive until its last exchange, because if an exchange
                # fails, the step returns what it was given.
                if segment.kind == "compute"
                and (v not in inputs or (v in donated and n > last))
                and all(reader == n or before >> reader & 1 for reader in readers.get(v, ()))
            )
        )
    return Order(
        after_commit=after_commit,
        readers=readers,
        needs=tuple(tuple(sorted(each)) for each in needs),
        after=tuple(after),
        donates=tuple(donates),
        carried=_carried(after, collectives, without_peers),
    )


def _carried(
    after: Sequence[int], collectives: set[int], without_peers: frozenset[int]
) -> frozenset[int]:
    computes = [n for n in range(len(after)) if n not in collectives]
    found: list[int] = []
    for n in sorted(collectives - without_peers) if after else ():
        # Every rank makes its exchanges in the program's order, so only leading exchanges can start
        # early. Stop at the first collective segment that can't: either it needs some other result,
        # or every compute segment needs its own result, which leaves no computation to overlap
        # with.
        needs_more = after[n] & ~sum(1 << m for m in found)
        if needs_more or all(after[c] >> n & 1 for c in computes):
            break
        found.append(n)
    return frozenset(found)
