"""What the driver holds for a job and for one call of its step, and what it needs of others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, NoReturn, Protocol, get_args

from jaxcross.errors import ExchangeError, JobError
from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.health.watchdog import Awaited, Watch
from jaxcross.interleave import messages as m
from jaxcross.interleave.step_graph import StepGraph
from jaxcross.world.exchange_owner import ExchangeOwner

NonFinite = Literal["ignore", "raise", "skip", "eject"]
"""What a job does about a step whose exchanged values are not all finite."""


Initial = Literal["check", "broadcast", "local"]
"""What becomes of the ranks' values of the state that a job begins with."""


def check_choice(value: object, choices: Any, what: str) -> None:
    """Makes sure that `value` is one of the words of a `Literal`.

    Raises:
        ValueError: It is not; names `what` and the words.
    """
    if value not in get_args(choices):
        raise ValueError(f"{what} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}.")


class Stopped(BaseException):
    """Unwinds a job's function after somebody asked it, or all jobs, to stop. Never leaves its thread."""


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
    def outputs(self) -> Any: ...


class RunWorld(Protocol):
    """What a run needs of the world."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def control(self) -> Any: ...
    def watching(
        self, *, job: str, step: int, segment: int, what: str, awaited: Awaited | None = None, own: bool = False
    ) -> Watch: ...
    @property
    def flight(self) -> FlightRecorder: ...
    @property
    def exchange_owner(self) -> ExchangeOwner: ...
    def abort(self, message: str, *, code: int = 1) -> NoReturn: ...


class Call:
    """One call of a step on this rank, with what the lanes note of it.

    Attributes:
        nonfinite: What is to be done about exchanged values that are not finite.
        ends_ns: When each finished segment's outputs were there.
        in_step: Whether it is a step of the job.
    """

    __slots__ = ("called_ns", "ends_ns", "execution", "graph", "in_step", "name", "nonfinite", "number")

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
        self.name, self.number, self.graph, self.execution = name, number, graph, execution
        self.called_ns, self.nonfinite, self.in_step = called_ns, nonfinite, in_step
        self.ends_ns: dict[int, int] = {}

    def ready_ns(self, segment: int, start_ns: int) -> int:
        """When the inputs of a segment that began at `start_ns` were there. An end that its lane has not noted yet is
        not earlier than that by more than a thread's delay.
        """
        ends = (self.ends_ns.get(n, start_ns) for n in self.graph.needs[segment])
        return min(max(ends, default=self.called_ns), start_ns)


MOST_REFUSALS = 100  # that a job's function may catch


class JobRecord:
    """What the driver holds for one job.

    Attributes:
        number: The job's; -1 while it has not joined.
        left: Set once the job is over on every rank; `how` and `error` are final then.
        is_only_job: Whether it was the run's only job ever, when the ranks last did something together in it.
        skipped: Committed steps that kept their state.
        refusals: How often its function was told that the job is over.
        tell_left: Hears how the job left, and whether somebody asked it alone to stop; must not wait.
        tell_paused: Hears whether it rests; must not wait.
        abandon: Sees to it that the others need not wait for the function, and never returns.
    """

    def __init__(
        self, number: int, name: str, thread: Callable[[], threading.Thread], answers: SimpleQueue[m.Instruction]
    ) -> None:
        self.number, self.name = number, name
        self.make_thread = thread
        self.thread: threading.Thread | None = None
        self.answers = answers
        self.call: Call | None = None
        self.calls = 0
        self.sync: Callable[[Any], Any] | None = None
        self.sync_result: tuple[Any, BaseException | None] = (None, None)
        self.cause: BaseException | None = None  # the first thing that went wrong on this rank
        self.error: JobError | ExchangeError | None = None
        self.how: m.FinalStatus | None = None
        self.left = threading.Event()
        self.paused = self.is_only_job = False
        self.skipped = self.refusals = 0
        self.tell_left: Callable[[m.FinalStatus, bool], None] = _nobody
        self.tell_paused: Callable[[bool], None] = _nobody
        self.abandon: Callable[[], None] = _nobody


def _nobody(*_: Any) -> None:
    """In place of what a job's context provides."""
