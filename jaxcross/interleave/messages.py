"""The input of the interleaver (events) and its output (instructions). Plain data.

`job` is a job's number; `call` counts its calls of any step on this rank, and tells a late event
from the next call's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxcross.interleave.joint_start import Arrival
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest, Verdict

FinalStatus = Literal["ended", "stopped", "failed", "ejected"]
"""The way in which a job is over."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on this rank."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The lanes are ready; the first event. `together`: first steps wait for each other; the same
    on every rank.
    """

    together: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """A person interrupts the run: all jobs are to stop, on all ranks, between two steps."""


@dataclass(frozen=True, slots=True)
class BackoffElapsed(Event):
    """The time of a `Backoff` is over."""


@dataclass(frozen=True, slots=True)
class JobAdded(Event):
    """A job was added here during the run; it joins once all ranks have added one of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class JobRequested(Event):
    """A request that a job stops, pauses or goes on. `job` is -1 while it has not joined."""

    job: int
    name: str
    request: JobRequest


@dataclass(frozen=True, slots=True)
class TextSubmitted(Event):
    """A text to be delivered on all ranks, by a `TextDelivered` on each."""

    text: str


@dataclass(frozen=True, slots=True)
class StepCalled(Event):
    """A job's thread called a step; answered by `StepReturned` or `Raised`. An evaluation does not
    count as a step.
    """

    job: int
    graph: StepGraph
    counts: bool = True


@dataclass(frozen=True, slots=True)
class FirstStepMade(Event):
    """A job has made its first step without the lanes, as with a parameter server."""

    job: int


@dataclass(frozen=True, slots=True)
class StartExcused(Event):
    """At a joint start the other jobs need not wait for this one: it waits for them, or takes too
    long (`late`).
    """

    job: int
    late: bool = False


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
    """A job's thread wants to communicate on the exchange lane; answered by `SyncReturned` or
    `Raised`.
    """

    job: int
    label: str


@dataclass(frozen=True, slots=True)
class BatchDropped(Event):
    """The prefetcher has dropped one batch on the way to the position of a restart."""

    job: int


@dataclass(frozen=True, slots=True)
class StreamBegun(Event):
    """A job's thread begins another stream. It may still read the earlier streams in
    `still_open`.
    """

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
    """A stream is known to have `count` batches in all on this rank."""

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
    """A segment raised, when dispatched or later.

    A compute segment has then left the lane; an exchange is still made, with zeros, and reported by
    `ExchangeDone`. `commits`: its call has a commit. `ejects`: it raised nothing, but found values
    for which its job is to be ejected.
    """

    job: int
    call: int
    segment: int
    where: str
    error: str
    commits: bool = True
    ejects: bool = False


@dataclass(frozen=True, slots=True)
class ExchangeDone(Event):
    """A collective segment's outputs are there. If they are not `finite`, the step keeps its
    state.
    """

    job: int
    segment: int
    finite: bool = True


@dataclass(frozen=True, slots=True)
class VoteDone(Event):
    """A vote is over."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class TextsCompared(Event):
    """Every rank's text about a job, by rank."""

    job: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnnouncementsGathered(Event):
    """Every rank's announcement of jobs that may join, by rank."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SyncDone(Event):
    """The communication that a job's thread asked for is done."""

    job: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction to the driver, to be followed in the order given."""


@dataclass(frozen=True, slots=True)
class StartJob(Instruction):
    """Start the job's thread."""

    job: int


@dataclass(frozen=True, slots=True)
class JobJoined(Instruction):
    """The job of that name, added during the run, has joined on all ranks. `StartJob` follows when
    its turn comes.
    """

    job: int
    name: str


@dataclass(frozen=True, slots=True)
class JobPaused(Instruction):
    """The job was paused on all ranks, or (not `paused`) goes on."""

    job: int
    paused: bool


@dataclass(frozen=True, slots=True)
class JobAtStart(Instruction):
    """A job has come to its first step on all ranks, or is excused. `awaited`: those to come; if
    none, all begin.
    """

    job: int
    arrival: Arrival
    awaited: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelivered(Instruction):
    """A text that some rank submitted; on all ranks in the same order."""

    text: str


@dataclass(frozen=True, slots=True)
class Dispatch(Instruction):
    """Compute lane: hand a segment to the device; report it dispatched, later completed.
    `other_calls`: see `Span`.
    """

    job: int
    call: int
    step: int
    segment: int
    other_calls: int = 0


@dataclass(frozen=True, slots=True)
class RunExchange(Instruction):
    """Exchange lane: wait for the segment's inputs, run it, wait for its outputs.

    `zero`: run it with zeros, at once. `other_calls`: see `Span`.
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
    """Exchange lane: gather every rank's text about a job that cannot go on, after `step` steps."""

    job: int
    text: str
    step: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class GatherAnnouncements(Instruction):
    """Exchange lane: gather every rank's announcement of jobs that may join
    (`Interleaver.announcement()`).
    """


@dataclass(frozen=True, slots=True)
class RunSync(Instruction):
    """Exchange lane: run the work that the job's thread asked for, after `step` steps."""

    job: int
    step: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Backoff(Instruction):
    """Exchange lane: nothing to do; report after a time that grows with `level`, unless an
    instruction comes first.
    """

    level: int


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """Exchange lane: every job is finished on every rank. `left_out`: jobs that never joined."""

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReturned(Instruction):
    """Answer: the step's segments were dispatched; `step` are committed now. `skipped`: this one
    kept the state.
    """

    job: int
    step: int
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class SkipStep(Instruction):
    """The step is committed, but keeps its state. Comes before the segments that wait for the
    commit are dispatched.
    """

    job: int
    call: int


@dataclass(frozen=True, slots=True)
class BatchGranted(Instruction):
    """Answer: take the batch, or (`more` false) the loop ends here on every rank."""

    job: int
    more: bool


@dataclass(frozen=True, slots=True)
class SyncReturned(Instruction):
    """Answer: the communication was done. `is_only_job`: up to that slot there has never been
    another job.
    """

    job: int
    is_only_job: bool = False


@dataclass(frozen=True, slots=True)
class Raised(Instruction):
    """Answer: the job is finished; its thread must raise (the reason came with `JobFinished`)."""

    job: int


@dataclass(frozen=True, slots=True)
class JobFinished(Instruction):
    """The job is over on every rank, after `step` committed steps.

    `texts`: by rank, if it failed or was ejected. `stop_requested`: this job was to stop, and not
    only the whole run.
    """

    job: int
    status: FinalStatus
    step: int
    texts: tuple[str, ...] = ()
    stop_requested: bool = False
