"""`Runner`: several jobs, ordinary loops, share this rank's device."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from jaxcross.checkpoint import Checkpoints, Session
from jaxcross.errors import JobError
from jaxcross.health.abort import print_error
from jaxcross.health.deferred_signals import defer_signals
from jaxcross.interleave.instrument import Instrument, Listeners
from jaxcross.interleave.policy import Policy, RoundRobin
from jaxcross.jobs import arguments
from jaxcross.jobs.admission import MemoryAdmission
from jaxcross.jobs.agreement import agree, agreed_exit, claim_metrics, open_session, taken_over
from jaxcross.jobs.arguments import check_job_name
from jaxcross.jobs.context import JobContext
from jaxcross.jobs.job_run import JobRun, first_of
from jaxcross.jobs.outcome import compare_replicas, left_out, raise_errors, report_of, tell_unread
from jaxcross.jobs.progress import ProgressReporter
from jaxcross.jobs.stop_text import stop_text
from jaxcross.jobs.submissions import RegisteredFunctions
from jaxcross.report import Recorder, Report
from jaxcross.report.metric_files import MetricFiles
from jaxcross.runtime.chaos import Chaos, chaos_of
from jaxcross.runtime.driver import Driver
from jaxcross.runtime.emulated_link import Link
from jaxcross.runtime.flight_notes import FlightNotes
from jaxcross.runtime.job_record import check_choice
from jaxcross.runtime.joint_start import Start
from jaxcross.runtime.paused_run import nobody_resumes
from jaxcross.runtime.stall_watch import after_run
from jaxcross.world import World, current_world


class Runner:
    """Runs jobs that take turns on this rank's device, the same jobs on every rank.

    Args:
        world: From `jaxcross.initialize()`; the one that was initialized if None.
        policy: `RoundRobin()` crosses the jobs over, `Weighted(shares)` too, by shares of device and link,
            `Sequential()` runs one after the other. Same on every rank.
        instruments: Told of spans and notes while it runs.
        depth: Compute segments on the device at once; if None, as many as suit JAX's backend, so far 2 on each.
        link: Hold exchanges as a slow network would. A string describes a real link for the report.
        memory: Bytes of arrays that this rank may hold, as a number or a text such as `80GB`. A job whose step does not
            fit next to the others fails, alone and on every rank, before its first step. An array that several jobs'
            steps are given and don't donate, such as the base model under adapters, counts once. If None: what the
            device states; on CPUs the rank's share of the machine's memory, or of a control group's. May differ by
            rank.
        start: `together`: the jobs that begin the run make their first steps once all of them have compiled theirs, so
            that none trains next to another one's compiler. They wait for a job as long as it traces and compiles, but
            30 s at most for everything else it does before its first step. `as ready`: each begins as soon as it can,
            as always under `Sequential`. Results are the same to the bit. Same on every rank.
        chaos: For tests: a seed by which the run's threads are late now and then, differently on each rank. Results
            are the same to the bit. If None, `JAXCROSS_CHAOS` in the environment names the seed.
        events: A folder where each rank writes down what it does, for `jaxcross doctor --post-mortem`; else what the
            variable `JAXCROSS_EVENTS` says.
        checkpoints: Keep the jobs' states on disk, and resume from there; see `Checkpoints`. Same on every rank, but
            for the directory.
        metrics: A folder where rank 0 writes what jobs log, as a JSONL and a CSV each; given on every rank. After a
            restart from `checkpoints` it has each step once.
        check_replicas: Compare the ranks' copies of each job's state after so many steps, in one pass over the state on
            the host. If they differ, the job leaves with an `ExchangeError` on every rank, and other jobs continue.
            Same on every rank. If None, states are compared only at checkpoints and at a job's end, and a difference is
            a warning and a line of the report. Leaves that a job names by `rank_local` aren't compared, nor are those
            that an exchange strategy declares rank-local; see `docs/reference/faults.md`.
        progress: Whether to show how far the jobs are. By default `jaxcross launch` draws a table on a terminal;
            elsewhere rank 0 prints a line a job to standard error, first after 3 s, then every 10 s, in a long run
            every minute. A number is the seconds between lines. `JAXCROSS_PROGRESS` in the environment overrules it.

    Raises:
        TypeError: An argument is of another type.
        ValueError: `depth` is below 1, `memory` is no number of bytes, `progress` is a number that is not above 0,
            `start` is another word, `check_replicas` is no whole number of at least 1, or this rank cannot write to the
            folder `events`.

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
        depth: int | None = None,
        link: Link | str | None = None,
        memory: int | str | None = None,
        start: Start = "together",
        chaos: int | None = None,
        events: str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | None = None,
        metrics: str | os.PathLike[str] | None = None,
        check_replicas: int | None = None,
        progress: bool | float | None = None,
    ) -> None:
        listening = arguments.checked_instruments(instruments)
        arguments.check_world(world)
        arguments.check_policy(policy)
        arguments.check_link(link)
        limit = arguments.checked_memory(memory)
        check_choice(start, Start, "`start`")
        arguments.check_folder("`events`", events)
        arguments.check_folder("`metrics`", metrics)
        arguments.check_checkpoints(checkpoints)
        arguments.check_progress(progress)
        if chaos is not None:
            arguments.check_count("`chaos`", chaos, least=-math.inf)
        self.world = world if world is not None else current_world()
        if self.world.estimate_request:  # one job runs to its first step, and nothing of the user's is written
            listening, policy, events, checkpoints, metrics, check_replicas = (), None, None, None, None, None
        self.policy = policy if policy is not None else RoundRobin()
        self.chaos = chaos_of(os.environ, self.world.rank) if chaos is None else Chaos(chaos, self.world.rank)
        self.depth, self.link, self.checkpoints = arguments.checked_depth(depth), link, checkpoints
        self.start: Start = start
        self._admission = MemoryAdmission.of(self.world, limit)
        self.check_replicas = arguments.checked_interval(check_replicas)
        self._runs: list[JobRun] = []
        self.report: Report | None = None
        self._recorder = Recorder()
        if events is not None:
            arguments.record_events(self.world.flight, events)
        self._writes_metrics = metrics is not None
        self._metric_files: MetricFiles | None = None
        if metrics is not None and self.world.rank == 0:
            self._metric_files = MetricFiles(os.fspath(metrics), None if checkpoints is None else checkpoints.path)
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
        self._submitted: set[str] = set()  # names of jobs that not all ranks have heard of

    @property
    def jobs(self) -> list[JobContext]:
        """The jobs that were added; after the run in the order in which they joined, the same on every rank."""
        return [run.context for run in self._runs]

    @property
    def booked_bytes(self) -> int:
        """The most bytes that jobs have booked at once on this rank; see `memory`."""
        return self._admission.most_booked_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to end: `run` ends its threads itself."""

    def add(self, name: str, fn: Callable[..., Any], /, **kwargs: Any) -> JobContext:
        """Adds a job: `fn(job, **kwargs)` will run in a thread of its own. Returns what `fn` will receive as `job`.

        During the run it may be called too, in any thread and on every rank, in any order: the job joins, between two
        steps of the others, once every rank has added it. Never waits. A job that joined an earlier run, and has been
        added before this one, is not added twice: returned is the one that is there.

        Raises:
            ValueError: The name is empty or taken.
            TypeError: `fn` cannot be called as `fn(job, **kwargs)`, or makes a generator or a coroutine.
            JobError: The run is over.
        """
        arguments.check_job(name, fn, kwargs)
        return self._add(name, fn, kwargs)

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
                    raise JobError(f"Job `{name}` comes too late: this runner has run. Make a new Runner.")
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
            check_replicas=self.check_replicas,
            begin_files=partial(self._begin_files, name) if self._writes_metrics else None,
        )

    def register(self, name: str, fn: Callable[..., Any]) -> None:
        """Registers `fn`, so that rank 0 can add jobs of it during the run: `submit(name, job=..., **arguments)`.

        Call it with the same arguments on every rank.

        Raises:
            ValueError: The name is empty or taken.
            TypeError: `fn` cannot be called.
        """
        self._functions.add(name, fn)

    def submit(self, name: str, /, *, job: str, **arguments: Any) -> None:
        """Adds a job on all ranks, from rank 0 alone: `fn(job, **arguments)` of the function registered as `name`.

        In any thread, during the run. Does not wait. Ranks are sent the names and, as JSON, the arguments; never code.

        Raises:
            ValueError: Nothing is registered as `name`, `job` is empty or taken, or the arguments are too long.
            TypeError: The arguments are not what JSON can say.
            JobError: The run has not begun or is over, or this is another rank.
        """
        if self.world.rank != 0:
            raise JobError(
                f"Job `{job}` was submitted on rank {self.world.rank}. Submit on rank 0; to add a job on every rank, "
                "use `runner.add`."
            )
        check_job_name(job)
        text = self._functions.request(name, job, arguments)
        with self._lock:
            if self._added_before(job) is not None:
                return
            self._check_name(job)
            if self._driver is None or not self._driver.submit(text):
                raise JobError(f"Job `{job}` cannot be submitted: jobs are, while `runner.run()` runs.")
            self._submitted.add(job)
            if self._session is not None:
                self._session.added(job, text)

    def _added_before(self, name: str) -> JobContext | None:
        # A job that joined an earlier run is in this one from its beginning. A function that goes on from before the
        # step in which it added that job adds it once more.
        if self._session is None or name not in self._session.added_before:
            return None
        return next((job for job in self.jobs if job.name == name), None)

    def _check_name(self, name: str) -> None:
        if not name.isprintable():
            raise ValueError(f"the name of a job must have printable characters only, got {name!r}")
        if name in self._submitted or any(job.name == name for job in self.jobs):
            raise ValueError(f"There is a job `{name}` already. Reports and errors need one name for each job.")

    def _add_submitted(self, text: str) -> None:
        """Adds the job of a submission, which reaches all ranks."""
        name, fn, arguments = self._functions.resolve(text, self.world.rank)
        with self._lock, suppress(ValueError):  # if this rank has added one of that name, that is the one that joins
            self._submitted.discard(name)
            self._add(name, fn, {**arguments})

    def run(self) -> Report:
        """Runs all jobs to their end; waits for it, and for all ranks.

        Returns:
            The report, the same on every rank.

        Raises:
            JobError: It has run, or another run is in progress, this call being in one of its jobs perhaps, or another
                thread is in a step outside any run.
            JobError, ExchangeError: Jobs failed, or were added and never joined because some rank did not add them:
                raised on every rank after the others have ended, the first one with notes on further ones. `report`
                then holds what was measured.
            KeyboardInterrupt: Somebody interrupted a rank; raised on every rank, which all stopped at the same step. On
                that rank alone if all jobs were over. Before, rank 0 prints what was saved of each job.
            SystemExit: The same, with exit code 143, after SIGTERM on any rank.
            BaseException: The same, whatever your own handler of another signal raised, on the ranks where it did;
                `KeyboardInterrupt` on the others.
            JobError: All jobs that are left are paused, and no thread or signal handler on any rank can resume them.
            ValueError: There are no jobs, or `Weighted` has not a share for each.
        """
        with self.world.exchange_owner.run():
            report = self._run()
        if self.world.estimate_request and self._runs[0].context.status == "stopped":
            raise SystemExit(0)  # the estimate was made and printed
        return report

    def _run(self) -> Report:
        with self._lock:  # a thread that adds a job now waits until it can join
            if self._used:
                raise JobError("This runner has run. Make a new Runner for another run.")
            arguments.check_jobs(len(self._runs), self.policy)
            if self.world.estimate_request:
                self._runs = first_of(self._runs, self.world)
            runs = tuple(self._runs)
            self._used = True
            self._agree(runs)
            if self._writes_metrics:
                claim_metrics(self.world, self._metric_files)
            if self.checkpoints is not None:
                names = [run.name for run in runs]
                self._session = open_session(self.checkpoints, self.world, names, self.policy)
                for name, fn, given in taken_over(self._session, self._functions, self._check_name, self.world.rank):
                    self._runs.append(self._job_run(name, fn, {**given}))
                runs = tuple(self._runs)
            driver = self._driver = Driver(
                world=self.world,
                jobs=[(run.name, run.make_thread) for run in runs],
                policy=self.policy,
                depth=self.depth,
                listeners=self._listeners,
                link=self.link if isinstance(self.link, Link) else None,
                on_text=self._add_submitted,
                chaos=self.chaos,
                start=self.start,
            )
            for run, record in zip(runs, driver.records, strict=True):
                run.attach(driver, record, self._session)
        start_ns = time.monotonic_ns()
        with self._progress, defer_signals() as held:  # a rank that is asked to stop while it saves is stopping already
            try:
                stopped = driver.run(held)
            except BaseException:
                self._break_off()
                raise
            end_ns = time.monotonic_ns()
            with self._lock:  # who is adding a job gets it into the list first
                for run in self._runs:
                    run.close()
                if self._metric_files is not None:
                    self._metric_files.close()
                # Added in other orders elsewhere, perhaps. A new list: while `sort` works, a list is empty, and another
                # thread that asks for `jobs` would see none.
                self._runs = sorted(self._runs, key=lambda run: run.order)
            jobs = self.jobs
            if self._session is not None:
                for run in self._runs:
                    run.save_left()
                broke_off = not all(job.status == "ended" for job in jobs)
                self._session.close(unused=broke_off and not any(job.step for job in jobs))
            with after_run(self.world, "report"):
                compare_replicas(self.world, jobs)
                missing = left_out(self.world, jobs, [*driver.router.left_out, *sorted(self._submitted)])
                tell_unread(self.world, jobs)
            self.report = report_of(
                jobs,
                self._recorder,
                world=self.world,
                policy=self.policy.name,
                start_ns=start_ns,
                end_ns=end_ns,
                link="" if self.link is None else str(self.link),
                watch=after_run(self.world, "report"),
            )
            if driver.router.paused_run.is_over:  # stopped, but by nobody's signal
                paused = [job.name for job in jobs if job.paused and job.status == "stopped"]
                missing, stopped = missing or nobody_resumes(paused), False
            if stopped and self.world.rank == 0:
                folder = None if self.checkpoints is None else str(self.checkpoints.path)
                print_error(stop_text([run.at_stop() for run in self._runs], folder))
            own = driver.interrupt or (held[0] if held else None)  # no other rank has heard of it, if not stopped
            ending = agreed_exit(self.world, terminated=driver.terminated, own=own) if stopped else own
        if ending is None and held:  # while the handlers were put back
            ending = held[0]
        if ending is not None:
            raise ending
        raise_errors(jobs, missing)
        return self.report

    def _break_off(self) -> None:
        """A lane broke: ends what no thread of a job ends. Waits for what is being written."""
        with self._lock:
            for run in self._runs:
                run.close_unbegun()
        if self._metric_files is not None:
            self._metric_files.close()
        if self._session is not None:
            self._session.close()

    def _agree(self, runs: Sequence[JobRun]) -> None:
        """Waits for all ranks: they must have the same jobs and the same policy, or their lanes would never meet."""
        mine = {
            "jobs": [run.name for run in runs],
            "policy": repr(self.policy),
            "start": self.start,
            "checkpoints": self.checkpoints and self.checkpoints.agreed,
            "check_replicas": self.check_replicas,
            "metrics": self._writes_metrics,
        }
        agree(self.world, mine)

    def _begin_files(self, name: str, step: int, *, without: str = "") -> list[dict[str, Any]]:
        return [] if self._metric_files is None else self._metric_files.begin(name, step, without=without)
