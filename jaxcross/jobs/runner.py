"""`Runner`: several jobs, each an ordinary training loop, share this rank's device.

A `Runner` calls each job's function in a separate thread, passing it a `JobContext`. It also owns
everything that the jobs share: the driver, which runs their steps in an order agreed on by all
ranks, the memory reservations, the checkpoints, the metrics files, and the report. A runner can
only be used for a single run.

**The problem** is that most of what happens in a run is collective. If one rank skipped a
collective operation, e.g. because of a disk failure, the other ranks would wait for it forever.
Apart from the jobs themselves, a run is therefore a fixed sequence of collective operations, which
every rank goes through even if some of its jobs have failed:

1. *Begin.* The ranks compare their jobs and settings, since their lanes could never match up if
   they ran different jobs. Then they open the metrics files and the checkpoints. If any of this
   fails on one rank, it raises an error on all of them.
2. *Run.* The driver runs the jobs' threads until all jobs have ended or the run is stopped. All
   communication goes through the exchange lane, in an order that's the same on all ranks.
3. *End.* The lanes are gone, so the ranks communicate directly: they save the state of jobs that
   were stopped or failed, compare replicas, share errors that only occurred on some ranks, and
   build the report. The sequence of these operations may only depend on facts that are the same on
   all ranks.
4. *Exit.* If the run was stopped by a signal, the ranks agree on what to raise and when to exit.

A Ctrl-C in the middle of step 3 would break that sequence, so signals are deferred until the report
and the files are complete.
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
from jaxcross.report import JobSummary, MetricFiles, Recorder, Report, Tracker, as_float
from jaxcross.runtime import Driver, FlightNotes, after_run, chaos_of, nobody_resumes
from jaxcross.world import World, any_rank, current_world, gather

MAX_ERRORS_SHOWN = 8
"""The maximum number of jobs whose errors `Runner.run` shows."""

_log = logging.getLogger("jaxcross")


class Runner:
    """Runs several jobs that share this rank's device. Every rank runs the same jobs.

    Args:
        world: The result of `jaxcross.initialize()`. If None, the world that was initialized.
        policy: Decides the order in which jobs run. `RoundRobin()`, the default, interleaves all
            jobs equally; `Weighted(shares)` gives each job its own share of the device and the
            link; `Sequential()` runs one job after the other. The same on every rank.
        checkpoints: Where and how often to save the jobs' states. Jobs resume from the checkpoints
            of an earlier run if there are any; see `Checkpoints`. The same on every rank, except
            for the directory.
        metrics: A folder where rank 0 writes each job's metrics, as one JSONL file and one CSV file
            per job. Pass it on every rank. Each step appears only once in these files, even if the
            run is restarted from its `checkpoints`.
        instruments: These receive spans and notes while the run is in progress.
        memory: How much memory this rank's arrays may use, as a number of bytes or a string such as
            `80GB`. If a job's step doesn't fit into memory alongside the other jobs, that job fails
            on every rank before its first step, while the others carry on. Arrays that several jobs
            pass to their steps without donating them, e.g. the shared base model of several
            adapters, are counted once. If None, we use the limit reported by the accelerator or, on
            CPUs, this rank's share of the memory of the machine or of its control group. May differ
            between ranks.
        events: A folder where each rank records what it's doing, so that `jaxcross doctor
            --post-mortem` can show it after a crash. If None, it's taken from the environment
            variable `JAXCROSS_EVENTS`.
        progress: Whether to show the jobs' progress. By default, `jaxcross launch` draws a table
            when it runs in a terminal; otherwise, rank 0 prints one line per job to standard error,
            first after 3 s, then every 10 s, and eventually, in a long run, once per minute. Pass a
            number to set the seconds between lines. The environment variable `JAXCROSS_PROGRESS`
            overrides this argument.

    Attributes:
        report: The report of the run, even if `run` raised an error after it. None until then.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `memory` isn't a number of bytes, `progress` is a number that isn't positive,
            this rank can't write to the folder `events`, or the environment variable
            `JAXCROSS_CHAOS` (for tests) isn't a seed.

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
        # An estimate runs one job up to its first step, and doesn't write any files for the user.
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
        self._trackers = tuple(each for each in listening if isinstance(each, Tracker))
        if self._trackers and checkpoints is not None and metrics is None:
            raise ValueError(
                f"`{type(self._trackers[0]).__name__}` needs the metrics files of a run that has "
                "checkpoints, because a restart sends what the service has lost. Pass "
                "`metrics=FOLDER` as well."
            )
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

        After the run, they're in the order in which they joined it, which is the same on every
        rank.
        """
        return [engine.context for engine in self._engines]

    @property
    def booked_bytes(self) -> int:
        """The peak number of bytes that the jobs needed on this rank; see `memory`."""
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
        """Adds a job, which will call `fn(job, **kwargs)` in its own thread.

        You can also add jobs during the run, from any thread. All ranks have to add the same jobs,
        but not in the same order. A job starts, between two steps of the other jobs, as soon as
        every rank has added it; `add` itself doesn't wait for that.

        If you restart a run from its checkpoints, jobs that were added while the earlier run was in
        progress take part from the start. When your code gets around to adding such a job again,
        `add` just returns the existing job.

        Returns:
            The object that `fn` will receive as `job`.

        Raises:
            ValueError: The name is empty or already taken.
            TypeError: `fn` can't be called as `fn(job, **kwargs)`, `fn` is a generator or coroutine
                function, or `kwargs` isn't a mapping with string keys.
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
                # There are two races to consider: the run may be about to end, and the job's thread
                # may start as soon as the last rank has added the job. That's why we let the driver
                # call `attach`, which connects the job to the run, while it's holding the lock and
                # before it starts the thread. If the run has ended, `join` returns None.
                driver = self._driver
                attach = partial(engine.attach, session=self._session)
                record = None if driver is None else driver.join(name, engine.make_thread, attach)
                if record is None:
                    raise JobError(
                        f"Job `{name}` was added too late: this runner's run has ended. Make a new "
                        "`Runner`, and add the job to that."
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
            trackers=self._trackers,
        )

    def register(self, name: str, fn: Callable[..., Any]) -> None:
        """Registers `fn` under a name, so that rank 0 can submit jobs that run it.

        Use this if rank 0 alone decides which jobs to start. During the run, rank 0 can call
        `submit(name, job=..., kwargs={...})` to add a job that runs `fn` on all ranks. For this to
        work, every rank has to know the function: call `register` with the same arguments on every
        rank, before the job is submitted.

        Raises:
            ValueError: The name is empty or already taken.
            TypeError: `fn` can't be called.
        """
        self._functions.add(name, fn)

    def submit(self, function: str, *, job: str, kwargs: Mapping[str, Any] = {}) -> None:
        """Adds a job on all ranks by a call on rank 0 alone.

        The job calls `fn(job, **kwargs)`, where `fn` is the function that every rank has registered
        as `function`. You can submit jobs during the run from any thread. This doesn't wait.

        No code is sent to the other ranks, just the names of the function and the job, and the
        arguments as JSON.

        Raises:
            ValueError: No function is registered as `function`, `job` is empty or already taken, or
                the arguments are too long.
            TypeError: `kwargs` isn't a mapping with string keys, or its values can't be represented
                in JSON.
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
                    f"Job `{job}` cannot be submitted now, because the run has not begun or has "
                    "ended. Submit jobs while `runner.run()` runs."
                )
            self._submitted.add(job)
            if self._session is not None:
                self._session.added(job, text)

    def _added_before(self, name: str) -> JobContext | None:
        # Say that in an earlier run, a job's function called `add` at step 100, then the run was
        # killed at step 120, with its last checkpoint at step 90. The added job is in the
        # checkpoints' list of jobs, so it's part of this run from the start. But the function
        # resumes at step 90, and will call `add` again when it gets to step 100.
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
        # If the user's code has since added a job with the same name on this rank, adding the
        # submitted job raises a ValueError. Ignore it; the user's job joins the run instead.
        with (
            self._lock,
            suppress(ValueError),
        ):
            self._submitted.discard(name)
            self._add(name, fn, {**arguments})

    def run(self) -> Report:
        """Runs all jobs to the end. Waits for the jobs and for all ranks.

        Returns:
            The report, which is the same on every rank.

        Raises:
            JobError: This runner was already used, another run is in progress (e.g. because a job
                calls this), or another thread is currently in a step that doesn't belong to a run.
            JobError, ExchangeError: Jobs failed, or were added but never joined because some rank
                didn't add them. Once the other jobs have ended, every rank raises the first such
                error, with notes about the others. The report is available from the `report`
                attribute.
            KeyboardInterrupt: A rank was interrupted, e.g. by Ctrl-C. All ranks stop at the same
                step, rank 0 prints what was saved for each job, and then every rank raises the
                exception. If all jobs had already ended, only the interrupted rank raises it.
            SystemExit: Likewise, with exit code 143, after SIGTERM on any rank.
            BaseException: Likewise, if your own handler for another signal raises an exception.
                That exception is raised on the ranks where it occurred, and `KeyboardInterrupt` on
                the others.
            JobError: All remaining jobs are paused, and no thread or signal handler on any rank can
                resume them.
            ValueError: There are no jobs, or `Weighted` doesn't have one share per job.
        """
        with self.world.exchange_owner.run():
            try:
                report = self._run()
            finally:
                self._close_trackers()  # again, in case the run has failed earlier
        if self.world.estimate_request and self._engines[0].status == JobStatus.STOPPED:
            raise SystemExit(0)  # the estimate has been printed
        return report

    def _run(self) -> Report:
        link = current_link()
        driver = self._begin(link)
        start_ns = time.monotonic_ns()
        # From here on, signals such as Ctrl-C no longer raise an exception immediately. If a signal
        # arrives while jobs are running, the driver stops them. If it arrives later, the run is
        # about to end anyway, and raising an exception would keep this rank from taking part in the
        # collective operations below, leaving the other ranks hanging. Hold it back until the end
        # instead.
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
            # Another thread may be in the middle of adding a job, with this lock held. Wait for
            # that job to be in the list, so that it gets closed too.
            with self._lock:
                for engine in self._engines:
                    engine.close()
                if self._metric_files is not None:
                    self._metric_files.close()
                # Other ranks may have added the jobs in a different order, so sort them. Don't use
                # `list.sort`: CPython empties a list while sorting it, and a thread that reads
                # `jobs` at that moment would find it empty.
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
            self._close_trackers()
            # If the signal arrived after all jobs had ended, the other ranks don't know about it
            # and carry on normally. There's nothing to agree on in that case; only this rank
            # raises.
            own = driver.interrupt or (held[0] if held else None)
            if stopped:
                ending = _agreed_exit(self.world, terminated=driver.terminated, own=own)
            else:
                ending = own
                with after_run(self.world, "end of the run"):
                    _wait_for_writers(self.world)
        # A signal may still have come in after the check above, while the handlers were being
        # restored.
        if ending is None and held:
            ending = held[0]
        if ending is not None:
            raise ending
        raise_errors(jobs, missing)
        return self.report

    def _begin(self, link: Link | None) -> Driver:
        """Compares the jobs between ranks, and creates the driver. Waits for all ranks."""
        # A thread that tries to add a job now has to wait until there's a driver for it to join.
        with self._lock:
            if self._used:
                raise JobError(
                    "`runner.run()` was called twice, but a runner runs only once. Make a new "
                    "`Runner` for another run."
                )
            arguments.check_jobs(len(self._engines), self.policy)
            if self.world.estimate_request:
                self._engines = _first_of(self._engines, self.world)
            engines = tuple(self._engines)
            self._used = True
            self._agree(engines, link)
            if self._writes_metrics:
                _claim_metrics(self.world, self._metric_files)
            for tracker in self._trackers:
                tracker.attach(
                    rank=self.world.rank,
                    folder=None if self._metric_files is None else self._metric_files.folder,
                    resumable=self.checkpoints is not None,
                    stall_timeout_s=self.world.stall_timeout_s,
                )
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

        With different jobs or policies, the ranks' lanes would run different exchanges and hang.

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
                    "See docs/reference/limits-jobs.md#jobs."
                )

    def _begin_files(self, name: str, step: int, *, without: str = "") -> list[dict[str, Any]]:
        if self._metric_files is None:
            return []
        lines = self._metric_files.begin(name, step, without=without)
        for tracker in self._trackers:
            tracker.begin(name, step, lines)
        return lines

    def _close_after_failure(self) -> None:
        """Closes the jobs and files after a lane has failed. Waits until everything is written.

        Jobs whose thread is still alive are left to that thread. All others are closed here.
        """
        with self._lock:
            for engine in self._engines:
                engine.close_unbegun()
        if self._metric_files is not None:
            self._metric_files.close()
        if self._session is not None:
            self._session.close()

    def _close_trackers(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _first_of(engines: Sequence[JobEngine], world: World) -> list[JobEngine]:
    """Returns just the first job, which is the one that `jaxcross estimate` measures.

    If that leaves out any jobs, rank 0 logs it.
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

    We can't always rely on `repr`, because a user's class may not define it, and the default
    contains the object's address.
    """
    cls = type(policy)
    if cls.__repr__ is object.__repr__:
        return f"{cls.__module__}.{cls.__qualname__}"
    return repr(policy)


def _claim_metrics(world: World, files: MetricFiles | None) -> None:
    """Claims the metrics folder for this run on rank 0, which writes to it. Waits for all ranks.

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

    A job that was submitted can be recreated, because the checkpoints contain the function's name
    and the arguments. Each item consists of such a job's name, function and arguments, and is the
    same on all ranks. For a job that was added by `add`, we don't have the function; if this run
    hasn't added it again, rank 0 logs a warning.
    """
    for listed, text in session.resubmit.items():
        try:
            name, fn, arguments = functions.resolve(text, rank)
            # The job's folder was looked up by its listed name, so the submission has to agree on
            # the name.
            if name != listed:
                raise ValueError(f"it creates a job `{name}` instead of `{listed}`")
            check_name(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _log.warning(
                "Job `%s`, which was submitted in an earlier run, is left out, because its "
                "submission cannot be used: %s. To run it, submit it again.",
                listed,
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

    We compare a hash of every job's state in one small all-reduce. In most runs, all hashes are
    equal and nothing else is sent. If a job's states differ, the job gets an error on every rank if
    it uses `check_replicas`; otherwise, there's just a warning.
    """
    joined = [job for job in jobs if job.status != JobStatus.LEFT_OUT] if world.size > 1 else []
    # Every rank must pass the same number of reports, so jobs with nothing to compare pass an empty
    # report.
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

    A job only joins the run once every rank has added it. `names` contains the jobs that were added
    on this rank but never joined. Ranks exchange these names, so the result is the same on every
    rank.
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
        "Some jobs were added during the run but never joined it, because not every rank added "
        f"them or because the run was already ending: {what}. Add a job on all ranks while another "
        "one is still running, for example in that job's function."
    )
    for job in jobs:
        if job.status == JobStatus.LEFT_OUT:
            job.error = error
    return error


def _share_unread_errors(world: World, jobs: Sequence[JobEngine]) -> None:
    """If some rank couldn't read back a job's metrics, sets the job's error on every rank.

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
                    f"Job `{job.name}`: rank {rank} cannot read back the metrics that it passed to "
                    f"`job.log`: {failure}"
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
    """Builds the report, the same on every rank. Waits for all ranks inside `watch`."""
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
    """Returns the exception for this rank to raise after the run was stopped.

    Waits for all ranks, to make sure that no rank exits while another rank is still saving.

    Args:
        world: All ranks.
        terminated: Whether this rank received SIGTERM.
        own: The exception raised by a signal handler on this rank, if any.
    """
    with after_run(world, "end of the run"):
        some = any_rank(world.control, terminated)
        kind = ExitKind.TERMINATED if some else ExitKind.INTERRUPTED
        world.flight.record_exit(kind, "SIGTERM" if some else "Ctrl-C")
        _wait_for_writers(world)
    if own is not None and not isinstance(own, KeyboardInterrupt):
        return own  # raised by the user's own handler, so on purpose
    return SystemExit(TERMINATED) if some else KeyboardInterrupt()


def _wait_for_writers(world: World) -> None:
    """Waits until all ranks have written their output and sent their metrics to trackers.

    When a rank exits with a nonzero code, the launcher terminates all others. So if a rank didn't
    wait here before it exits, the others' last lines and metrics might be lost.
    """
    world.control.allreduce_min(np.zeros(1, np.int64))


def raise_errors(jobs: Sequence[JobEngine], missing: JobError | None) -> None:
    """Raises the first failed job's error, or else `missing`, with notes about the other errors."""
    # Leave out the errors of ejected jobs, since `nonfinite="eject"` means that they should merely
    # be reported. Also leave out jobs that some rank never added: they all share the same error,
    # which is passed as `missing`.
    errors = [
        job.error
        for job in jobs
        if job.error is not None and job.status not in (JobStatus.EJECTED, JobStatus.LEFT_OUT)
    ]
    raise_first([*errors, *([missing] if missing is not None else [])])


def raise_first(errors: Sequence[Exception]) -> None:
    """Raises the first error, if any, with notes about the others.

    Don't rename this function: `jaxcross.health.tracebacks.ends_run` searches tracebacks for its
    name.
    """
    if not errors:
        return
    for other in errors[1:MAX_ERRORS_SHOWN]:
        errors[0].add_note(f"Also: {other}")
    more = len(errors[MAX_ERRORS_SHOWN:])
    if more:
        errors[0].add_note(f"And {more} more failed. For their errors, see `runner.report`.")
    raise errors[0]
