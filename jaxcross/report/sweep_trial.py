"""`SweepTrial`: one trial of a sweep, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTrial:
    """One trial.

    Attributes:
        number: Number of the trial, from 0, in the order in which the search was asked for trials.
        name: The name of its job, and of its files.
        params: Its parameters.
        status: `finished`, `pruned`, `failed`, or `stopped` by `job.stop`.
        step: Number of steps that it made.
        value: The last value of the metric that it logged; None if it logged none.
        digest: A digest of its final state on all ranks, if it finished.
        error: Why it failed.
        values: The metric as pairs `(step, value)`.
    """

    number: int
    name: str
    params: dict[str, Any]
    status: Literal["finished", "pruned", "failed", "stopped"]
    step: int
    value: float | None
    digest: str = ""
    error: str = ""
    values: tuple[tuple[int, float], ...] = field(default=(), repr=False)
