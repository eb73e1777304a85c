"""The dependencies between a program's segments: all the interleaver needs to know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from jaxcross.errors import quoted

MAX_SEGMENTS = 10_000
"""The largest number of segments that `StepGraph.from_data` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """The kinds and dependencies of a program's segments. Immutable, so several jobs can share it.

    Attributes:
        kinds: The kind of each segment.
        needs: For each segment, the segments that must run before it, either because it reads their
            results or because it may overwrite what they read.
        after_commit: Compute segments that may start only after all ranks have committed the step,
            because they donate or overwrite the step's input state.
        nbytes: How many bytes each segment puts on the wire. May be empty if no segment exchanges
            anything.
        carried: The exchanges that come first and don't need anything the step computes, so they
            can overlap its computation.
        local_step: Whether a call counts as a step of its job even though it exchanges nothing, as
            in local SGD between two exchanges. All other programs without exchanges, e.g.
            evaluations, don't count as steps.
        signature: A number that must be identical across ranks before the step may exchange
            anything. See `vote.point_hash`.
        text: The signature in readable form, one line per exchange, with the user's lines.
        function: The name and number of the job's function that the program belongs to, identical
            across ranks. Tells functions with equal exchanges apart.
        collectives: Indices of the collective segments, in order.
        readers: For each segment, the compute segments that need it.
    """

    kinds: tuple[Literal["compute", "collective"], ...]
    needs: tuple[tuple[int, ...], ...]
    after_commit: frozenset[int] = frozenset()
    nbytes: tuple[int, ...] = ()
    carried: frozenset[int] = frozenset()
    local_step: bool = False
    signature: int = 0
    text: str = ""
    function: str = ""
    collectives: tuple[int, ...] = field(init=False)
    readers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "collectives",
            tuple(i for i, kind in enumerate(self.kinds) if kind == "collective"),
        )
        if len(self.needs) != len(self.kinds):
            raise ValueError(
                f"`needs` must have one entry for each of the {len(self.kinds)} segments, got "
                f"{len(self.needs)} entries"
            )
        for index, needs in enumerate(self.needs):
            if any(not 0 <= need < index for need in needs):
                raise ValueError(
                    f"segment {index} needs segments {needs}, but a segment can only need earlier "
                    "segments"
                )
            if self.kinds[index] == "collective" and (
                index in self.after_commit or self.after_commit & set(needs)
            ):
                raise ValueError(
                    f"exchange segment {index} waits for the commit, but the commit waits for all "
                    "exchanges"
                )
        if self.after_commit and not self.collectives:
            raise ValueError(
                f"`after_commit` must be empty, got {sorted(self.after_commit)}: a program without "
                "exchanges has no commit to wait for"
            )
        if not self.carried.issubset(self.collectives):
            raise ValueError(
                f"`carried` must only contain the exchange segments {[*self.collectives]}, got "
                f"{sorted(self.carried)}"
            )
        if self.local_step and self.collectives:
            raise ValueError(
                f"`local_step` must be false, because segments {[*self.collectives]} are exchanges"
            )
        readers: list[list[int]] = [[] for _ in self.kinds]
        for index, needs in enumerate(self.needs):
            for need in set(needs) if self.kinds[index] == "compute" else ():
                readers[need].append(index)
        object.__setattr__(self, "readers", tuple(map(tuple, readers)))

    @property
    def is_step(self) -> bool:
        """Whether a call counts as one of its job's steps."""
        return bool(self.collectives) or self.local_step

    def as_data(self) -> dict[str, Any]:
        """Returns kinds, dependencies and bytes as plain data.

        Leaves out fields that only serve comparisons between ranks.
        """
        return {
            "kinds": [*self.kinds],
            "needs": [[*needs] for needs in self.needs],
            "after_commit": sorted(self.after_commit),
            "nbytes": [*self.nbytes],
            "carried": sorted(self.carried),
            "local_step": self.local_step,
        }

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Rebuilds a graph from what `as_data` returned.

        Raises:
            ValueError: `data` isn't such a graph.
        """
        names = ("kinds", "needs", "after_commit", "nbytes", "carried")
        # Profiles of earlier versions don't have `carried`.
        lists = {"carried": [], **data} if isinstance(data, Mapping) else {}
        missing = [name for name in names if not isinstance(lists.get(name), list)]
        if missing:
            raise ValueError(
                f"a step graph must have the lists {quoted(names)}, but {quoted(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing or not a list"
            )
        kinds, needs, after_commit, nbytes, carried = (lists[name] for name in names)
        if not 1 <= len(kinds) <= MAX_SEGMENTS:
            raise ValueError(
                f"`kinds` must have 1 to {MAX_SEGMENTS} entries, one for each segment, got "
                f"{len(kinds)}"
            )
        for kind in kinds:
            if kind not in ("compute", "collective"):
                raise ValueError(
                    f"each of `kinds` must be `compute` or `collective`, got {kind!r:.60}"
                )
        for several in needs:
            if not isinstance(several, list):
                raise ValueError(
                    f"each of `needs` must be a list of segment numbers, got {several!r:.60}"
                )
        numbers = [
            *after_commit,
            *nbytes,
            *carried,
            *(need for several in needs for need in several),
        ]
        for number in numbers:
            if type(number) is not int or not 0 <= number < 2**63:
                raise ValueError(
                    "`needs`, `after_commit`, `nbytes` and `carried` must only contain whole "
                    f"numbers from 0 to 2**63 - 1, got {number!r:.60}"
                )
        if nbytes and len(nbytes) != len(kinds):
            raise ValueError(
                f"`nbytes` must be empty or have one entry for each of the {len(kinds)} segments, "
                f"got {len(nbytes)} entries"
            )
        if any(number >= len(kinds) for number in after_commit):
            raise ValueError(
                f"`after_commit` must contain segment numbers, which are below {len(kinds)} here, "
                f"got {max(after_commit)}"
            )
        if type(data.get("local_step")) is not bool:
            raise ValueError(
                f"`local_step` must be true or false, got {data.get('local_step')!r:.60}"
            )
        return cls(
            kinds=tuple(kinds),
            needs=tuple(map(tuple, needs)),
            after_commit=frozenset(after_commit),
            nbytes=tuple(nbytes),
            carried=frozenset(carried),
            local_step=data["local_step"],
        )
