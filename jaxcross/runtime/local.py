"""The part of the interleaver's state that this rank has for itself: calls, and what waits here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxcross.runtime.outline import Outline

PointKind = Literal["step", "batch", "sync", "end"]


@dataclass(frozen=True, slots=True)
class Point:
    """What a job's thread waits to do together with all ranks."""

    kind: PointKind
    hash: int
    text: str
    index: int = -1


@dataclass(slots=True)
class LocalCall:
    """One call of a step on this rank."""

    number: int
    outline: Outline
    waiting: list[int]  # compute segments not yet issued, in order
    issued: set[int] = field(default_factory=set)  # compute segments handed to the lane
    dispatched: set[int] = field(default_factory=set)  # compute segments handed to the device
    exchanged: set[int] = field(default_factory=set)
    admitted: bool = False
    committed: bool = False

    def ready(self) -> int | None:
        """The first compute segment that may go to the lane."""
        for segment in self.waiting:
            if segment in self.outline.after_commit and not self.committed:
                continue
            if all(need in self.issued or need in self.exchanged for need in self.outline.needs[segment]):
                return segment
        return None

    def complete(self) -> bool:
        """Whether the caller can have its results."""
        return (
            not self.waiting
            and len(self.dispatched) + len(self.exchanged) == len(self.outline.kinds)
            and (self.committed or not self.outline.collectives)
        )


@dataclass(slots=True)
class LocalJob:
    """What this rank alone knows of a job."""

    started: bool = False
    call: LocalCall | None = None
    calls: int = 0
    waits: bool = False  # the thread waits for an answer
    point: Point | None = None  # and for the other ranks
    failed: str | None = None
    returned: bool = False  # its function returned
    closed: bool = False  # told to raise from now on
    stream: int = -1
    syncs: int = 0
    prepared: dict[int, int] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
