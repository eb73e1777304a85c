"""Tracks the best value of a metric and decides when to stop early. Pure.

We don't use Flax's version (`flax.training.early_stopping`) because it can only minimise a metric,
and only supports patience in evaluations, not in steps. It also has trouble with NaN: if the first
value is NaN, nothing ever compares as better, so NaN remains the best value forever.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Literal, final

Mode = Literal["min", "max"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best value of a metric so far. NaN and infinities never qualify.

    Attributes:
        metric: The metric's name, such as `eval/accuracy`.
        mode: Whether the smallest or the largest value is the best.
        min_delta: A value only counts as an improvement if it's better by more than this.
        value: The best value; None until there's been a finite value.
        step: The job's step at which the best value was found.
        since: How many evaluations there have been since.
    """

    metric: str
    mode: Mode
    min_delta: float = 0.0
    value: float | None = None
    step: int = 0
    since: int = 0

    def update(self, step: int, value: float) -> Best:
        """Returns the record after an evaluation at `step` that yielded `value`."""
        if self._improves(value):
            return replace(self, value=value, step=step, since=0)
        return replace(self, since=self.since + 1)

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.value is None:
            return True
        return (value - self.value if self.mode == "max" else self.value - value) > self.min_delta

    @property
    def key(self) -> str:
        """The key under which a checkpoint's notes store the value.

        The key includes both the metric and the mode. If you restart a job with a different metric
        or mode, the old best value is meaningless; since the restart looks for a different key, it
        simply won't find it.
        """
        return f"{self.mode} {self.metric}"

    def to_text(self) -> str:
        """Serializes the best value and the counters, for a checkpoint."""
        return json.dumps([None if self.value is None else self.value.hex(), self.step, self.since])

    def resumed(self, text: str) -> Best:
        """Returns a copy whose value and counters come from a text written by `to_text`.

        Raises:
            ValueError: `text` wasn't written by `to_text`.
        """
        try:
            value, step, since = json.loads(text)
            found = None if value is None else float.fromhex(value)
        except (TypeError, ValueError, RecursionError):
            found = math.nan
            step = None
            since = None
        if (
            type(step) is not int
            or type(since) is not int
            or (found is not None and not math.isfinite(found))
        ):
            raise ValueError(
                f"the best value of `{self.metric}` in a checkpoint's notes must be a JSON list of "
                f"a finite value and two steps, got {text!r:.60}. Restore an older checkpoint, or "
                "name another directory"
            )
        return replace(self, value=found, step=step, since=since)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """Stops a job whose metric no longer improves. Set either `patience` or `patience_steps`.

    Attributes:
        best: The best value so far.
        patience: Stop after this many evaluations without an improvement.
        patience_steps: Stop at the first evaluation that comes at least this many steps after the
            best evaluation so far.
    """

    best: Best
    patience: int | None = None
    patience_steps: int | None = None

    def reason(self, step: int) -> str:
        """Returns why to stop after the evaluation at `step`, or "" to keep training."""
        since_steps = step - self.best.step
        by_count = self.patience is not None and self.best.since >= self.patience
        by_steps = (
            self.patience_steps is not None
            and self.best.since > 0
            and since_steps >= self.patience_steps
        )
        if not (by_count or by_steps):
            return ""
        n, unit = (self.best.since, "evaluation") if by_count else (since_steps, "step")
        waited = f"{n} {unit}{'s' if n != 1 else ''}"
        if self.best.value is None:
            return f"`{self.best.metric}` was not finite in {waited}"
        than = f"{self.best.value:.6g}, its value at step {self.best.step}"
        return f"`{self.best.metric}` has not been better than {than}, for {waited}"
