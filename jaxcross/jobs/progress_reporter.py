"""Shows a run's progress, both as lines on standard error and as a file for other processes.

Once per second, a thread on rank 0 gathers the progress of all jobs. It only reads counters that
the jobs and the flight recorder maintain anyway, so steps don't have to report anything, and
training isn't slowed down.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Self, final

from jaxcross.errors import shortened
from jaxcross.health import Activity, FlightRecorder
from jaxcross.jobs.engine import JobEngine
from jaxcross.report import (
    PROGRESS_FILE,
    JobProgress,
    LatestMetric,
    RunProgress,
    StepRate,
    doing_text,
    metric_of,
    run_lines,
)

VARIABLE = "JAXCROSS_PROGRESS"
FIRST_S = 3.0
"""Seconds until a run's first lines. Shorter runs don't print any progress."""

_LEAST_S = 10.0
_MOST_S = 60.0
_GROWS_AFTER = 10
_LOOK_S = 1.0


def interval_of(progress: bool | float | None, environ: Mapping[str, str]) -> Interval:
    """Works out when lines are due. The variable `JAXCROSS_PROGRESS` overrides the argument.

    Raises:
        ValueError: The variable isn't a number of seconds.
    """
    text = environ.get(VARIABLE, "")
    if text:
        try:
            every_s = float(text)
        except ValueError:
            every_s = -1.0
        if not 0 <= every_s < math.inf:
            raise ValueError(
                f"`{VARIABLE}` in the environment must be seconds between lines of progress, 0 for "
                f"none, got {text!r}."
            )
        return Interval(every_s, never=not every_s)
    if isinstance(progress, bool) or progress is None:
        return Interval(None, never=progress is False)
    return Interval(float(progress))


@final
class Interval:
    """Decides when the next lines are due.

    Args:
        every_s: The seconds between lines. If None, the interval starts at 10 s and grows to a
            minute in a long run.
        never: Whether to print no lines at all.
    """

    def __init__(self, every_s: float | None, *, never: bool = False) -> None:
        self.never = never
        self._every_s = every_s
        self._next_s = FIRST_S if every_s is None else min(FIRST_S, every_s)

    def due(self, run_s: float) -> bool:
        """Whether lines are due `run_s` seconds after the start of the run.

        If so, the next lines are due one interval later.
        """
        if self.never or run_s < self._next_s:
            return False
        growing_s = min(max(_LEAST_S, run_s / _GROWS_AFTER), _MOST_S)
        self._next_s = run_s + (growing_s if self._every_s is None else self._every_s)
        return True


@final
class ProgressReporter:
    """A context in which rank 0 shows the jobs' progress. A no-op on other ranks.

    Args:
        jobs: Returns the jobs, including those that joined later.
        flight: The flight recorder, which knows what this rank is currently doing and where its
            event folder is.
        rank: This rank.
        ranks: The number of ranks.
        progress: See `Runner`.
        environ: The environment.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[JobEngine]],
        *,
        flight: FlightRecorder,
        rank: int,
        ranks: int,
        progress: bool | float | None,
        environ: Mapping[str, str],
    ) -> None:
        self._jobs = jobs
        self._flight = flight
        self._rank = rank
        self._ranks = ranks
        self._interval = interval_of(progress, environ)
        self._shown = progress is not False
        self._paces: dict[str, StepRate] = {}
        self._metrics: dict[str, LatestMetric] = {}
        self._begun_s = 0.0
        self._printed = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxcross-progress", daemon=True)

    def __enter__(self) -> Self:
        self._begun_s = time.monotonic()
        self._flight.work_begun.set()
        if self._rank == 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rank != 0:
            return
        self._over.set()
        # Don't wait any longer: if standard error is a full pipe that nobody reads, the thread's
        # write will never return.
        self._thread.join(_LOOK_S)
        if not self._thread.is_alive():
            self.look(time.monotonic(), over=True)

    def _watch(self) -> None:
        self.look(self._begun_s)
        while not self._over.wait(_LOOK_S):
            self.look(time.monotonic())

    def look(self, now_s: float, *, over: bool = False) -> None:
        """Writes the jobs' current progress to the file, and prints it if lines are due."""
        run = RunProgress(
            run=self._flight.run,
            ranks=self._ranks,
            at_s=time.time(),
            run_s=now_s - self._begun_s,
            over=over,
            shown=self._shown,
            jobs=tuple(self._progress_of(job, now_s) for job in self._jobs()),
        )
        self._flight.replace_file(PROGRESS_FILE, run.to_json())
        if self._printed if over else self._interval.due(run.run_s):
            self._printed = True
            # A closed standard error is no reason to stop training.
            with suppress(OSError, ValueError, AttributeError):
                print("\n".join(run_lines(run)), file=sys.stderr, flush=True)

    def _progress_of(self, job: JobEngine, now_s: float) -> JobProgress:
        activity = None if job.status else self._activity(job.name)
        doing = "" if activity is None else doing_text(activity.what, local=activity.local)
        return JobProgress(
            name=job.name,
            step=job.step,
            steps=job.planned_steps,
            steps_per_s=self._paces.setdefault(job.name, StepRate()).look(now_s, job.steps_made),
            doing=shortened("paused" if job.paused else doing, 60),
            doing_s=0.0 if activity is None or job.paused else max(0.0, now_s - activity.since_s),
            metric=self._metric_of(job),
            status=job.status or "",
        )

    def _metric_of(self, job: JobEngine) -> str:
        """Returns the metric to show: the sweep's once it's been logged, otherwise the loss."""
        chosen = ""
        observer = job.metrics.observer
        if observer is not None:
            chosen = self._metrics.setdefault(job.name, LatestMetric()).look(
                job.history, observer.metric
            )
        return chosen or metric_of(job.history)

    def _activity(self, job: str) -> Activity | None:
        """Returns the job's current activity. Work takes precedence over waiting."""
        own = [activity for activity in self._flight.current() if activity.job == job]
        return min(own, key=_rank_of, default=None)


def _rank_of(activity: Activity) -> tuple[int, float]:
    first = ("compile", "exchange", "compute")
    return first.index(activity.what) if activity.what in first else len(first), activity.since_s
