"""The interface between a step and whatever runs it: a runner's job, or the step itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from jaxcross._pytree import PyTree
from jaxcross.program import Compiled, Program
from jaxcross.world import Control

T = TypeVar("T")


class Agreement(Protocol):
    """A check that all ranks are about to issue the same exchanges, in two variants."""

    @property
    def label(self) -> str:
        """A text that a run compares between ranks before it calls `in_run`."""
        ...

    @property
    def text(self) -> str:
        """The label as errors show it if it differs between ranks."""
        ...

    def in_run(self, control: Control) -> None:
        """Compares everything that the label doesn't cover. Used in a run.

        It also creates the communicators that the exchanges need.
        """
        ...

    def standalone(self) -> None:
        """Compares everything. Used outside a run."""
        ...


class StepHost(Protocol):
    """Runs a step's programs, and communicates with other ranks on the step's behalf.

    Implemented by `jaxcross.jobs.engine.JobEngine` and by `jaxcross.runtime.standalone.Standalone`.
    """

    @property
    def in_run(self) -> bool:
        """Whether a runner determines the order of exchanges.

        Without a runner, that's up to the script: every rank must call its steps in the same order,
        which means that whatever this process remembers about earlier calls is identical across
        ranks.
        """
        ...

    @property
    def is_only_job(self) -> bool:
        """Whether nothing else runs alongside the step. Identical across ranks."""
        ...

    @property
    def steps_left(self) -> int | None:
        """How many more steps this rank expects to make, or None if it doesn't know."""
        ...

    def cut_before_restart(self, key: str) -> int | None:
        """Returns the number of segments into which the step was cut before a restart, or None."""
        ...

    def remember_cut(self, key: str, n_segments: int) -> None:
        """Saves the number of segments, so that it's available after a restart."""
        ...

    def first_use(self, program: Program, step: object, *, candidate: bool = False) -> bool:
        """Whether the ranks have to agree on `program` before it runs here for the first time.

        Identical across ranks.

        Args:
            program: The program.
            step: An object that identifies the step to which the program belongs.
            candidate: Whether the program is only being tried in a search for the fastest cut.
        """
        ...

    def agree(self, agreement: Agreement) -> None:
        """Lets the ranks agree. Waits for all ranks.

        Raises:
            ExchangeError: The ranks don't agree. Raised on every rank.
        """
        ...

    def run_on_all_ranks(self, label: str, work: Callable[[Control], T]) -> T:
        """Runs `work(control)` on all ranks while nothing else exchanges. Waits for all ranks."""
        ...

    def compiling(self, name: str) -> AbstractContextManager[None]:
        """Returns a context whose duration is recorded as the compilation of `name`."""
        ...

    def run(self, compiled: Compiled, leaves: Sequence[object], step: object) -> PyTree:
        """Runs one step on flattened arguments.

        Waits for the step's exchanges, but not for its results to be computed.

        Args:
            compiled: The executables.
            leaves: The flat arguments.
            step: The object that identifies the step in `first_use`.
        """
        ...
