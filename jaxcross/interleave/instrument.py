"""The spans and notes of a run, and the base class for listeners that receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

PARAMETER_SERVER = "parameter server"
"""Label of a job's exchanges with parameter servers.

Other ranks have no matching span, because each rank talks to its parameter servers on its own.
"""

ON_ALL_RANKS = "together"
"""Label of `job.run_on_all_ranks` calls, which occupy the exchange lanes of all ranks at once, e.g.
to save a checkpoint.
"""

SpanKind = Literal["compute", "collective", "vote", "input", "compile", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One interval of work on one rank, timed with that rank's `time.monotonic_ns`.

    Attributes:
        rank: The rank on which the work was done.
        job: Name of the job, or "" for work that doesn't belong to any job, such as a vote.
        step: The job's step. Steps are counted from 1, so step n produces state n; 0 stands for
            work before the first step. A call that isn't a step (e.g. an evaluation) gets the
            number of the preceding step.
        segment: Index of the segment in its program, or -1 for work outside a program.
        kind: The kind of work. `input` means preparing a batch, and `host` means work that the job
            itself does on the host.
        lane: Index among the lanes of the same kind.
        start_ns: When the work began. For a compute segment, that's when it has been dispatched and
            the device is done with the previous segment.
        end_ns: When the outputs were available.
        ready_ns: When the inputs became available. The work spent `start_ns - ready_ns` in a queue.
        nbytes: For `collective`, the number of bytes put on the wire. For `input`, the size of the
            batch.
        label: Free text. Exchanges delayed by an emulated link are labelled `emulated`. The input
            of a batch is labelled with the storage level that the read had to wait for.
        in_step: False for a call that isn't one of the job's steps, such as an evaluation.
        other_calls: How many calls with exchanges that aren't steps the job has made, up to and
            including this call.
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
        """A number for the job's call. Identical across ranks if the call exchanges anything."""
        return self.step + self.other_calls


def segment_name(job: str, kind: SpanKind, segment: int) -> str:
    """Returns a segment's name in traces, both in our own and in those of `jax.profiler`."""
    return f"{job} {'exchange' if kind == 'collective' else kind} {segment}"


class Instrument:
    """Base class for objects that listen to a run. Override whichever hooks you need.

    Hooks are called directly from the run's threads (those that compute, exchange or run a job's
    function), possibly from several at once. So a hook must return quickly, be thread-safe, and
    never raise. Hooks that you don't override are never called.
    """

    def writes_to(self) -> str:
        """Returns the file or folder that this instrument writes, or "" if there is none."""
        return ""

    def span(self, span: Span) -> None:
        """Called when a segment, a vote or other work has finished on this rank."""

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        """Called when something happens that the user should know about.

        A `loss` note has a number as its value, and a `status` note has a text. The last note of
        every job is `done` if the job's function ran to completion and `closed` otherwise, with the
        job's final status as its value. There are no other kinds of notes, and no `metrics` call
        for the job comes after its last note.
        """

    def metrics(self, *, job: str, step: int, values: object) -> None:
        """Called with the values that a job logged after a step, once they've been read back to the
        host.

        `values` is a tree of NumPy arrays and numbers.
        """


class Listeners:
    """Calls the hooks of several instruments, skipping those that aren't overridden."""

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
        f"raised by `{hook.__qualname__}`, a hook of an instrument. Hooks must not raise, so catch "
        "the error there."
    )


class SpanLog(Instrument):
    """Collects all spans and notes in the order of their arrival, e.g. for tests."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.notes: list[tuple[str, str, int, float | str | None]] = []

    def span(self, span: Span) -> None:
        self.spans.append(span)

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        self.notes.append((job, kind, step, value))
