"""The driver's records of a job and of one call of its step, and the interfaces that it needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, Protocol, final

from jaxcross._pytree import PyTree
from jaxcross.errors import ExchangeError, JobError
from jaxcross.interleave import messages as m
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.runtime.collective_call import CollectiveCall

NonFinite = Literal["ignore", "raise", "skip", "eject"]
"""A job's policy for a step whose exchanged values are not all finite."""


RestoreMode = Literal["check", "broadcast", "local"]
"""How the ranks' values of the state that a job begins with become one."""


class Stopped(BaseException):
    """Unwinds a job's function after a request to stop it, or all jobs. Never leaves its thread."""


class Execution(Protocol):
    """One step of one job in flight; see `jaxcross.program.execution.Execution`."""

    def run(self, index: int) -> None: ...
    def wait_inputs(self, index: int) -> None: ...
    def wait_outputs(self, index: int) -> None: ...
    def zero_inputs(self, index: int) -> None: ...
    def nonfinite(self, index: int) -> str | None: ...
    def branch_mismatch(self, index: int) -> str | None: ...
    def skip(self) -> None: ...
    @property
    def skippable(self) -> bool: ...
    def outputs(self) -> PyTree: ...


@final
class StepCall:
    """One call of a step on this rank, with the times that the lanes note.

    Attributes:
        name: The job's name.
        number: Counts the job's calls.
        graph: The step's segments.
        execution: The call's values.
        called_ns: When the job called.
        nonfinite: Policy for exchanged values that are not finite.
        in_step: Whether it is a step of the job.
        ends_ns: When the outputs of each finished segment were there.
    """

    __slots__ = (
        "called_ns",
        "ends_ns",
        "execution",
        "graph",
        "in_step",
        "name",
        "nonfinite",
        "number",
    )

    def __init__(
        self,
        name: str,
        number: int,
        graph: StepGraph,
        execution: Execution,
        called_ns: int,
        nonfinite: NonFinite,
        in_step: bool = True,
    ) -> None:
        self.name = name
        self.number = number
        self.graph = graph
        self.execution = execution
        self.called_ns = called_ns
        self.nonfinite: NonFinite = nonfinite
        self.in_step = in_step
        self.ends_ns: dict[int, int] = {}

    def ready_ns(self, segment: int, start_ns: int) -> int:
        """Returns when the inputs of a segment that began at `start_ns` were there.

        If the other lane has not noted the end of a producer yet, that end is at most a thread's
        delay before `start_ns`, which stands in for it.
        """
        ends = (self.ends_ns.get(n, start_ns) for n in self.graph.needs[segment])
        return min(max(ends, default=self.called_ns), start_ns)


MAX_REFUSALS = 100  # errors for a job that is over, which its function may catch


@final
class JobRecord:
    """The driver's knowledge of one job.

    Attributes:
        number: The job's number in the interleaver; -1 while it has not joined.
        name: The job's name.
        make_thread: Makes the thread that runs the job's function.
        thread: That thread, from its start to its end.
        answers: The interleaver's answers to the job's thread.
        call: The call of a step that is under way.
        calls: How many calls there were.
        collective: The work that the exchange lanes of all ranks are to run for the job.
        cause: The first exception of this rank that is the job's failure.
        prints_error: Whether this rank prints why the job failed: it is the first one with this
            cause.
        done: Set once the job is over on every rank; `status`, `error` and
            `prints_error` are final then.
        paused: Whether the job is paused on all ranks.
        is_only_job: Whether it was the run's only job ever, as of the latest `run_on_all_ranks`.
        skipped: Committed steps that kept their state.
        preparing: Whether the job's thread traces or compiles a step: above 0 if so.
        excused: Whether a joint start does not wait for it.
        refusals: How many errors its function got because the job is over.
        on_end: Called with the final status, and whether a request was for this job alone to stop;
            must not wait.
        on_pause: Called with whether the job is paused now; must not wait.
        abandon: Called to leave the job's thread behind; never returns.
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
        self.status: m.FinalStatus | None = None
        self.done = threading.Event()
        self.paused = False
        self.is_only_job = False
        self.skipped = 0
        self.preparing = 0
        self.excused = False
        self.refusals = 0
        self.on_end: Callable[[m.FinalStatus, bool], None] = _ignore
        self.on_pause: Callable[[bool], None] = _ignore
        self.abandon: Callable[[], None] = _ignore

    def detach(self) -> None:
        """Drops the callbacks, and with them the job's `JobRun`."""
        self.on_end = self.on_pause = self.abandon = _ignore


def _ignore(*_: object) -> None:
    """Does nothing, in place of a callback of the job's `JobRun`."""
