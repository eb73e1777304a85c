"""`Runner`: several jobs, each an ordinary training loop, share this rank's device.

A `Runner` calls each job's function in a separate thread, with a `JobContext` as its argument. It
also owns everything that the jobs share: the driver, which runs their steps in an order that all
ranks agree on, the memory bookings, the checkpoints, the metrics files, and the report. A runner
can be used for one run only.

**The problem** is that most of what a run does is collective, i.e. all ranks have to do it
together. If one rank skipped a collective operation, e.g. because a disk failed there, the other
ranks would wait for it forever. So apart from the jobs themselves, a run is a fixed sequence of
collective operations. Every rank goes through all of them, even if some of its jobs have failed:

1. *Begin.* The ranks compare their jobs and settings, because with different jobs, their lanes
   would never match up. Then they open the metrics files and the checkpoints. If one of these fails
   on any rank, it raises on all of them.
2. *Run.* The driver runs the jobs' threads until all jobs have ended or the run is stopped. All
   communication happens on the exchange lane, in an order that is the same on all ranks.
3. *End.* There's no lane any more, so the ranks communicate directly: they save the state of the
   jobs that were stopped or have failed, compare the replicas, collect the errors that only some
   ranks have, and build the report. The sequence of these operations may depend only on facts that
   are the same on all ranks.
4. *Exit.* If the run was stopped by a signal, the ranks agree on what to raise, and on when to
   exit.

A Ctrl-C during step 3 would break that sequence, so signals are deferred until the report and the
files are complete.
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
    """Runs several jobs that share this rank's device. Every rank runs the same jobs.

    Args:
        world: What `jaxcross.initialize()` returned. If None, the world that was initialized.
        policy: Decides in which order the jobs run. `RoundRobin()`, the default, interleaves all
            jobs equally; `Weighted(shares)` gives each job its share of the device and the link;
            `Sequential()` runs one job after the other. The same on every rank.
        checkpoints: Where and how often to save the jobs' states. If there are checkpoints of an
            earlier run, the jobs resume from them; see `Checkpoints`. The same on every rank,
            except for the directory.
        metrics: A folder in which rank 0 writes each job's metrics, as one JSONL file and one CSV
            file per job. Pass it on every rank. If you restart a run from its `checkpoints`, each
            step still appears only once in the files.
        instruments: Receive spans and notes while the run is in progress.
        memory: How much memory this rank's arrays may use, as a number of bytes or a string such as
            `80GB`. If a job's step doesn't fit into memory together with the other jobs, the job
            fails on every rank before its first step, and the other jobs continue. If several jobs
            pass the same array to their steps without donating it, e.g. the base model of several
            adapters, it's counted once. If None, an accelerator reports its limit itself; on CPUs,
            we use this rank's share of the memory of the machine or of its control group. May
            differ between ranks.
        events: A folder in which each rank records its activities, so that `jaxcross doctor
            --post-mortem` can show them after a crash. If None, the environment variable
            `JAXCROSS_EVENTS` decides.
        progress: Whether to show the jobs' progress. By default, `jaxcross launch` draws a table if
            it runs in a terminal. Otherwise, rank 0 prints one line per job to standard error,
            first after 3 s, then every 10 s, and in a long run once per minute. Pass a number to
            set the seconds between lines. The environment variable `JAXCROSS_PROGRESS` overrides
            this argument.

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
            listening = ()
            policy = None
            events = None
            checkpoints = None
            metrics = None
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

        After the run, they're sorted by the order in which they joined the run, which is the same
        on every rank.
        """
        return [engine.context for engine in self._engines]

    @property
    def booked_bytes(self) -> int:
        """The most bytes that the jobs needed at the same time on this rank; see `memory`."""
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

        You can also add jobs during the run, from any thread. Every rank has to add the same jobs,
        but not in the same order. A job starts as soon as every rank has added it, between two
        steps of the other jobs. `add` itself doesn't wait for that.

        If you restart a run from its checkpoints, jobs that were added during the earlier run are
        part of the new run from its beginning. When your code then calls `add` for such a job
        again, it just returns the job that already exists.

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
            known = self._added_before(name)
            if known is not None:
                return known
            self._check_name(name)
            engine = self._make_engine(name, fn, kwargs)
            if self._used:
                # There are two races here: the run may just be ending, and the job's thread may
                # start as soon as the last rank has added the job. So the driver itself calls
                # `attach`, which connects the job to the run, while it holds the lock, i.e. before
                # it starts the thread. If the run has ended, it returns None.
                driver = self._driver
                attach = partial(engine.attach, session=self._session)
                record = None if driver is None else driver.join(name, engine.make_thread, attach)
                if record is None:
                    raise JobError(
                        f"Job `{name}` comes too late: this runner's run has ended. Make a new one."
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

        Use this for jobs that only rank 0 decides to start. During the run, rank 0 can call
        `submit(name, job=..., kwargs={...})`, which adds a job that runs `fn` on all ranks. Every
        rank must therefore know the function: call `register` with the same arguments on every
        rank, before the job is submitted.

        Raises:
            ValueError: The name is empty or already taken.
            TypeError: `fn` can't be called.
        """
        self._functions.add(name, fn)

    def submit(self, function: str, *, job: str, kwargs: Mapping[str, Any] = {}) -> None:
        """Adds a job on all ranks, although only rank 0 calls this.

        The job calls `fn(job, **kwargs)`, where `fn` is the function that every rank has registered
        as `function`. You can submit jobs during the run from any thread, and this doesn't wait.

        No code is sent to the other ranks. They only receive the names of the function and the job,
        and the arguments as JSON.

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
                    f"Job `{job}` cannot be submitted now. Submit jobs while `runner.run()` runs."
                )
            self._submitted.add(job)
            if self._session is not None:
                self._session.added(job, text)

    def _added_before(self, name: str) -> JobContext | None:
        # Suppose that in an earlier run, a job's function called `add` at its step 100, and was
        # killed at step 120, after a checkpoint at step 90. The added job is in the checkpoints'
        # list of jobs, so it's part of this run from the beginning. But the function resumes at
        # step 90, and will call `add` at step 100 again.
        if self._session is None or name not in self._session.added_before:
            return None
        return next((job for job in self.jobs if job.name == name), None)

    def _check_name(self, name: str) -> None:
        if not name.isprintable():
            raise ValueError(f"the name of a job must have printable characters only, got {name!r}")
        if name in self._submitted or any(job.name == name for job in self.jobs):
            raise ValueError(
                f"There is a job `{name}` already. Give each job a different name, because reports "
                "and errors show it."
            )

    def _add_submitted(self, text: str) -> None:
        """Adds a submitted job. The driver calls this on every rank."""
        name, fn, arguments = self._functions.resolve(text, self.world.rank)
        # If the user's code has meanwhile added a job of this name on this rank, adding the
        # submitted one raises a ValueError. We ignore it, and then the user's job joins the run
        # instead.
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
            JobError: This runner was already used; another run is in progress, e.g. because a job
                calls this; or another thread is currently in a step that doesn't belong to a run.
            JobError, ExchangeError: Jobs failed, or were added but never joined because some rank
                didn't add them. After the other jobs have ended, every rank raises the first such
                error, with notes about the others. The attribute `report` then has the report.
            KeyboardInterrupt: A rank was interrupted, e.g. by Ctrl-C. The exception is raised on
                every rank after all ranks have stopped at the same step. If all jobs had already
                ended, it's raised only on the interrupted rank. Before that, rank 0 prints what was
                saved for each job.
            SystemExit: The same with exit code 143, after SIGTERM on any rank.
            BaseException: The same applies if your own handler for another signal raises an
                exception. The ranks on which it was raised get that exception, and the others get
                `KeyboardInterrupt`.
            JobError: All remaining jobs are paused, and no thread or signal handler on any rank can
                resume them.
            ValueError: There are no jobs, or `Weighted` doesn't have one share per job.
        """
        with self.world.exchange_owner.run():
            report = self._run()
        if self.world.estimate_request and self._engines[0].status == JobStatus.STOPPED:
            raise SystemExit(0)  # the estimate has been printed
        return report

    def _run(self) -> Report:
        link = current_link()
        driver = self._begin(link)
        start_ns = time.monotonic_ns()
        # From here on, a signal such as Ctrl-C no longer raises its exception immediately. If it
        # arrives while the jobs run, the driver stops them. If it arrives later, the run is about
        # to end anyway. An exception would then keep this rank from taking part in the collective
        # operations below, and the other ranks would wait for it. So we raise it at the end.
        with (
            self._progress,
            defer_signals() as held,
        ):
            try:
                stopped = driver.run(held)
            except BaseException:
                self._close_after_failure()
                raise
            end_ns = time.monotonic_ns()
            # Another thread may be adding a job right now, while it holds this lock. Wait until
            # that job is in the list, so that we close it too.
            with self._lock:
                for engine in self._engines:
                    engine.close()
                if self._metric_files is not None:
                    self._metric_files.close()
                # Other ranks may have added the jobs in a different order, so sort them. Don't sort
                # the list in place by `list.sort`: CPython empties a list while it's being sorted,
                # so if another thread reads `jobs` at that moment, it would find no jobs.
                self._engines = sorted(self._engines, key=lambda engine: engine.order)
            jobs = tuple(self._engines)
            if self._session is not None:
                for engine in self._engines:
                    engine.save_after_run()
                # If the run failed before any job made a step, don't leave an empty folder behind.
                broke_off = not all(job.status == JobStatus.ENDED for job in jobs)
                self._session.close(unused=broke_off and not any(job.step for job in jobs))
            with after_run(self.world, "report"):
                _compare_replicas(self.world, jobs)
                missing = _left_out(
                    self.world, jobs, [*driver.router.left_out, *sorted(self._submitted)]
                )
                _share_unread_errors(self.world, jobs)
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
            if driver.router.paused_run.is_over:  # all are paused, and nothing can resume them
                paused = [
                    job.name for job in jobs if job.paused and job.status == JobStatus.STOPPED
                ]
                missing = missing or nobody_resumes(paused)
                stopped = False
            if stopped and self.world.rank == 0:
                folder = None if self.checkpoints is None else str(self.checkpoints.path)
                print_error(stop_message([engine.at_stop() for engine in self._engines], folder))
            # If the signal arrived after all jobs had ended, the other ranks haven't been informed
            # of it and continue normally. So we can't agree with them on what to raise, and only
            # this rank raises.
            own = driver.interrupt or (held[0] if held else None)
            ending = (
                _agreed_exit(self.world, terminated=driver.terminated, own=own) if stopped else own
            )
        # A signal may still have arrived after the check above, while the handlers were being
        # restored.
        if ending is None and held:
            ending = held[0]
        if ending is not None:
            raise ending
        raise_errors(jobs, missing)
        return self.report

    def _begin(self, link: Link | None) -> Driver:
        """Compares the jobs between ranks, and creates the driver. Waits for all ranks."""
        # If another thread adds a job now, it has to wait until there's a driver that its job can
        # join.
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
                for name, fn, given in _resubmitted_jobs(
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
        """Compares jobs and settings between ranks. Waits for all ranks.

        If the ranks had different jobs or policies, their lanes would run different exchanges, and
        the run would hang.

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
                    "`metrics` and emulated link, on every rank. "
                    "See docs/reference/limits.md#jobs."
                )

    def _begin_files(self, name: str, step: int, *, without: str = "") -> list[dict[str, Any]]:
        return (
            []
            if self._metric_files is None
            else self._metric_files.begin(name, step, without=without)
        )

    def _close_after_failure(self) -> None:
        """Closes the jobs and files after a lane has failed. Waits until everything is written.

        If a job's thread is still alive, that thread closes the job itself. All other jobs are
        closed here.
        """
        with self._lock:
            for engine in self._engines:
                engine.close_unbegun()
        if self._metric_files is not None:
            self._metric_files.close()
        if self._session is not None:
            self._session.close()


def _first_of(engines: Sequence[JobEngine], world: World) -> list[JobEngine]:
    """Returns a list of only the first job, which is the one that `jaxcross estimate` measures.

    If there are several jobs, rank 0 logs that the others are left out.
    """
    if len(engines) > 1 and world.rank == 0:
        _log.warning(
            "Job `%s`, the first of %d, is measured. The others are not run.",
            engines[0].name,
            len(engines),
        )
    return list(engines[:1])


def _text_of(policy: Policy) -> str:
    """Returns a text for a policy, which is the same on every rank if the policies are.

    We can't always use `repr`: if a user's class doesn't define it, the default one contains the
    object's address.
    """
    cls = type(policy)
    if cls.__repr__ is object.__repr__:
        return f"{cls.__module__}.{cls.__qualname__}"
    return repr(policy)


def _claim_metrics(world: World, files: MetricFiles | None) -> None:
    """Reserves the metrics folder for this run on rank 0, which writes it. Waits for all ranks.

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


def _resubmitted_jobs(
    session: Session, functions: RegisteredFunctions, check_name: Callable[[str], None], rank: int
) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yields the jobs that were submitted in an earlier run and haven't ended.

    For a submitted job, the checkpoints contain the function's name and the arguments, so we can
    create it again: each item is the job's name, its function and the arguments, the same on all
    ranks. For a job that was added by `add`, we don't have its function. If this run hasn't added
    that job again, rank 0 logs a warning.
    """
    for listed, text in session.resubmit.items():
        try:
            name, fn, arguments = functions.resolve(text, rank)
            # The job's folder was looked up by the listed name, so the submission must have the
            # same name.
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
            "These jobs joined an earlier run with these checkpoints and had not ended, but this "
            "run does not have them: %s. To resume them, add them before `runner.run()`.",
            quoted(session.missing),
        )


def _compare_replicas(world: World, jobs: Sequence[JobEngine]) -> None:
    """Compares the final states of all jobs between ranks. Waits for all ranks.

    One small all-reduce compares a hash of every job's state. In most runs, all hashes are equal,
    and nothing else is sent. If the states of a job with `check_replicas` differ, the job gets an
    error on every rank. For other jobs, a difference only causes a warning.
    """
    joined = [job for job in jobs if job.status != JobStatus.LEFT_OUT] if world.size > 1 else []
    # Every rank must pass the same number of reports, so a job that has nothing to compare passes
    # an empty one.
    found = (
        exchange(world.control, [job.replicas.end or RankReport(0, "", {}) for job in joined])
        if joined
        else []
    )
    for job, every in zip(joined, found, strict=True):
        error = job.replicas.settle(every) if job.replicas.end is not None else None
        job.error = job.error or error


def _left_out(world: World, jobs: Sequence[JobEngine], names: Sequence[str]) -> JobError | None:
    """Returns the error for jobs that never joined the run, or None. Waits for all ranks.

    A job joins the run only once every rank has added it. In `names`, pass the jobs that this rank
    has added and that never joined. The ranks exchange these names, so the result is the same on
    every rank.
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


def _share_unread_errors(world: World, jobs: Sequence[JobEngine]) -> None:
    """Sets a job's error on every rank if some rank couldn't read back the job's metrics.

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
    """Builds the report, the same on every rank. Waits for all ranks inside of `watch`."""
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
    """Returns the exception that this rank should raise after the run was stopped.

    Waits for all ranks, so that no rank exits while another one is still saving.

    Args:
        world: All ranks.
        terminated: Whether this rank received SIGTERM.
        own: The exception that a signal handler has raised on this rank, if any.
    """
    with after_run(world, "end of the run"):
        some = any_rank(world.control, terminated)
        kind = ExitKind.TERMINATED if some else ExitKind.INTERRUPTED
        world.flight.record_exit(kind, "SIGTERM" if some else "Ctrl-C")
        # As soon as one rank exits with a nonzero code, all other ranks are terminated, even if
        # they're still writing their output. So wait here until all of them have finished writing.
        world.control.allreduce_min(np.zeros(1, np.int64))
    if own is not None and not isinstance(own, KeyboardInterrupt):
        return own  # raised by the user's own handler, so on purpose
    return SystemExit(TERMINATED) if some else KeyboardInterrupt()


def raise_errors(jobs: Sequence[JobEngine], missing: JobError | None) -> None:
    """Raises the first failed job's error, or else `missing`, with notes about the other errors."""
    # Leave out the errors of ejected jobs, because by `nonfinite="eject"` the user has asked us
    # only to report them. Also leave out the errors of jobs that some rank never added: they all
    # have the same error, which we get as `missing`.
    errors = [
        job.error
        for job in jobs
        if job.error is not None and job.status not in (JobStatus.EJECTED, JobStatus.LEFT_OUT)
    ]
    raise_first([*errors, *([missing] if missing is not None else [])])


def raise_first(errors: Sequence[Exception]) -> None:
    """Raises the first error, if there is one, with notes about the others.

    Don't rename this function: `jaxcross.health.tracebacks.ends_run` looks for its name in an
    error's traceback.
    """
    if not errors:
        return
    for other in errors[1:MAX_ERRORS_SHOWN]:
        errors[0].add_note(f"Also: {other}")
    more = len(errors[MAX_ERRORS_SHOWN:])
    if more:
        errors[0].add_note(f"And {more} more jobs failed: `runner.report` says why.")
    raise errors[0]
