"""Spans and notes of a run, and the base class of their listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

PARAMETER_SERVER = "parameter server"
"""Label of the spans of a job's exchange with parameter servers: it has no counterpart on other
ranks.
"""

TOGETHER = "together"
"""Label of the spans of `job.run_on_all_ranks`: work on all ranks' exchange lanes at once, as
saving.
"""

SpanKind = Literal["compute", "collective", "vote", "input", "compile", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval on one rank, in that rank's `time.monotonic_ns`.

    Attributes:
        rank: The rank that measured it.
        job: Name of the job, or "" for a span that belongs to no job (a vote).
        step: Step of the job, counted from 1: step n makes state n. 0 for work before the first
            step. For a call that does not count as a step, the step before it.
        segment: Index of the segment in its program, -1 for none.
        kind: The kind of work. `input` is the preparation of a batch, `host` a job's own work.
        lane: Number of the lane of that kind.
        start_ns: The time when it began; for compute, when the device could begin it.
        end_ns: The time when its outputs were there.
        ready_ns: The time when its own inputs were available; `start_ns - ready_ns` is time spent
            in a queue.
        nbytes: Bytes handed to the wire (collective), or held by the batch (input).
        label: Free text; an exchange held back by an emulated link is labelled `emulated`, the
            input of a batch by the level of storage that reading it waited for.
        in_step: False for a call that is not a step of the job, such as an evaluation.
        other_calls: Number of such calls of the job that exchange, up to and including this one.
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
        """Identifies a call of the job; the same on all ranks for a call that exchanges."""
        return self.step + self.other_calls


class Instrument:
    """Base class of the listeners of a run. A hook that is not overridden is never called.

    Hooks are called from lane and job threads, one at a time for each thread: they must be quick
    and thread-safe, and must not raise.
    """

    def writes_to(self) -> str:
        """Returns the file or folder that only this instrument may write in a run; empty if there
        is none.
        """
        return ""

    def span(self, span: Span) -> None:
        """Called when something ended on this rank."""

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        """Called with a fact for a person.

        `kind` is `loss` with a number or `status` with a text. A job's last note is `done` if it
        came to its end, and `closed` if it did not, each with its status: nothing more that it
        logged is read back after that.
        """

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Called with what a job logged after a step, once it is read back: a tree of NumPy's
        arrays and numbers.
        """


class Listeners:
    """The hooks of several instruments, without those that are not overridden."""

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
    """Keeps every span and note in order of arrival. Appending to a list is atomic in CPython."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.notes: list[tuple[str, str, int, float | str | None]] = []

    def span(self, span: Span) -> None:
        self.spans.append(span)

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        self.notes.append((job, kind, step, value))
