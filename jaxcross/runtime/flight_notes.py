"""Facts about jobs for the flight recorder, so that a post-mortem shows what the run was about."""

from __future__ import annotations

from typing import final

from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.interleave.instrument import Instrument


@final
class FlightNotes(Instrument):
    """Writes each job's status to the event file, but not its losses, of which there is one a
    step.
    """

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        if kind != "loss":
            self._flight.note(f"{kind}: {value}", job=job, step=step)
