"""What goes into the interleaver (events) and what comes out of it (instructions), as plain data.

Messages about a job carry the job's number. Messages about a segment, i.e. a part of a step, also
carry the number of the call: how many calls the job has made on this rank so far. Segment indices
are the same in every call, so without this number, a late event could be attributed to the job's
next call.
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
    """The run has started, and the lanes are ready. This is always the first event.

    With `together`, the jobs wait for each other before their first steps. Identical across ranks.
    """

    together: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """The user has interrupted the run. All jobs should stop between two steps, on all ranks."""


@dataclass(frozen=True, slots=True)
class BackoffElapsed(Event):
    """The wait that a `Backoff` asked for is over."""


@dataclass(frozen=True, slots=True)
class JobAdded(Event):
    """A job was added on this rank during the run. It joins once all ranks have added this name."""

    name: str


@dataclass(frozen=True, slots=True)
class JobRequested(Event):
    """A request to stop, pause or resume a job. `job` is -1 until the job has joined."""

    job: int
    name: str
    request: JobRequest


@dataclass(frozen=True, slots=True)
class TextSubmitted(Event):
    """A text for all ranks. Each rank receives it in a `TextDelivered`."""

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
    """A job has made its first step without using the lanes, e.g. with a parameter server."""

    job: int


@dataclass(frozen=True, slots=True)
class StartExcused(Event):
    """This rank excuses a job from a joint start, so the other jobs stop waiting for it.

    Either the job itself is waiting for other jobs or, if `late`, it's taking too long.
    """

    job: int
    late: bool = False


@dataclass(frozen=True, slots=True)
class StepsRestored(Event):
    """A job resumes after `step` steps of an earlier run. Identical across ranks."""

    job: int
    step: int


@dataclass(frozen=True, slots=True)
class BatchWanted(Event):
    """A job's thread requests batch `index` of a stream. It gets a `BatchGranted` or a `Raised`."""

    job: int
    stream: int
    index: int


@dataclass(frozen=True, slots=True)
class SyncWanted(Event):
    """A job's thread requests a turn on the exchange lane to communicate in.

    It gets `SyncReturned` or `Raised`.

    Attributes:
        job: The job.
        label: What it's for. Must be equal on all ranks.
        text: Describes it in an error if the labels differ. If it's empty, the label does.
    """

    job: int
    label: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class BatchDropped(Event):
    """The prefetcher has skipped a batch on its way to the position of a restart."""

    job: int


@dataclass(frozen=True, slots=True)
class StreamBegun(Event):
    """A job's thread opens another stream. It may still read those in `still_open`."""

    job: int
    still_open: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPrepared(Event):
    """This rank has prepared `count` batches of a stream so far."""

    job: int
    stream: int
    count: int


@dataclass(frozen=True, slots=True)
class StreamEnded(Event):
    """On this rank, a stream turned out to have `count` batches in total."""

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
    """A compute segment was dispatched to the device. Its outputs may not be computed yet."""

    job: int
    call: int
    segment: int


@dataclass(frozen=True, slots=True)
class SegmentCompleted(Event):
    """A compute segment has finished, after occupying the device for `ns` nanoseconds."""

    job: int
    call: int
    segment: int
    ns: int = 0


@dataclass(frozen=True, slots=True)
class SegmentFailed(Event):
    """A segment raised, either at dispatch or later.

    A failed computation leaves the compute lane, with this event in place of its
    `SegmentCompleted`. A failed exchange must still go ahead, because the other ranks are going to
    enter it. So this rank takes part with zeros as inputs, and reports the end of the exchange as
    usual.

    The `commits` flag says whether the segment's call has a commit, i.e. a vote on whether the step
    takes effect. The `ejects` flag means that nothing raised, but the segment found invalid values
    (e.g. a loss that isn't finite), and the job has to leave the run because of them.
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
    """An exchange has finished. If not `finite`, the step must leave its state unchanged."""

    job: int
    segment: int
    finite: bool = True


@dataclass(frozen=True, slots=True)
class VoteDone(Event):
    """A vote has ended."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class TextsCompared(Event):
    """All ranks have exchanged their texts about a job. `texts` is in rank order."""

    job: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnnouncementsGathered(Event):
    """All ranks have exchanged their announcements. `texts` is in rank order."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SyncDone(Event):
    """The communication that a job's thread requested has finished."""

    job: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction to the driver, which must carry out instructions in the order given."""


@dataclass(frozen=True, slots=True)
class StartJob(Instruction):
    """Start the job's thread."""

    job: int


@dataclass(frozen=True, slots=True)
class JobJoined(Instruction):
    """A job that was added during the run has joined on all ranks.

    A `StartJob` follows as soon as the policy lets the job run.
    """

    job: int
    name: str


@dataclass(frozen=True, slots=True)
class JobPaused(Instruction):
    """The job was paused on all ranks or, if `paused` is False, resumed."""

    job: int
    paused: bool


@dataclass(frozen=True, slots=True)
class JobAtStart(Instruction):
    """At a joint start, a job has reached its first step on all ranks, or has been excused.

    `awaited` lists the jobs that the others are still waiting for. Once it's empty, all jobs begin.
    """

    job: int
    arrival: Arrival
    awaited: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextDelivered(Instruction):
    """A text that some rank submitted. All ranks receive these texts in the same order."""

    text: str


@dataclass(frozen=True, slots=True)
class Dispatch(Instruction):
    """Compute lane: dispatch a segment to the device, and report its dispatch and its completion.

    For `other_calls`, see `Span`.
    """

    job: int
    call: int
    step: int
    segment: int
    other_calls: int = 0


@dataclass(frozen=True, slots=True)
class RunExchange(Instruction):
    """Exchange lane: wait for the segment's inputs, run it, and wait for its outputs.

    With `zero`, use zeros instead of waiting for the inputs. For `other_calls`, see `Span`.
    """

    job: int
    call: int
    step: int
    segment: int
    zero: bool
    other_calls: int = 0


@dataclass(frozen=True, slots=True)
class CastVote(Instruction):
    """Exchange lane: all-reduce the ballot, an int64 vector, taking the elementwise minimum."""

    ballot: np.ndarray


@dataclass(frozen=True, slots=True)
class CompareTexts(Instruction):
    """Exchange lane: gather all ranks' texts about a job that can't continue after `step` steps."""

    job: int
    text: str
    step: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class GatherAnnouncements(Instruction):
    """Exchange lane: gather all ranks' announcements of pending jobs and texts.

    `Interleaver.announcement` returns this rank's announcement.
    """


@dataclass(frozen=True, slots=True)
class RunSync(Instruction):
    """Exchange lane: run the work that the job's thread requested after `step` steps."""

    job: int
    step: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Backoff(Instruction):
    """Exchange lane: nothing to do right now, so wait for a while, then report `BackoffElapsed`.

    The wait grows with `level`. Another instruction cuts the wait short, in which case nothing is
    reported.
    """

    level: int


@dataclass(frozen=True, slots=True)
class Finish(Instruction):
    """Exchange lane: all jobs have ended on all ranks. `left_out` are jobs that never joined."""

    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReturned(Instruction):
    """Answer to a job's thread: all segments of the step were dispatched, so the call can return.

    The `step` field counts all steps that the job has made, including this step. If the `skipped`
    flag is set, this step counts too, but some exchanged values weren't finite, so it has left the
    state unchanged.
    """

    job: int
    step: int
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class SkipStep(Instruction):
    """The step is committed, but it has to leave its state unchanged.

    This instruction arrives before any segment that waits for the commit is dispatched, so those
    segments can select the old state.
    """

    job: int
    call: int


@dataclass(frozen=True, slots=True)
class BatchGranted(Instruction):
    """Answer to a job's thread: take the batch or, if not `more`, end the loop on every rank."""

    job: int
    more: bool


@dataclass(frozen=True, slots=True)
class SyncReturned(Instruction):
    """Answer to a job's thread: the communication that it requested has finished.

    `is_only_job` means that no other job has ever been part of the run, up to this slot.
    """

    job: int
    is_only_job: bool = False


@dataclass(frozen=True, slots=True)
class Raised(Instruction):
    """Answer to a job's thread: raise, because the job has ended. `JobFinished` gave the reason."""

    job: int


@dataclass(frozen=True, slots=True)
class JobFinished(Instruction):
    """The job has ended on every rank, after `step` committed steps.

    If the job failed or was ejected, `texts` contains each rank's account of the reason, in rank
    order. The `stop_requested` flag is set if somebody asked to stop this particular job rather
    than the whole run.
    """

    job: int
    status: JobStatus
    step: int
    texts: tuple[str, ...] = ()
    stop_requested: bool = False
