"""What the driver stores about a job, and about one call of the job's step."""

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
"""What to do with the ranks' initial states of a job.

With `check`, they're compared. With `broadcast`, all ranks take rank 0's values. With `local`, each
rank keeps its own.
"""


class Stopped(BaseException):
    """Unwinds the stack of a job's function after a stop. Never leaves the job's thread."""


@final
class StepCall:
    """One call of a step on this rank, with timestamps recorded by the lanes.

    Attributes:
        name: The job's name.
        number: The call's number, counting all calls of the job.
        graph: The step's segments.
        execution: Holds the call's values and runs its segments.
        called_ns: When the job made the call.
        in_step: Whether the call is one of the job's steps.
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

        An input may come from the other lane: computations can depend on exchanges and vice versa.
        If the other lane's thread hasn't recorded the input's end yet, we fall back to `start_ns`,
        which is too late, but by no more than that thread's delay.
        """
        ends = (self.ends_ns.get(n, start_ns) for n in self.graph.needs[segment])
        return min(max(ends, default=self.called_ns), start_ns)


MAX_REFUSALS = 100  # how often a finished job's function may catch the error and call again


@final
class JobRecord:
    """Everything that the driver stores about one job.

    Attributes:
        number: The job's number in the interleaver, or -1 until it has joined.
        name: The job's name.
        make_thread: Creates the thread that runs the job's function.
        thread: That thread while it's running, otherwise None.
        answers: A queue with the interleaver's answers for the job's thread.
        call: The job's call in progress, or None.
        calls: How many calls the job has made.
        collective: The function that the job has asked the exchange lanes of all ranks to run.
        cause: The first exception on this rank that caused the job to fail.
        error: The error with which the job has ended, or None.
        prints_error: Whether this rank prints why the job failed. If several ranks failed for the
            same reason, only the first one does.
        status: How the job has ended, or None if it hasn't.
        done: Set once the job has ended on all ranks. From then on, `status`, `error` and
            `prints_error` don't change.
        paused: Whether the job is paused on all ranks.
        is_only_job: Whether, as of the latest `run_on_all_ranks`, no other job had ever been part
            of the run.
        skipped: Committed steps that left the state unchanged.
        preparing: Greater than 0 while the job's thread is tracing or compiling a step.
        excused: Whether this rank has excused the job from a joint start.
        refusals: How often a call made by the job's function has raised because the job has ended.
        on_end: Called with the final status, and with whether somebody asked to stop this job in
            particular. Must not wait.
        on_pause: Called when the job is paused (True) or resumed (False). Must not wait.
        abandon: Called in the job's thread to give up on it. Never returns.
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
        """Drops the callbacks, whose references to the job's `JobEngine` would keep it alive."""
        self.on_end = self.on_pause = self.abandon = _ignore


def _ignore(*_: object) -> None:
    """Does nothing, in place of a callback of the job's `JobEngine`."""
