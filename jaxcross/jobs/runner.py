"""`Runner`: several jobs, each an ordinary training loop, share this rank's device.

A `Runner` gives each job's function a thread of its own and a `JobContext`, and owns whatever the
jobs of a run share: the driver with its lanes, the memory that jobs book, the checkpoints, the
files of metrics, and the report. It runs once. Before the jobs begin, all ranks compare their jobs
and settings, and at the end they build the report together.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from jaxcross._endings import JobStatus
from jaxcross._link import Link, current_link, described_link
from jaxcross.checkpoint import Checkpoints, Session
from jaxcross.errors import JobError
from jaxcross.health.abort import print_error
from jaxcross.health.deferred_signals import defer_signals
from jaxcross.interleave.instrument import Instrument, Listeners
from jaxcross.interleave.policy import Policy, RoundRobin, Start
from jaxcross.jobs import arguments
from jaxcross.jobs.admission import MemoryAdmission
from jaxcross.jobs.agreement import (
    agree,
    agreed_exit,
    claim_metrics,
    open_session,
    taken_over,
    text_of,
)
from jaxcross.jobs.arguments import check_job_name
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.job_run import JobRun, first_of
from jaxcross.jobs.outcome import compare_replicas, left_out, raise_errors, report_of, tell_unread
from jaxcross.jobs.progress import ProgressReporter
from jaxcross.jobs.stop_text import stop_text
from jaxcross.jobs.submissions import RegisteredFunctions
from jaxcross.plan.memory import memory_limit
from jaxcross.report import Report
from jaxcross.report.metric_files import MetricFiles
from jaxcross.report.record import Recorder
from jaxcross.runtime.chaos import chaos_of
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.flight_notes import FlightNotes
from jaxcross.runtime.paused_run import nobody_resumes
from jaxcross.runtime.stall_watch import after_run
from jaxcross.world import World, current_world


class Runner:
    """Runs jobs that take turns on this rank's device. Every rank runs the same jobs.

    Args:
        world: What `jaxcross.initialize()` returned. If None, the world that was initialized.
        policy: How jobs take turns. `RoundRobin()`, the default, interleaves the jobs,
            `Weighted(shares)` interleaves them by their shares of device and link, and
            `Sequential()` runs one job after the other. The same on every rank.
        checkpoints: Keeps the jobs' states on disk and resumes from there; see `Checkpoints`. The
            same on every rank, except for the directory.
        metrics: A folder in which rank 0 writes what each job logs, as one JSONL file and one CSV
            file per job. Pass it on every rank. After a restart from `checkpoints`, the files still
            contain each step only once.
        instruments: Receive spans and notes while the run is in progress.
        memory: The bytes of arrays that this rank may hold, as a number or a text such as `80GB`. A
            job whose step doesn't fit alongside the other jobs fails on every rank before its first
            step, and the other jobs continue. An array that several jobs pass to their steps
            without donating it, such as the base model under adapters, counts once. If None, the
            limit is what the device reports or, on CPUs, this rank's share of the memory of the
            machine or of its control group. May differ between ranks.
        events: A folder where each rank records what it does, for `jaxcross doctor --post-mortem`.
            If None, the environment variable `JAXCROSS_EVENTS` decides.
        progress: Whether to show how far the jobs are. By default, `jaxcross launch` draws a table
            if it runs on a terminal. Elsewhere, rank 0 prints a line per job to standard error,
            first after 3 s, then every 10 s, and once a minute in a long run. A number sets the
            seconds between lines. The environment variable `JAXCROSS_PROGRESS` overrides this
            argument.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `memory` isn't a number of bytes, `progress` is a number that isn't above 0,
            this rank can't write to the folder `events`, or the environment variable
            `JAXCROSS_CHAOS`, which is for tests, isn't a seed.

    Example:
        >>> with jaxcross.Runner(world) as runner:
        ...     runner.add("lr-0.1", train, {"lr": 0.1})
        ...     runner.add("lr-0.4", train, {"lr": 0.4})
        ...     report = runner.run()
    """

    def __init__(
        self,
        world: World | None = None,
        policy: Policy | None = None,
        *,
        checkpoints: Checkpoints | None = None,
        metrics: str | os.PathLike[str] | None = None,
        instruments: Iterable[Instrument] = (),
        memory: int | str | None = None,
        events: str | os.PathLike[str] | None = None,
        progress: bool | float | None = None,
    ) -> None:
        listening = arguments.checked_instruments(instruments)
        arguments.check_world(world)
        arguments.check_policy(policy)
        limit = memory_limit(memory)
        arguments.check_folder("`events`", events)
        arguments.check_folder("`metrics`", metrics)
        arguments.check_checkpoints(checkpoints)
        arguments.check_progress(progress)
        self.world = world if world is not None else current_world()
        # An estimate runs one job up to its first step and writes no files for the user.
        if self.world.estimate_request:
            listening, policy, events, checkpoints, metrics = (), None, None, None, None
        self.policy = policy if policy is not None else RoundRobin()
        self.checkpoints = checkpoints
        depth, start = arguments.depth_and_start(self.policy)
        self._depth = depth
        self._start: Start = start
        self._chaos = chaos_of(os.environ, self.world.rank)
        self._admission = MemoryAdmission.of(self.world, limit)
        self._runs: list[JobRun] = []
        self.report: Report | None = None
        self._recorder = Recorder()
        if events is not None:
            arguments.record_events(self.world.flight, events)
        self._writes_metrics = metrics is not None
        self._metric_files: MetricFiles | None = None
        if metrics is not None and self.world.rank == 0:
            self._metric_files = MetricFiles(
                os.fspath(metrics), None if checkpoints is None else checkpoints.path
            )
            listening = (*listening, self._metric_files)
            arguments.check_places(listening)
        self._listeners = Listeners((self._recorder, FlightNotes(self.world.flight), *listening))
        self._progress = ProgressReporter(
            lambda: self.jobs,
            flight=self.world.flight,
            rank=self.world.rank,
            ranks=self.world.size,
            progress=progress,
            environ=os.environ,
        )
        self._used = False
        self._driver: Driver | None = None
        self._lock = threading.RLock()  # jobs may be added by several threads
        self._functions = RegisteredFunctions()
        self._session: Session | None = None
        self._submitted: set[str] = set()  # submitted, but not added here yet

    @property
    def jobs(self) -> list[JobContext]:
        """The jobs that were added.

        After the run, they're in the order in which they joined, which is the same on every rank.
        """
        return [run.context for run in self._runs]

    @property
    def booked_bytes(self) -> int:
        """The most bytes that jobs had booked at the same time on this rank; see `memory`."""
        return self._admission.most_booked_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Does nothing, because `run` ends its own threads."""

    def add(self, name: str, fn: Callable[..., Any], kwargs: Mapping[str, Any] = {}) -> JobContext:
        """Adds a job: `fn(job, **kwargs)` will run in a thread of its own.

        You can also call this during the run, in any thread. Every rank has to add the job, but the
        ranks may add several jobs in different orders. The job joins between two steps of the other
        jobs, as soon as every rank has added it. `add` never waits.

        If a job joined an earlier run with the same checkpoints and this run already has it, `add`
        returns the existing job instead of adding another.

        Returns:
            The object that `fn` will receive as `job`.

        Raises:
            ValueError: The name is empty or already taken.
            TypeError: `fn` can't be called as `fn(job, **kwargs)`, `fn` is a generator function or
                a coroutine function, or `kwargs` isn't a mapping with string keys.
            JobError: The run has ended.
        """
        arguments.check_job(name, fn, kwargs)
        return self._add(name, fn, {**kwargs})

    def _add(self, name: str, fn: Callable[..., Any], kwargs: dict[str, Any]) -> JobContext:
        with self._lock:
            if (known := self._added_before(name)) is not None:
                return known
            self._check_name(name)
            run = self._job_run(name, fn, kwargs)
            if self._used:
                driver = self._driver
                attach = partial(run.attach, session=self._session)
                record = None if driver is None else driver.join(name, run.make_thread, attach)
                if record is None:
                    raise JobError(
                        f"Job `{name}` comes too late: this runner has run. Make a new Runner."
                    )
                if self._session is not None:
                    self._session.added(name)
            self._runs.append(run)
        return run.context

    def _job_run(self, name: str, fn: Callable[..., Any], arguments: dict[str, Any]) -> JobRun:
        return JobRun(
            name,
            fn,
            arguments,
            listeners=self._listeners,
            world=self.world,
            admission=self._admission,
            begin_files=partial(self._begin_files, name) if self._writes_metrics else None,
        )

    def register(self, name: str, fn: Callable[..., Any]) -> None:
        """Registers `fn` under a name, so that rank 0 can submit jobs that run it.

        Rank 0 adds such a job during the run with `submit(name, job=..., kwargs={...})`. Call
        `register` with the same arguments on every rank.

        Raises:
            ValueError: The name is empty or already taken.
            TypeError: `fn` can't be called.
        """
        self._functions.add(name, fn)

    def submit(self, function: str, *, job: str, kwargs: Mapping[str, Any] = {}) -> None:
        """Adds a job on all ranks, although only rank 0 calls this.

        The job runs `fn(job, **kwargs)`, where `fn` is the function registered as `function`. Call
        it during the run, in any thread; it doesn't wait. The other ranks receive the two names and
        the arguments as JSON, but never code.

        Raises:
            ValueError: No function is registered as `function`, `job` is empty or already taken, or
                the arguments are too long.
            TypeError: `kwargs` isn't a mapping with string keys, or JSON can't represent its
                values.
            JobError: The run hasn't begun or has ended, or this isn't rank 0.
        """
        if self.world.rank != 0:
            raise JobError(
                f"Job `{job}` was submitted on rank {self.world.rank}. Submit on rank 0; to add a "
                "job on every rank, use `runner.add`."
            )
        check_job_name(job)
        arguments.check_kwargs(job, kwargs)
        text = self._functions.request(function, job, {**kwargs})
        with self._lock:
            if self._added_before(job) is not None:
                return
            self._check_name(job)
            if self._driver is None or not self._driver.submit(text):
                raise JobError(
                    f"Job `{job}` cannot be submitted: jobs are, while `runner.run()` runs."
                )
            self._submitted.add(job)
            if self._session is not None:
                self._session.added(job, text)

    def _added_before(self, name: str) -> JobContext | None:
        # A job that joined an earlier run is part of this run from the beginning. If the function
        # that added it resumes from a step before the call of `add`, it calls `add` a second time.
        if self._session is None or name not in self._session.added_before:
            return None
        return next((job for job in self.jobs if job.name == name), None)

    def _check_name(self, name: str) -> None:
        if not name.isprintable():
            raise ValueError(f"the name of a job must have printable characters only, got {name!r}")
        if name in self._submitted or any(job.name == name for job in self.jobs):
            raise ValueError(
                f"There is a job `{name}` already. Reports and errors need one name for each job."
            )

    def _add_submitted(self, text: str) -> None:
        """Adds a submitted job. The driver calls this on every rank."""
        name, fn, arguments = self._functions.resolve(text, self.world.rank)
        # If this rank has already added a job of that name, that job is the one that joins.
        with (
            self._lock,
            suppress(ValueError),
        ):
            self._submitted.discard(name)
            self._add(name, fn, {**arguments})

    def run(self) -> Report:
        """Runs all jobs to their end. Waits for the jobs and for all ranks.

        Returns:
            The report, which is the same on every rank.

        Raises:
            JobError: This runner has already run; another run is in progress, possibly the one
                whose job makes this call; or another thread is in a step outside of any run.
            JobError, ExchangeError: Jobs failed, or were added but never joined because some rank
                didn't add them. The first such error is raised on every rank after the other jobs
                have ended, with notes about the further ones. `report` then has what was measured.
            KeyboardInterrupt: Someone interrupted a rank. It's raised on every rank after all of
                them have stopped at the same step, or only on the interrupted rank if all jobs had
                already ended. Before that, rank 0 prints what was saved of each job.
            SystemExit: The same with exit code 143, after SIGTERM on any rank.
            BaseException: The same for whatever your own handler of another signal raised: the
                ranks on which it raised get that exception, and the others `KeyboardInterrupt`.
            JobError: All remaining jobs are paused, and no thread or signal handler on any rank can
                resume them.
            ValueError: There are no jobs, or `Weighted` doesn't have one share per job.
        """
        with self.world.exchange_owner.run():
            report = self._run()
        if self.world.estimate_request and self._runs[0].context.status == JobStatus.STOPPED:
            raise SystemExit(0)  # the estimate was made and printed
        return report

    def _run(self) -> Report:
        link = current_link()
        # A thread that adds a job waits for this lock until its job can join.
        with self._lock:
            if self._used:
                raise JobError("This runner has run. Make a new Runner for another run.")
            arguments.check_jobs(len(self._runs), self.policy)
            if self.world.estimate_request:
                self._runs = first_of(self._runs, self.world)
            runs = tuple(self._runs)
            self._used = True
            self._agree(runs, link)
            if self._writes_metrics:
                claim_metrics(self.world, self._metric_files)
            if self.checkpoints is not None:
                names = [run.name for run in runs]
                self._session = open_session(self.checkpoints, self.world, names, self.policy)
                for name, fn, given in taken_over(
                    self._session, self._functions, self._check_name, self.world.rank
                ):
                    self._runs.append(self._job_run(name, fn, {**given}))
                runs = tuple(self._runs)
            driver = self._driver = Driver(
                world=self.world,
                jobs=[(run.name, run.make_thread) for run in runs],
                policy=self.policy,
                depth=self._depth,
                listeners=self._listeners,
                link=link,
                on_text=self._add_submitted,
                chaos=self._chaos,
                start=self._start,
            )
            for run, record in zip(runs, driver.records, strict=True):
                run.attach(driver, record, self._session)
        start_ns = time.monotonic_ns()
        # A signal's exception is kept until the reports and files below are complete: a rank that's
        # asked to stop while it saves is stopping already.
        with (
            self._progress,
            defer_signals() as held,
        ):
            try:
                stopped = driver.run(held)
            except BaseException:
                self._break_off()
                raise
            end_ns = time.monotonic_ns()
            # A thread that's just adding a job gets it into the list first.
            with self._lock:
                for run in self._runs:
                    run.close()
                if self._metric_files is not None:
                    self._metric_files.close()
                # Other ranks may have added the jobs in a different order. We assign a new list
                # because a list is empty while `sort` works on it, and another thread that reads
                # `jobs` would then find no jobs.
                self._runs = sorted(self._runs, key=lambda run: run.order)
            jobs = self.jobs
            if self._session is not None:
                for run in self._runs:
                    run.save_left()
                broke_off = not all(job.status == JobStatus.ENDED for job in jobs)
                self._session.close(unused=broke_off and not any(job.step for job in jobs))
            with after_run(self.world, "report"):
                compare_replicas(self.world, jobs)
                missing = left_out(
                    self.world, jobs, [*driver.router.left_out, *sorted(self._submitted)]
                )
                tell_unread(self.world, jobs)
            self.report = report_of(
                jobs,
                self._recorder,
                world=self.world,
                policy=self.policy.name,
                start_ns=start_ns,
                end_ns=end_ns,
                link=described_link(os.environ) if link is None else str(link),
                watch=after_run(self.world, "report"),
            )
            if driver.router.paused_run.is_over:  # stopped, but not by a signal
                paused = [
                    job.name for job in jobs if job.paused and job.status == JobStatus.STOPPED
                ]
                missing, stopped = missing or nobody_resumes(paused), False
            if stopped and self.world.rank == 0:
                folder = None if self.checkpoints is None else str(self.checkpoints.path)
                print_error(stop_text([run.at_stop() for run in self._runs], folder))
            # If the run wasn't stopped, no other rank has been informed of this rank's signal.
            own = driver.interrupt or (held[0] if held else None)
            ending = (
                agreed_exit(self.world, terminated=driver.terminated, own=own) if stopped else own
            )
        # A signal may have arrived while the handlers were being restored.
        if ending is None and held:
            ending = held[0]
        if ending is not None:
            raise ending
        raise_errors(jobs, missing)
        return self.report

    def _break_off(self) -> None:
        """Closes the jobs and files after a lane failed. Waits for writes in progress.

        Only jobs without a living thread are closed here; the others close in their own threads.
        """
        with self._lock:
            for run in self._runs:
                run.close_unbegun()
        if self._metric_files is not None:
            self._metric_files.close()
        if self._session is not None:
            self._session.close()

    def _agree(self, runs: Sequence[JobRun], link: Link | None) -> None:
        """Compares jobs and settings with all other ranks. Waits for them.

        With different jobs or policies, the ranks' lanes would never match up.
        """
        mine = {
            "jobs": [run.name for run in runs],
            "policy": text_of(self.policy),
            "start": self._start,
            "checkpoints": self.checkpoints and self.checkpoints.agreed,
            "metrics": self._writes_metrics,
            "emulated_link": None if link is None else str(link),
        }
        agree(self.world, mine)

    def _begin_files(self, name: str, step: int, *, without: str = "") -> list[dict[str, Any]]:
        return (
            []
            if self._metric_files is None
            else self._metric_files.begin(name, step, without=without)
        )
