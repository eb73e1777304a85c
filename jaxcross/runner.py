"""`Runner`: several jobs, ordinary loops, share this rank's device. `run`: the same for the plain loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import jax

from jaxcross.errors import JobError
from jaxcross.report import JobFacts, Recorder, Report
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.events import Instrument, Listeners
from jaxcross.runtime.job import JobContext, runner_active
from jaxcross.runtime.link import Link
from jaxcross.runtime.policy import Policy, RoundRobin, Weighted
from jaxcross.world import World, current


class Runner:
    """Runs jobs that take turns on this rank's device, the same jobs on every rank.

    Args:
        world: From `jaxcross.initialize()`; the one that was initialized if None.
        policy: `RoundRobin()` crosses the jobs over, `Weighted(shares)` too, by shares of device and link,
            `Sequential()` runs one after the other. Same on every rank.
        instruments: Told of spans and notes while it runs.
        depth: Compute segments on the device at once; 2 keep it busy between segments.
        link: Hold exchanges as a slow network would. A string describes a real link for the report.

    Example:
        >>> with jaxcross.Runner(world) as runner:
        ...     runner.add("lr-0.1", train, lr=0.1)
        ...     runner.add("lr-0.4", train, lr=0.4)
        ...     report = runner.run()
    """

    def __init__(
        self,
        world: World | None = None,
        policy: Policy | None = None,
        *,
        instruments: Iterable[Instrument] = (),
        depth: int = 2,
        link: Link | str | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"`depth` is {depth}: a compute lane needs room for at least 1 segment")
        self.world = world if world is not None else current()
        self.policy = policy if policy is not None else RoundRobin()
        self.depth, self.link = depth, link
        self.jobs: list[JobContext] = []
        self.report: Report | None = None
        self._recorder = Recorder()
        self._listeners = Listeners((self._recorder, *instruments))
        self._used = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to end: `run` ends its threads itself."""

    def add(self, name: str, fn: Callable[..., Any], /, **kwargs: Any) -> JobContext:
        """Adds a job: `fn(job, **kwargs)` will run in a thread of its own. Returns what `fn` will receive as `job`.

        Raises:
            ValueError: The name is empty or taken.
            TypeError: `fn` cannot be called.
        """
        if self._used:
            raise JobError(f"Job `{name}` comes too late: this runner has run. Make a new Runner.")
        if not isinstance(name, str) or not name:
            raise ValueError(f"`{name!r}` is no name for a job: use a text that is not empty")
        if any(job.name == name for job in self.jobs):
            raise ValueError(f"There is a job `{name}` already. Reports and errors need one name for each job.")
        if not callable(fn):
            raise TypeError(f"Job `{name}` needs a function `fn(job, **kwargs)`, not `{type(fn).__name__}`")
        job = JobContext(name, fn, kwargs, listeners=self._listeners, world=self.world)
        self.jobs.append(job)
        return job

    def run(self) -> Report:
        """Runs all jobs to their end; waits for it, and for all ranks.

        Returns:
            The report, the same on every rank.

        Raises:
            JobError: It has run, or another run is in progress, this call being in one of its jobs perhaps.
            JobError, ExchangeError: Jobs failed: raised on every rank after the others have ended, the first one with
                notes on further ones. `report` then holds what was measured.
            KeyboardInterrupt: Somebody interrupted a rank; raised on every rank, which all stopped at the same step.
            ValueError: There are no jobs, or `Weighted` has not a share for each.
        """
        if not self.jobs:
            raise ValueError(
                "A runner without jobs has nothing to run. Call `runner.add(name, fn)` on every rank first."
            )
        if self._used:
            raise JobError("This runner has run. Make a new Runner for another run.")
        if runner_active(self.world):
            raise JobError(
                "A run is in progress in this process, and two at once would mix up their messages. Add these jobs to "
                "its runner before it runs (`runner.add(name, fn)`), or run them after it. A job calls its step itself."
            )
        if isinstance(self.policy, Weighted) and len(self.policy.shares) != len(self.jobs):
            raise ValueError(f"`Weighted` has {len(self.policy.shares)} shares, the runner {len(self.jobs)} jobs")
        self._used = True
        self._agree()
        link = self.link if isinstance(self.link, Link) else None
        driver = Driver(
            world=self.world, jobs=[(job.name, job.thread) for job in self.jobs], policy=self.policy, depth=self.depth,
            listeners=self._listeners, link=link,
        )  # fmt: skip
        for number, job in enumerate(self.jobs):
            job.attach(driver, number)
        start_ns = time.monotonic_ns()
        interrupt: KeyboardInterrupt | None = None
        try:
            driver.run()
        except KeyboardInterrupt as error:
            interrupt = error
        end_ns = time.monotonic_ns()
        for job in self.jobs:
            job.close()
        with self.world.watching(job="", step=0, segment=-1, what="report"):
            self.report = self._report(start_ns, end_ns)
        if interrupt is not None:
            raise interrupt
        self._raise_errors()
        return self.report

    def _agree(self) -> None:
        """Waits for all ranks: they must have the same jobs and the same policy, or their lanes would never meet."""
        mine = json.dumps({"jobs": [job.name for job in self.jobs], "policy": repr(self.policy)})
        with self.world.watching(job="", step=0, segment=-1, what="start of the run"):
            texts = self.world.control.allgather_text(mine)
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise JobError(
                    f"Ranks 0 and {rank} want to run different things: {texts[0]} and {text}. Add the same jobs in the "
                    "same order, with the same policy, on every rank."
                )

    def _report(self, start_ns: int, end_ns: int) -> Report:
        devices = jax.local_devices()
        return Report.build(
            self._recorder.spans(),
            jobs=[_facts(job) for job in self.jobs],
            rank=self.world.rank,
            size=self.world.size,
            start_ns=start_ns,
            end_ns=end_ns,
            policy=self.policy.name,
            placement=f"{devices[0].platform}, {len(devices)} device{'s' if len(devices) > 1 else ''} a rank",
            link="" if self.link is None else str(self.link),
            dropped=self._recorder.dropped,
            control=self.world.control if self.world.size > 1 else None,
        )

    def _raise_errors(self) -> None:
        errors = [job.error for job in self.jobs if job.error is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"Also: {other}")
            raise errors[0]


class Job:
    """One job of `jaxcross.run`: the plain loop `state, metrics = step(state, batch)`.

    Attributes:
        name: Unique among the jobs.
        state: The latest state; final after the run. Same on all ranks for data-parallel steps.
        step: Steps done.

    Args:
        name: Unique among the jobs.
        step: A `crossover` step that returns `(state, metrics)`.
        state: The initial state, checked to be equal on all ranks.
        batches: This rank's batches.
        steps: Ends after so many steps, or with the shortest rank's data.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[Any, Any], Any],
        state: Any,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
    ) -> None:
        if not callable(step):
            raise TypeError(f"Job `{name}` needs a step function, not `{type(step).__name__}`")
        if steps is not None and steps < 0:
            raise ValueError(f"Job `{name}`: `steps` is {steps}, below 0")
        self.name, self.state, self.step = name, state, 0
        self._function, self._batches, self._steps = step, batches, steps

    def _run(self, job: JobContext) -> Any:
        self.state = job.restore(self.state)
        for batch in job.batches(self._batches, self._steps):
            result = self._function(self.state, batch)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"the step of job `{self.name}` returned no pair `(state, metrics)`")
            self.state, metrics = result
            job.state, self.step = self.state, self.step + 1
            job.log(metrics)
        return self.state


def run(
    jobs: Sequence[Job],
    *,
    policy: Policy | None = None,
    world: World | None = None,
    instruments: Iterable[Instrument] = (),
    depth: int = 2,
    link: Link | str | None = None,
) -> Report:
    """Runs plain training loops that share this rank's device. Waits for all ranks; see `Runner`.

    Example:
        >>> report = jaxcross.run([jaxcross.Job("a", step, state, batches, steps=100)])
    """
    with Runner(world, policy, instruments=instruments, depth=depth, link=link) as runner:
        for job in jobs:
            runner.add(job.name, job._run)
        return runner.run()


def _facts(job: JobContext) -> JobFacts:
    metrics: dict[str, float] = {}
    for _, values in job.history:
        if isinstance(values, dict):
            metrics.update({key: float(v) for key, v in values.items() if isinstance(v, int | float)})
    loss = metrics.pop("loss", None)
    return JobFacts(
        name=job.name, steps=job.step, examples_per_step=job.examples_per_step, final_loss=loss, metrics=metrics
    )
