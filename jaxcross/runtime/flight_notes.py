"""Facts about jobs for the flight recorder, where they tell a post-mortem what the run was about."""

from __future__ import annotations

from typing import final

from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.interleave.instrument import Instrument


@final
class FlightNotes(Instrument):
    """Passes what became of jobs on to the event file; losses, of which there is one a step, are not for it."""

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight

    def note(self, *, job: str, kind: str, step: int = -1, value: float | str | None = None) -> None:
        if kind != "loss":
            self._flight.note(f"{kind}: {value}", job=job, step=step)
