"""The interleaver's input (events) and output (instructions), as plain data.

`job` is a job's number. `call` counts the job's calls of any step on this rank, so that a late
event can't be mistaken for one of the next call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxcross._endings import JobStatus
from jaxcross.interleave.joint_start import Arrival
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.interleave.vote import JobRequest, Verdict


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on this rank."""


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The first event: the lanes are ready.

    `together`: the jobs wait for each other before their first steps. Identical across ranks.
    """

    together: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """A user interrupts the run: all jobs should stop between two steps, on all ranks."""


@dataclass(frozen=True, slots=True)
class BackoffElapsed(Event):
    """The wait of a `Backoff` has elapsed."""


@dataclass(frozen=True, slots=True)
class JobAdded(Event):
    """A job was added here during the run. It joins once all ranks have added that name."""

    name: str


@dataclass(frozen=True, slots=True)
class JobRequested(Event):
    """A request to stop, pause or resume a job. `job` is -1 until the job has joined."""

    job: int
    name: str
    request: JobRequest


@dataclass(frozen=True, slots=True)
class TextSubmitted(Event):
    """A text to deliver on all ranks, by one `TextDelivered` each."""

    text: str


@dataclass(frozen=True, slots=True)
class StepCalled(Event):
    """A job's thread called a step. The answer is `StepReturned` or `Raised`.

    `counts` is False for a call that isn't a step of the job, such as an evaluation.
    """

    job: int
    graph: StepGraph
    counts: bool = True


@dataclass(frozen=True, slots=True)
class FirstStepMade(Event):
    """A job has made its first step without the lanes, e.g. with a parameter server."""

    job: int


@dataclass(frozen=True, slots=True)
class StartExcused(Event):
    """The other jobs need not wait for this one at a joint start.

    The job itself waits for them, or takes too long (`late`).
    """

    job: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class StepsRestored(Event):
    """A job continues after `step` steps that an earlier run made. Identical across ranks."""

    job: int
    step: int


@dataclass(frozen=True, slots=True)
class BatchWanted(Event):
    """A job's thread requests batch `index` of a stream. Answer: `BatchGranted` or `Raised`."""

    job: int
    stream: int
    index: int


@dataclass(frozen=True, slots=True)
class SyncWanted(Event):
    """A job's thread requests a turn on the exchange lane. Answer: `SyncReturned` or `Raised`."""

    job: int
    label: str


@dataclass(frozen=True, slots=True)
class BatchDropped(Event):
    """The prefetcher has dropped a batch to get to a restart's position."""

    job: int


@dataclass(frozen=True, slots=True)
class StreamBegun(Event):
    """A job's thread begins another stream. It may still read the earlier ones in `still_open`."""

    job: int
    still_open: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPrepared(Event):
    """So far, `count` batches of a stream have been ready on this rank."""

    job: int
    stream: int
    count: int


@dataclass(frozen=True, slots=True)
class StreamEnded(Event):
    """This rank now knows that a stream has `count` batches in total."""

    job: int
    stream: int
    count: int


@dataclass(frozen=True, slots=True)
class JobReturned(Event):
    """A job's function returned."""

    job: int


@dataclass(frozen=True, slots=True)
class JobRaised(Event):
    """A job's function or its data raised."""

    job: int
    text: str


@dataclass(frozen=True, slots=True)
class SegmentDispatched(Event):
    """A compute segment was handed to the device. Its outputs may not be computed yet."""

    job: int
    call: int
    segment: int


@dataclass(frozen=True, slots=True)
class SegmentCompleted(Event):
    """A compute segment's outputs are computed. It occupied the device for `ns` nanoseconds."""

    job: int
    call: int
    segment: int
    ns: int = 0


@dataclass(frozen=True, slots=True)
class SegmentFailed(Event):
    """A segment raised, either at dispatch or later.

    A compute segment has then left the lane. An exchange still takes place, with zeros, and is
    reported by `ExchangeDone`. `commits`: the segment's call has a commit. `ejects`: the segment
    raised nothing, but it found values for which the job has to be ejected.
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
    """An exchange's outputs are available. If not `finite`, the step leaves its state unchanged."""

    job: int
    segment: int
    finite: bool = True


@dataclass(frozen=True, slots=True)
class VoteDone(Event):
    """A vote has ended."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class TextsCompared(Event):
    """All ranks' texts about a job, in rank order."""

    job: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnnouncementsGathered(Event):
    """All ranks' announcements of jobs that may join, in rank order."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SyncDone(Event):
    """The communication that a job's thread requested has ended."""

    job: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction to the driver, which must follow instructions in the order given."""


@dataclass(frozen=True, slots=True)
class StartJob(Instruction):
    """Start the job's thread."""

    job: int


@dataclass(frozen=True, slots=True)
class JobJoined(Instruction):
    """A job that was added during the run has joined on all ranks.

    `StartJob` follows once the policy lets it run.
    """

    job: int
    name: str


@dataclass(frozen=True, slots=True)
class JobPaused(Instruction):
    """The job was paused on all ranks or, if not `paused`, resumed."""

    job: int
    paused: bool


@dataclass(frozen=True, slots=True)
class JobAtStart(Instruction):
    """A job has reached its first step on all ranks, or is excused.

    `awaited` are the jobs that haven't. If it's empty, all jobs begin.
    """

    job: int
    arrival: Arrival
    awaited: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelivered(Instruction):
    """A text that some rank submitted. All ranks get these in the same order."""

    text: str


@dataclass(frozen=True, slots=True)
class Dispatch(Instruction):
    """Compute lane: hand a segment to the device. Report its dispatch, and later its completion.

    `other_calls`: see `Span`.
    """

    job: int
    call: int
    step: int
    segment: int
    other_calls: int = 0


@dataclass(frozen=True, slots=True)
class RunExchange(Instruction):
    """Exchange lane: wait for the segment's inputs, run it, and wait for its outputs.

    `zero`: run it immediately, with zeros. `other_calls`: see `Span`.
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
    """Exchange lane: gather all ranks' texts about a job that can't continue after `step` steps."""

    job: int
    text: str
    step: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class GatherAnnouncements(Instruction):
    """Exchange lane: gather all ranks' announcements of jobs that may join.

    `Interleaver.announcement` returns this rank's.
    """


@dataclass(frozen=True, slots=True)
class RunSync(Instruction):
    """Exchange lane: run the work that the job's thread requested after `step` steps."""

    job: int
    step: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Backoff(Instruction):
    """Exchange lane: there's nothing to do, so report back after a while.

    The wait grows with `level`. It ends early if another instruction arrives.
    """

    level: int


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """Exchange lane: all jobs have ended on all ranks. `left_out`: jobs that never joined."""

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReturned(Instruction):
    """Answer: all segments of the step were dispatched.

    `step` is the number of steps that the job has made by now. `skipped`: this one left the state
    unchanged.
    """

    job: int
    step: int
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class SkipStep(Instruction):
    """The step is committed but leaves its state unchanged.

    This comes before the dispatch of the segments that wait for the commit.
    """

    job: int
    call: int


@dataclass(frozen=True, slots=True)
class BatchGranted(Instruction):
    """Answer: take the batch or, if not `more`, end the loop here on every rank."""

    job: int
    more: bool


@dataclass(frozen=True, slots=True)
class SyncReturned(Instruction):
    """Answer: the communication has ended.

    `is_only_job`: the run had never had another job up to this slot.
    """

    job: int
    is_only_job: bool = False


@dataclass(frozen=True, slots=True)
class Raised(Instruction):
    """Answer: the job has ended, so its thread must raise. `JobFinished` brought the reason."""

    job: int


@dataclass(frozen=True, slots=True)
class JobFinished(Instruction):
    """The job has ended on every rank, after `step` committed steps.

    `texts`: the ranks' texts in rank order if the job failed or was ejected. `stop_requested`: a
    stop was requested for this job, rather than only for the whole run.
    """

    job: int
    status: JobStatus
    step: int
    texts: tuple[str, ...] = ()
    stop_requested: bool = False
