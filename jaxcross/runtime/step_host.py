"""The interface between a step and the code that runs it: a runner's job, or the step itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from jaxcross._pytree import PyTree
from jaxcross.program import Compiled, Program
from jaxcross.world import Control

T = TypeVar("T")


class Agreement(Protocol):
    """A check that all ranks are about to make the same exchanges, in two forms."""

    @property
    def label(self) -> str:
        """A text that a run compares across ranks before it calls `in_run`."""
        ...

    def in_run(self, control: Control) -> None:
        """Compares what the label leaves open.

        Also creates the communicators that the exchanges need.
        """
        ...

    def standalone(self) -> None:
        """Compares everything, outside a run."""
        ...


class StepHost(Protocol):
    """Runs a step's programs, and provides what the step needs from other ranks for that.

    Implemented by `jaxcross.jobs.engine.JobEngine` and by `jaxcross.runtime.standalone.Standalone`.
    """

    @property
    def in_run(self) -> bool:
        """Whether a runner orders the exchanges.

        If not, every rank makes its calls in the same order, so what this process remembers of
        earlier calls is identical across ranks.
        """
        ...

    @property
    def is_only_job(self) -> bool:
        """Whether nothing else runs alongside the step. Identical across ranks."""
        ...

    @property
    def steps_left(self) -> int | None:
        """How many more steps this rank expects to make, or None if that's unknown."""
        ...

    def cut_before_restart(self, key: str) -> int | None:
        """Returns into how many segments this step was cut before a restart, or None if unknown."""
        ...

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Saves the number of segments for a restart."""
        ...

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:
        """Whether the ranks still have to agree on `program` before it runs here.

        Identical across ranks.

        Args:
            program: The program.
            step: An object that identifies the program's step.
            candidate: Whether the program is only tried out, in a search for the fastest cut.
        """
        ...

    def agree(self, agreement: Agreement) -> None:
        """Carries out an agreement. Waits for all ranks.

        Raises:
            ExchangeError: The ranks differ. Raised on every rank.
        """
        ...

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on every rank while nothing else exchanges. Waits for all ranks."""
        ...

    def compiling(self, name: str) -> AbstractContextManager[None]:
        """Returns a context whose duration is recorded as compilation of `name`."""
        ...

    def run(self, compiled: Compiled, leaves: Sequence[object], step: object) -> PyTree:
        """Runs one step on its flat arguments.

        Waits for the step's exchanges, but not for its results to be computed.

        Args:
            compiled: The executables.
            leaves: The flat arguments.
            step: The object that identifies the step in `first_use`.
        """
        ...
