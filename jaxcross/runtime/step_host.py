"""The interface between a step and the code that runs it: a job of a runner, or the step's own
calls without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from jaxcross._pytree import PyTree
from jaxcross.program.execution import Compiled
from jaxcross.program.ir import Program
from jaxcross.world.control_plane import Control

T = TypeVar("T")


class Agreement(Protocol):
    """A check that all ranks are about to make the same exchanges, in its two forms."""

    @property
    def label(self) -> str:
        """Text that a run compares over all ranks before it calls `in_run`."""
        ...

    def in_run(self, control: Control) -> None:
        """Compares what the label leaves open, and makes the communicators that the exchanges
        need.
        """
        ...

    def standalone(self) -> None:
        """Compares everything, outside a run."""
        ...


class StepHost(Protocol):
    """Runs a step's programs, and gives the step what it needs of other ranks to prepare them.

    Implemented by `jaxcross.jobs.host.JobHost` and by `jaxcross.runtime.standalone.Standalone`.
    """

    @property
    def in_run(self) -> bool:
        """Whether a runner orders the exchanges. If not, calls come in the same order on every
        rank, and so what this process remembers of earlier calls is the same on every rank.
        """
        ...

    @property
    def is_only_job(self) -> bool:
        """Whether nothing else runs next to the step; the same on every rank."""
        ...

    @property
    def steps_left(self) -> int | None:
        """The number of steps that this rank still expects to make; None if that is not known."""
        ...

    def cut_before_restart(self, key: str) -> int | None:
        """Returns the number of segments that a step with this key was cut into before a restart,
        if known.
        """
        ...

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Notes the number of segments for a restart."""
        ...

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:
        """Whether the ranks still have to agree on `program` before it runs here; the same on every
        rank.

        Args:
            program: The program.
            step: An object that stands for its step.
            candidate: Whether it is only tried, in a search for the fastest cut.
        """
        ...

    def agree(self, agreement: Agreement) -> None:
        """Makes an agreement. Waits for all ranks.

        Raises:
            ExchangeError: On every rank: the ranks differ.
        """
        ...

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank while nothing else exchanges. Waits for all ranks."""
        ...

    def compiling(self, name: str) -> AbstractContextManager[None]:
        """Returns a context that records the time in it as compilation of `name`."""
        ...

    def run(self, compiled: Compiled, leaves: Sequence[object], step: object) -> PyTree:
        """Runs one step on its flat arguments. Waits for its exchanges, not for the results to be
        computed.

        Args:
            compiled: The executables.
            leaves: The flat arguments.
            step: The object that stands for the step in `first_use`.
        """
        ...
