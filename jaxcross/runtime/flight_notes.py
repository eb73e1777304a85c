"""Passes facts about jobs to the flight recorder, so that a post-mortem shows what ran."""

from __future__ import annotations

from typing import final

from jaxcross.health.flight_recorder import FlightRecorder
from jaxcross.interleave.instrument import Instrument


@final
class FlightNotes(Instrument):
    """Writes job statuses to the event file. Leaves out the losses, which come on every step."""

    def __init__(self, flight: FlightRecorder) -> None:
        self._flight = flight

    def note(
        self, *, job: str, kind: str, step: int = -1, value: float | str | None = None
    ) -> None:
        if kind != "loss":
            self._flight.note(f"{kind}: {value}", job=job, step=step)
