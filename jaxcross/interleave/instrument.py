"""The spans and notes of a run, and the base class for listeners that receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

PARAMETER_SERVER = "parameter server"
"""Label of a job's exchanges with parameter servers.

Such a span has no counterpart on other ranks.
"""

ON_ALL_RANKS = "together"
"""Label of `job.run_on_all_ranks`: all exchange lanes work at once, e.g. to save a checkpoint."""

SpanKind = Literal["compute", "collective", "vote", "input", "compile", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval on one rank, measured by that rank's `time.monotonic_ns`.

    Attributes:
        rank: The rank that measured it.
        job: Name of the job, or "" if the span belongs to no job (e.g. a vote).
        step: The job's step, counted from 1, so step n produces state n. 0 for work before the
            first step. A call that doesn't count as a step has the number of the step before it.
        segment: Index of the segment in its program, or -1 if there's none.
        kind: The kind of work. `input` is the preparation of a batch, and `host` is the job's own
            work on the host.
        lane: Index of the lane among those of its kind.
        start_ns: When the work began. For compute, when the device was free to begin it.
        end_ns: When its outputs were available.
        ready_ns: When its inputs were available. `start_ns - ready_ns` is time spent in a queue.
        nbytes: Bytes put on the wire (collective), or the size of the batch (input).
        label: Free text. An exchange that an emulated link delayed is labelled `emulated`. A
            batch's input is labelled with the storage level that reading it waited for.
        in_step: False for a call that isn't a step of the job, such as an evaluation.
        other_calls: How many of the job's calls up to and including this one exchanged something
            but weren't steps.
    """

    rank: int
    job: str
    step: int
    segment: int
    kind: SpanKind
    lane: int
    start_ns: int
    end_ns: int
    ready_ns: int
    nbytes: int = 0
    label: str = ""
    in_step: bool = True
    other_calls: int = 0

    @property
    def number(self) -> int:
        """Identifies a call of the job. Identical across ranks for a call that exchanges."""
        return self.step + self.other_calls


class Instrument:
    """Base class for listeners of a run. A hook that you don't override is never called.

    Hooks are called from lane and job threads, and several threads may call at once. So a hook must
    be quick and thread-safe, and it must not raise.
    """

    def writes_to(self) -> str:
        """Returns the file or folder that no other instrument may write; empty if there is none."""
        return ""

    def span(self, span: Span) -> None:
        """Called when a piece of work has ended on this rank."""

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        """Called with a fact for the user.

        `kind` is `loss` with a number, or `status` with a text. A job's last note has the kind
        `done` if the job ran to its end, and `closed` if it didn't; its value is the job's status.
        After that note, nothing else that the job logged is read back.
        """

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Called with what a job logged after a step, once the values have been read back.

        `values` is a tree of NumPy arrays and numbers.
        """


class Listeners:
    """The hooks of several instruments, except those that aren't overridden."""

    def __init__(self, instruments: Iterable[Instrument] = ()) -> None:
        instruments = tuple(instruments)
        self._span = tuple(i.span for i in instruments if type(i).span is not Instrument.span)
        self._note = tuple(i.note for i in instruments if type(i).note is not Instrument.note)
        self._metrics = tuple(
            i.metrics for i in instruments if type(i).metrics is not Instrument.metrics
        )

    def span(self, span: Span) -> None:
        for hook in self._span:
            try:
                hook(span)
            except Exception as error:
                _name_instrument(error, hook)
                raise

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        for hook in self._note:
            try:
                hook(job=job, kind=kind, step=step, value=value)
            except Exception as error:
                _name_instrument(error, hook)
                raise

    def metrics(self, *, job: str, step: int, values: object) -> None:
        for hook in self._metrics:
            try:
                hook(job=job, step=step, values=values)
            except Exception as error:
                _name_instrument(error, hook)
                raise


def _name_instrument(error: Exception, hook: Callable[..., None]) -> None:
    error.add_note(
        f"raised by `{hook.__qualname__}`, a hook of an instrument, which must not raise"
    )


class SpanLog(Instrument):
    """Keeps all spans and notes in order of arrival. List appends are atomic in CPython."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.notes: list[tuple[str, str, int, float | str | None]] = []

    def span(self, span: Span) -> None:
        self.spans.append(span)

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        self.notes.append((job, kind, step, value))
