"""`Runner`: several jobs, each an ordinary training loop, share this rank's device.

A `Runner` gives each job's function a thread of its own and a `JobContext`, and owns whatever the
jobs of a run share: the driver with its lanes, the memory that jobs book, the checkpoints, the
files of metrics, and the report. It runs once. Before the jobs begin, all ranks compare their jobs
and settings, and at the end they build the report together.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from jaxcross._endings import ExitKind, JobStatus
from jaxcross._link import Link, current_link, described_link
from jaxcross.checkpoint import Checkpoints, Session
from jaxcross.errors import JobError, clause, quoted
from jaxcross.health import TERMINATED, defer_signals, print_error
from jaxcross.interleave import Instrument, Listeners, Policy, RoundRobin, Start
from jaxcross.jobs import arguments
from jaxcross.jobs.admission import MemoryAdmission
from jaxcross.jobs.arguments import check_job_name
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.engine import JobEngine
from jaxcross.jobs.memory import memory_limit
from jaxcross.jobs.progress_reporter import ProgressReporter
from jaxcross.jobs.replicas import RankReport, exchange
from jaxcross.jobs.stop_message import stop_message
from jaxcross.jobs.submissions import RegisteredFunctions
from jaxcross.report import JobSummary, MetricFiles, Recorder, Report, as_float
from jaxcross.runtime import Driver, FlightNotes, after_run, chaos_of, nobody_resumes
from jaxcross.world import World, any_rank, current_world, gather

MAX_ERRORS_SHOWN = 8
"""The number of jobs whose errors `Runner.run` shows."""

_log = logging.getLogger("jaxcross")


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
        self._engines: list[JobEngine] = []
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
            lambda: tuple(self._engines),
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
        return [engine.context for engine in self._engines]

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
            engine = self._make_engine(name, fn, kwargs)
            if self._used:
                driver = self._driver
                attach = partial(engine.attach, session=self._session)
                record = None if driver is None else driver.join(name, engine.make_thread, attach)
                if record is None:
                    raise JobError(
                        f"Job `{name}` comes too late: this runner has run. Make a new Runner."
                    )
                if self._session is not None:
                    self._session.added(name)
            self._engines.append(engine)
        return engine.context

    def _make_engine(
        self, name: str, fn: Callable[..., Any], arguments: dict[str, Any]
    ) -> JobEngine:
        return JobEngine(
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
        if self.world.estimate_request and self._engines[0].status == JobStatus.STOPPED:
            raise SystemExit(0)  # the estimate was made and printed
        return report

    def _run(self) -> Report:
        link = current_link()
        driver = self._begin(link)
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
                for engine in self._engines:
                    engine.close()
                if self._metric_files is not None:
                    self._metric_files.close()
                # Other ranks may have added the jobs in a different order. We assign a new list
                # because a list is empty while `sort` works on it, and another thread that reads
                # `jobs` would then find no jobs.
                self._engines = sorted(self._engines, key=lambda engine: engine.order)
            jobs = tuple(self._engines)
            if self._session is not None:
                for engine in self._engines:
                    engine.save_left()
                broke_off = not all(job.status == JobStatus.ENDED for job in jobs)
                self._session.close(unused=broke_off and not any(job.step for job in jobs))
            with after_run(self.world, "report"):
                _compare_replicas(self.world, jobs)
                missing = _left_out(
                    self.world, jobs, [*driver.router.left_out, *sorted(self._submitted)]
                )
                _tell_unread(self.world, jobs)
            self.report = _report_of(
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
                print_error(stop_message([engine.at_stop() for engine in self._engines], folder))
            # If the run wasn't stopped, no other rank has been informed of this rank's signal.
            own = driver.interrupt or (held[0] if held else None)
            ending = (
                _agreed_exit(self.world, terminated=driver.terminated, own=own) if stopped else own
            )
        # A signal may have arrived while the handlers were being restored.
        if ending is None and held:
            ending = held[0]
        if ending is not None:
            raise ending
        raise_errors(jobs, missing)
        return self.report

    def _begin(self, link: Link | None) -> Driver:
        """Compares the jobs with all other ranks and makes the driver. Waits for all ranks."""
        # A thread that adds a job waits for this lock until its job can join.
        with self._lock:
            if self._used:
                raise JobError("This runner has run. Make a new Runner for another run.")
            arguments.check_jobs(len(self._engines), self.policy)
            if self.world.estimate_request:
                self._engines = _first_of(self._engines, self.world)
            engines = tuple(self._engines)
            self._used = True
            self._agree(engines, link)
            if self._writes_metrics:
                _claim_metrics(self.world, self._metric_files)
            if self.checkpoints is not None:
                names = [engine.name for engine in engines]
                self._session = _open_session(self.checkpoints, self.world, names, self.policy)
                for name, fn, given in _taken_over(
                    self._session, self._functions, self._check_name, self.world.rank
                ):
                    self._engines.append(self._make_engine(name, fn, {**given}))
                engines = tuple(self._engines)
            driver = self._driver = Driver(
                world=self.world,
                jobs=[(engine.name, engine.make_thread) for engine in engines],
                policy=self.policy,
                depth=self._depth,
                listeners=self._listeners,
                link=link,
                on_text=self._add_submitted,
                chaos=self._chaos,
                start=self._start,
            )
            for engine, record in zip(engines, driver.records, strict=True):
                engine.attach(driver, record, self._session)
        return driver

    def _agree(self, engines: Sequence[JobEngine], link: Link | None) -> None:
        """Compares jobs and settings with all other ranks. Waits for them.

        With different jobs or policies, the ranks' lanes would never match up.

        Raises:
            JobError: On every rank: the settings differ.
        """
        facts = {
            "jobs": [engine.name for engine in engines],
            "policy": _text_of(self.policy),
            "start": self._start,
            "checkpoints": self.checkpoints and self.checkpoints.agreed,
            "metrics": self._writes_metrics,
            "emulated_link": None if link is None else str(link),
        }
        with self.world.monitor(job="", step=0, segment=-1, what="start of the run"):
            texts = self.world.control.allgather_text(json.dumps(facts))
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise JobError(
                    f"Ranks 0 and {rank} want to run different things: {texts[0]} and {text}. Add "
                    "the same jobs in the same order, with the same policy, checkpoints, "
                    "`metrics` and emulated link, on every rank."
                )

    def _begin_files(self, name: str, step: int, *, without: str = "") -> list[dict[str, Any]]:
        return (
            []
            if self._metric_files is None
            else self._metric_files.begin(name, step, without=without)
        )

    def _break_off(self) -> None:
        """Closes the jobs and files after a lane failed. Waits for writes in progress.

        Only jobs without a living thread are closed here; the others close in their own threads.
        """
        with self._lock:
            for engine in self._engines:
                engine.close_unbegun()
        if self._metric_files is not None:
            self._metric_files.close()
        if self._session is not None:
            self._session.close()


def _first_of(engines: Sequence[JobEngine], world: World) -> list[JobEngine]:
    """Returns the first job alone, whose first step `jaxcross estimate` measures.

    If there are more jobs, rank 0 logs which one is measured.
    """
    if len(engines) > 1 and world.rank == 0:
        _log.warning(
            "Job `%s`, the first of %d, is measured. The others are not run.",
            engines[0].name,
            len(engines),
        )
    return list(engines[:1])


def _text_of(policy: Policy) -> str:
    """Returns the text by which ranks compare their policies.

    The default `repr` of a user's class contains an address, which differs between ranks.
    """
    cls = type(policy)
    if cls.__repr__ is object.__repr__:
        return f"{cls.__module__}.{cls.__qualname__}"
    return repr(policy)


def _claim_metrics(world: World, files: MetricFiles | None) -> None:
    """Claims the folder of metrics on rank 0, which writes the files. Waits for all ranks.

    Raises:
        ValueError: On every rank: the folder is in use or can't be written.
    """
    problem = None
    if files is not None:
        try:
            files.claim()
        except (ValueError, OSError) as error:
            problem = str(error)
    with world.monitor(job="", step=0, segment=-1, what="opening the folder of metrics"):
        problem = gather(world.control, problem)[0]
    if problem is not None:
        raise ValueError(f"`metrics`: {problem}")


def _open_session(
    checkpoints: Checkpoints, world: World, jobs: Sequence[str], policy: Policy
) -> Session:
    """Opens the checkpoints of a run. Waits for all ranks."""
    with world.monitor(job="", step=0, segment=-1, what="opening the checkpoints"):
        return Session(checkpoints, world, jobs=jobs, policy=_text_of(policy))


def _taken_over(
    session: Session, functions: RegisteredFunctions, check_name: Callable[[str], None], rank: int
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yields the unfinished jobs that an earlier run received by `submit`.

    Each is a name, a function and its arguments, identical on all ranks. Warns about jobs that
    joined the earlier run in another way and that this run doesn't have.
    """
    for listed, text in session.resubmit.items():
        try:
            name, fn, arguments = functions.resolve(text, rank)
            # A listed name is a valid name of a job, and its folder is known.
            if name != listed:
                raise ValueError(f"it is listed as `{listed}`, and makes a job `{name}`")
            check_name(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _log.warning(
                "A submission of an earlier run cannot be understood, and is left out: %s.",
                clause(str(error)),
            )
        else:
            yield name, fn, arguments
    if session.missing and rank == 0:
        _log.warning(
            "These jobs joined an earlier run with these checkpoints, were not over when it ended, "
            "and are not added now: %s. Add them before `runner.run()`, and they go on where they "
            "stood.",
            quoted(session.missing),
        )


def _compare_replicas(world: World, jobs: Sequence[JobEngine]) -> None:
    """Compares the last states of all jobs that joined. Waits for all ranks.

    If they're equal, this costs one small all-reduce. If they differ in a job that checks its
    replicas, that's the job's error on every rank.
    """
    joined = [job for job in jobs if job.status != JobStatus.LEFT_OUT] if world.size > 1 else []
    found = (
        exchange(world.control, [job.replicas.end or RankReport(0, "", {}) for job in joined])
        if joined
        else []
    )
    for job, every in zip(joined, found, strict=True):
        error = job.replicas.settle(every) if job.replicas.end is not None else None
        job.error = job.error or error


def _left_out(world: World, jobs: Sequence[JobEngine], names: Sequence[str]) -> JobError | None:
    """Returns the error for jobs that never joined, or None. Waits for all ranks.

    The same on every rank. `names` are the jobs that this rank added and that never joined.
    """
    ranks: dict[str, list[str]] = {}
    for rank, theirs in enumerate(gather(world.control, names)):
        for name in theirs:
            ranks.setdefault(name, []).append(str(rank))
    if not ranks:
        return None
    what = ", ".join(
        f"`{name}` (rank {', '.join(where)} of {world.size})" for name, where in ranks.items()
    )
    error = JobError(
        "Jobs were added during the run but not on every rank, or when it was ending, and never "
        f"joined: {what}. Add a job on all ranks while another one still has to wait for them, for "
        "example in a job's function."
    )
    for job in jobs:
        if job.status == JobStatus.LEFT_OUT:
            job.error = error
    return error


def _tell_unread(world: World, jobs: Sequence[JobEngine]) -> None:
    """Makes a metric that some rank can't read back the job's error on every rank.

    Waits for all ranks.
    """
    mine = {
        job.name: f"{type(job.unread).__name__}: {job.unread}"
        for job in jobs
        if job.unread is not None
    }
    for rank, failures in enumerate(gather(world.control, mine)):
        for job in jobs:
            failure = failures.get(job.name)
            if job.error is None and failure:
                job.error = JobError(
                    f"Job `{job.name}`: rank {rank} cannot read back what it logged: {failure}"
                )
                job.error.__cause__ = job.unread


def _report_of(
    jobs: Sequence[JobEngine],
    recorder: Recorder,
    *,
    world: World,
    policy: str,
    link: str,
    start_ns: int,
    end_ns: int,
    watch: AbstractContextManager[Any],
) -> Report:
    """Builds the report, the same on every rank. Waits for all ranks, inside of `watch`."""
    devices = jax.local_devices()
    over = "" if world.over == "mpi4jax" else f", exchanges over {world.over}"
    return Report.build(
        recorder.spans(),
        jobs=[_facts(job) for job in jobs if job.status != JobStatus.LEFT_OUT],
        rank=world.rank,
        size=world.size,
        start_ns=start_ns,
        end_ns=end_ns,
        policy=policy,
        placement=(
            f"{devices[0].platform}, {len(devices)} device{'s' if len(devices) > 1 else ''} a "
            f"rank{over}"
        ),
        link=link,
        dropped=recorder.dropped,
        control=world.control if world.size > 1 else None,
        watch=watch,
    )


def _facts(job: JobEngine) -> JobSummary:
    metrics: dict[str, float] = {}
    for _, values in job.history:
        if isinstance(values, dict):
            metrics.update({key: as_float(v) for key, v in _numbers(values)})
    loss = metrics.pop("loss", None)
    return JobSummary(
        name=job.name,
        steps=job.steps_made,
        examples_per_step=job.examples.per_step,
        final_loss=loss,
        metrics=metrics,
        how=job.status or JobStatus.ENDED,
        why=job.evaluations.stop_reason if job.error is None else str(job.error),
        skipped=job.skipped - job.skipped_steps.before,
        replicas=job.replicas.findings.text,
        first_step=job.step - job.steps_made,
        unit=job.examples.unit,
        program=job.registry.most_run(),
        left_over=(job.world.rank,) if job.left_over else (),
    )


def _numbers(values: dict[Any, Any]) -> Iterator[tuple[str, int | float]]:
    for key, value in values.items():
        if isinstance(value, int | float):
            yield str(key), value
        elif isinstance(value, dict):
            yield from ((f"{key}/{inner}", number) for inner, number in _numbers(value))


def _agreed_exit(world: World, *, terminated: bool, own: BaseException | None) -> BaseException:
    """Returns the exception that this rank raises after a stop.

    Waits for all ranks, so that no rank exits while another one is still saving.

    Args:
        world: All ranks.
        terminated: Whether this rank received SIGTERM.
        own: The exception that this rank's signal handler raised, if any.
    """
    with after_run(world, "end of the run"):
        some = any_rank(world.control, terminated)
        kind = ExitKind.TERMINATED if some else ExitKind.INTERRUPTED
        world.flight.record_exit(kind, "SIGTERM" if some else "Ctrl-C")
        # The first rank that exits with a nonzero code terminates all ranks, so we wait until each
        # of them has written its last output.
        world.control.allreduce_min(np.zeros(1, np.int64))
    if own is not None and not isinstance(own, KeyboardInterrupt):
        return own  # the user's handler raised it on purpose
    return SystemExit(TERMINATED) if some else KeyboardInterrupt()


def raise_errors(jobs: Sequence[JobEngine], missing: JobError | None) -> None:
    """Raises the first failed job's error, or else `missing`, with notes about further errors."""
    errors = [
        job.error
        for job in jobs
        if job.error is not None and job.status not in (JobStatus.EJECTED, JobStatus.LEFT_OUT)
    ]
    raise_first([*errors, *([missing] if missing is not None else [])])


def raise_first(errors: Sequence[Exception]) -> None:
    """Raises the first error, if any, with notes about the further ones.

    `jaxcross.health.tracebacks.ends_run` looks for this function in an error's traceback.
    """
    if not errors:
        return
    for other in errors[1:MAX_ERRORS_SHOWN]:
        errors[0].add_note(f"Also: {other}")
    if more := len(errors[MAX_ERRORS_SHOWN:]):
        errors[0].add_note(f"And {more} more jobs failed: `runner.report` says why.")
    raise errors[0]
