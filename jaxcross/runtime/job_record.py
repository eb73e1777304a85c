"""The driver's records of a job and of one call of its step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, final

from jaxcross._endings import JobStatus
from jaxcross.errors import ExchangeError, JobError
from jaxcross.interleave import StepGraph
from jaxcross.interleave import messages as m
from jaxcross.runtime.collective_call import CollectiveCall

if TYPE_CHECKING:
    from jaxcross.program import Execution

RestoreMode = Literal["check", "broadcast", "local"]
"""How the ranks' values of a job's initial state are turned into one."""


class Stopped(BaseException):
    """Unwinds a job's function after a request to stop. Never leaves the job's thread."""


@final
class StepCall:
    """One call of a step on this rank, with timestamps from the lanes.

    Attributes:
        name: The job's name.
        number: The call's number among the job's calls.
        graph: The step's segments.
        execution: The call's values.
        called_ns: When the job made the call.
        in_step: Whether the call is a step of the job.
        ends_ns: For each finished segment, when its outputs were available.
    """

    __slots__ = (
        "called_ns",
        "ends_ns",
        "execution",
        "graph",
        "in_step",
        "name",
        "number",
    )

    def __init__(
        self,
        name: str,
        number: int,
        graph: StepGraph,
        execution: Execution,
        called_ns: int,
        in_step: bool = True,
    ) -> None:
        self.name = name
        self.number = number
        self.graph = graph
        self.execution = execution
        self.called_ns = called_ns
        self.in_step = in_step
        self.ends_ns: dict[int, int] = {}

    def ready_ns(self, segment: int, start_ns: int) -> int:
        """Returns when the inputs of a segment that began at `start_ns` were available.

        The lane that ran a producer may not have recorded its end yet. Then we take `start_ns`
        instead, which is at most a thread's delay later than that end.
        """
        ends = (self.ends_ns.get(n, start_ns) for n in self.graph.needs[segment])
        return min(max(ends, default=self.called_ns), start_ns)


MAX_REFUSALS = 100  # how many errors a finished job's function may catch


@final
class JobRecord:
    """What the driver stores about one job.

    Attributes:
        number: The job's number in the interleaver, or -1 until it has joined.
        name: The job's name.
        make_thread: Makes the thread that runs the job's function.
        thread: That thread, from its start to its end.
        answers: The interleaver's answers to the job's thread.
        call: The call of a step in progress, if any.
        calls: Number of calls so far.
        collective: The work that the exchange lanes of all ranks have to run for the job.
        cause: The first exception on this rank that made the job fail.
        error: The error that ended the job, if any.
        prints_error: Whether this rank prints why the job failed, which only the first rank with
            this cause does.
        status: How the job ended, or None until then.
        done: Set once the job has ended on all ranks. From then on, `status`, `error` and
            `prints_error` don't change.
        paused: Whether the job is paused on all ranks.
        is_only_job: Whether the run had never had another job, as of the latest `run_on_all_ranks`.
        skipped: Committed steps that left the state unchanged.
        preparing: Above 0 while the job's thread traces or compiles a step.
        excused: Whether this rank has excused the job from a joint start.
        refusals: How many errors the job's function got because the job has ended.
        on_end: Called with the final status, and with whether a stop was requested for this job in
            particular. Must not wait.
        on_pause: Called with whether the job is paused now. Must not wait.
        abandon: Called to leave the job's thread behind. Never returns.
    """

    def __init__(
        self,
        number: int,
        name: str,
        thread: Callable[[], threading.Thread],
        answers: SimpleQueue[m.Instruction],
    ) -> None:
        self.number = number
        self.name = name
        self.make_thread = thread
        self.thread: threading.Thread | None = None
        self.answers = answers
        self.call: StepCall | None = None
        self.calls = 0
        self.collective: CollectiveCall[Any] | None = None
        self.cause: BaseException | None = None
        self.error: JobError | ExchangeError | None = None
        self.prints_error = False
        self.status: JobStatus | None = None
        self.done = threading.Event()
        self.paused = False
        self.is_only_job = False
        self.skipped = 0
        self.preparing = 0
        self.excused = False
        self.refusals = 0
        self.on_end: Callable[[JobStatus, bool], None] = _ignore
        self.on_pause: Callable[[bool], None] = _ignore
        self.abandon: Callable[[], None] = _ignore

    def detach(self) -> None:
        """Drops the callbacks and thereby the references to the job's `JobEngine`."""
        self.on_end = self.on_pause = self.abandon = _ignore


def _ignore(*_: object) -> None:
    """Stands in for callbacks of the job's `JobEngine`."""
