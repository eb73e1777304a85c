"""Job scripts for the simulator: generators that yield the actions of a job's thread."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxcross.interleave.step_graph import StepGraph


@dataclass(frozen=True, slots=True)
class Think:
    """The job's thread is busy with its own work."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """Calls a step. `fails` maps a compute segment to when it fails: "dispatch" or "complete"."""

    graph: StepGraph
    seconds: tuple[float, ...]
    fails: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepare:
    """Batch number `count` of a stream will be ready after `seconds`. Doesn't wait.

    `last` says that the stream has no further batch. A stream begins with its first batch. The job
    may still read earlier streams that haven't ended for it.
    """

    seconds: float
    stream: int
    count: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Waits for a batch. The script receives whether there is one."""

    stream: int
    index: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Waits for the job's own communication."""

    label: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The job's function raises."""

    text: str


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a job on this rank; it joins once all ranks have added that name. Doesn't wait."""

    name: str
    script: Generator[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Await:
    """Waits, in the job's own code, until another job of this rank has ended.

    If that takes too long, the rank excuses the waiting job from a joint start.
    """

    job: int


Action = Think | Await | Step | Prepare | Batch | Sync | Fail | Add
Script = Generator[Action, Any, None]
