"""What goes into the interleaver (events) and what comes out (instructions). Plain data.

`job` is a job's number, `call` counts a job's calls of any step on this rank: it tells a late completion of one
call from the next call's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest, Verdict

FinalStatus = Literal["ended", "stopped", "failed", "ejected"]
"""How a job leaves."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on this rank."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The lanes stand ready. Sent once, first."""


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """A person wants all jobs to stop, on all ranks, between two steps."""


@dataclass(frozen=True, slots=True)
class BackoffElapsed(Event):
    """The time asked for by `Backoff` is over."""


@dataclass(frozen=True, slots=True)
class JobAdded(Event):
    """A job of that name was added here during the run; it joins once all ranks have added it."""

    name: str


@dataclass(frozen=True, slots=True)
class JobRequested(Event):
    """Somebody wishes that a job stops, pauses or goes on. `job` is -1 while it has not joined."""

    job: int
    name: str
    request: JobRequest


@dataclass(frozen=True, slots=True)
class TextSubmitted(Event):
    """All ranks are to hear this text, each by a `TextDelivered`."""

    text: str


@dataclass(frozen=True, slots=True)
class StepCalled(Event):
    """A job's thread called a step; answered by `StepReturned` or `Raised`. An evaluation does not count as a step."""

    job: int
    graph: StepGraph
    counts: bool = True


@dataclass(frozen=True, slots=True)
class StepsRestored(Event):
    """A job goes on after `step` steps that another run made; the same on every rank."""

    job: int
    step: int


@dataclass(frozen=True, slots=True)
class BatchWanted(Event):
    """A job's thread wants batch `index` of a stream; answered by `BatchGranted` or `Raised`."""

    job: int
    stream: int
    index: int


@dataclass(frozen=True, slots=True)
class SyncWanted(Event):
    """A job's thread wants to communicate on the exchange lane; answered by `SyncReturned` or `Raised`."""

    job: int
    label: str


@dataclass(frozen=True, slots=True)
class BatchDropped(Event):
    """The feed has gone one batch further towards the place where a restart goes on."""

    job: int


@dataclass(frozen=True, slots=True)
class StreamBegun(Event):
    """A job's thread begins another stream. Of the earlier ones it may still read those `still_open` it."""

    job: int
    still_open: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPrepared(Event):
    """`count` batches of a stream are or were ready on this rank."""

    job: int
    stream: int
    count: int


@dataclass(frozen=True, slots=True)
class StreamEnded(Event):
    """A stream has `count` batches in all on this rank."""

    job: int
    stream: int
    count: int


@dataclass(frozen=True, slots=True)
class JobReturned(Event):
    """A job's function returned."""

    job: int


@dataclass(frozen=True, slots=True)
class JobRaised(Event):
    """A job's function, or its data, raised."""

    job: int
    text: str


@dataclass(frozen=True, slots=True)
class SegmentDispatched(Event):
    """A compute segment was handed to the device: its outputs exist as promises."""

    job: int
    call: int
    segment: int


@dataclass(frozen=True, slots=True)
class SegmentCompleted(Event):
    """A compute segment's outputs are computed; it had the device for `ns` nanoseconds."""

    job: int
    call: int
    segment: int
    ns: int = 0


@dataclass(frozen=True, slots=True)
class SegmentFailed(Event):
    """A segment raised, when dispatched or later. A compute segment has then left the lane; an exchange is still
    made, with zeros, and reported by `ExchangeDone`. `ejects`: it raised nothing, but its job wishes to leave for it.
    """

    job: int
    call: int
    segment: int
    text: str
    ejects: bool = False


@dataclass(frozen=True, slots=True)
class ExchangeDone(Event):
    """A collective segment's outputs are there. If they are not `finite`, the step is to keep its state."""

    job: int
    segment: int
    finite: bool = True


@dataclass(frozen=True, slots=True)
class VoteDone(Event):
    """The vote's outcome."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class TextsCompared(Event):
    """Every rank's text about a job, by rank."""

    job: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnnouncementsGathered(Event):
    """Every rank's news of jobs that may join, by rank."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SyncDone(Event):
    """What the job wanted to communicate is done."""

    job: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something for the driver to do, in the order given."""


@dataclass(frozen=True, slots=True)
class StartJob(Instruction):
    """Start the job's thread."""

    job: int


@dataclass(frozen=True, slots=True)
class JobJoined(Instruction):
    """The job of that name, added during the run, is in on all ranks. `StartJob` follows when its turn comes."""

    job: int
    name: str


@dataclass(frozen=True, slots=True)
class JobPaused(Instruction):
    """The job was paused on all ranks, or (not `paused`) goes on."""

    job: int
    paused: bool


@dataclass(frozen=True, slots=True)
class TextDelivered(Instruction):
    """What some rank submitted; on all ranks in the same order."""

    text: str


@dataclass(frozen=True, slots=True)
class Dispatch(Instruction):
    """Compute lane: hand a compute segment to the device; report it dispatched and, later, completed.

    `other_calls`: see `Span`.
    """

    job: int
    call: int
    step: int
    segment: int
    other_calls: int = 0


@dataclass(frozen=True, slots=True)
class RunExchange(Instruction):
    """Exchange lane: wait for the segment's inputs, run it, wait for its outputs. `zero`: with zeros, at once.
    `other_calls`: see `Span`.
    """

    job: int
    call: int
    step: int
    segment: int
    zero: bool
    other_calls: int = 0


@dataclass(frozen=True, slots=True)
class CastVote(Instruction):
    """Exchange lane: all-reduce the ballot, a vector of int64."""

    ballot: np.ndarray


@dataclass(frozen=True, slots=True)
class CompareTexts(Instruction):
    """Exchange lane: gather every rank's text about a job that cannot go on."""

    job: int
    text: str


@dataclass(frozen=True, slots=True)
class GatherAnnouncements(Instruction):
    """Exchange lane: gather every rank's announcement of jobs that may join (`Interleaver.announcement()`)."""


@dataclass(frozen=True, slots=True)
class RunSync(Instruction):
    """Exchange lane: do what the job's thread asked for."""

    job: int


@dataclass(frozen=True, slots=True)
class Backoff(Instruction):
    """Exchange lane: nothing to do; report after a while that grows with `level`, unless told otherwise before."""

    level: int


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """Exchange lane: every job is finished on every rank. Left out are jobs that never joined."""

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReturned(Instruction):
    """Answer: all of the step's segments were dispatched. `step` is the job's number of committed steps; `skipped`:
    this one kept the state.
    """

    job: int
    step: int
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class SkipStep(Instruction):
    """The step is committed, but is to keep its state. Comes before its segments behind the commit are dispatched."""

    job: int
    call: int


@dataclass(frozen=True, slots=True)
class BatchGranted(Instruction):
    """Answer: take the batch, or (`more` false) the loop ends here on every rank."""

    job: int
    more: bool


@dataclass(frozen=True, slots=True)
class SyncReturned(Instruction):
    """Answer: the communication was done. `is_only_job`: up to that slot there has never been another job."""

    job: int
    is_only_job: bool = False


@dataclass(frozen=True, slots=True)
class Raised(Instruction):
    """Answer: the job is finished, its thread must raise (the reason came with `JobFinished`)."""

    job: int


@dataclass(frozen=True, slots=True)
class JobFinished(Instruction):
    """The job is over on every rank, after so many committed steps. `texts` by rank if it failed or was ejected.
    `asked` if somebody wanted this job to stop, and not only the whole run.
    """

    job: int
    how: FinalStatus
    step: int
    texts: tuple[str, ...] = ()
    asked: bool = False
