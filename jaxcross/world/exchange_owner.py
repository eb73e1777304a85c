"""Decides who may exchange: either a single run of jobs, or a single thread outside any run.

MPI pairs up exchanges between ranks purely by their order. If two threads of a process exchanged
concurrently, their exchanges would interleave arbitrarily, and differently on each rank. The
gradient from one thread's step could then be summed with the gradient from the other's, without any
error.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import final

from jaxcross.errors import ExchangeError, JobError

VARIABLE = "JAXCROSS_CHECK_CALLS"


def check_interval(environ: Mapping[str, str]) -> int:
    """Returns n if, outside a run, the ranks compare which step they're calling on every n-th call.

    Raises:
        ValueError: `JAXCROSS_CHECK_CALLS` isn't a whole number of at least 1.
    """
    text = environ.get(VARIABLE, "").strip() or "1"
    if not (text.isdecimal() and int(text) >= 1):
        raise ValueError(
            f"`{VARIABLE}` in the environment must be a whole number of at least 1, such as 20 to "
            f"compare the ranks on every 20th call of a step, got {text!r}."
        )
    return int(text)


@final
class ExchangeOwner:
    """Decides whether a thread of this process may exchange right now. Never waits or communicates.

    Attributes:
        broken_step: Name of a step that failed outside a run in the middle of its exchanges, or "".
            Other ranks may still be blocked in the rest of those exchanges.
        must_agree: Whether a step failed outside a run before its first exchange. It may have
            failed on this rank alone, so the ranks have to agree on the next step.
        check_every: n if, outside a run, the ranks compare which step they're calling on every n-th
            call. Identical on all ranks.
        unchecked: Number of calls since the last comparison.
        functions: Number of steps the ranks have agreed on outside a run.
        lane_threads: Lane threads that are still alive.
        job_threads: Job threads that are still alive.
    """

    __slots__ = (
        "_caller",
        "_run",
        "_step",
        "broken_step",
        "check_every",
        "functions",
        "job_threads",
        "lane_threads",
        "must_agree",
        "unchecked",
    )

    def __init__(self, check_every: int = 1) -> None:
        self.check_every = check_every
        self.unchecked = 0
        self.functions = 0
        self._run = threading.Lock()
        self._step = threading.Lock()
        self._caller = (0, "")  # the thread that holds `_step`, and its step or run
        self.broken_step = ""
        self.must_agree = False
        self.lane_threads: set[threading.Thread] = set()
        self.job_threads: set[threading.Thread] = set()

    @property
    def in_run(self) -> bool:
        """Whether any of a run's threads is still alive in this process."""
        return bool(self.lane_threads or self.job_threads)

    def run(self) -> ExitStack:
        """Returns a context in which a run may exchange, from its first message to its last.

        Raises:
            JobError: Another run is in progress, a broken run has left a lane thread behind, or
                another thread is calling a step outside a run.
        """
        refusal = JobError(
            "A run is in progress in this process, and two at once would mix up their messages. "
            "Add these jobs to its runner (`runner.add(name, fn)`, on every rank), or run them "
            "after it. Inside a job, call the step directly, without another runner."
        )
        if not self._run.acquire(blocking=False):
            raise refusal
        if self.lane_threads:
            self._run.release()
            raise refusal
        # Make sure that no other thread is in a step outside the run, or can start one. A run sends
        # messages even before it has an exchange lane, and MPI could match them with that step's.
        if not self._step.acquire(blocking=False):
            theirs, other = self._in_step()
            self._run.release()
            raise JobError(
                f"A run can't start in thread `{threading.current_thread().name}` while thread "
                f"`{other}` is running `{theirs}`, because their messages would be mixed up. Start "
                f"it after `{theirs}` has ended, or make that thread's work a job of the runner "
                "(`runner.add(name, fn)`, on every rank)."
            )
        self._caller = (threading.get_ident(), "runner.run()")
        return _releasing(self._step, self._run)

    def step(self, name: str) -> ExitStack:
        """Returns a context in which this thread may perform a step's exchanges outside any run.

        Raises:
            ExchangeError: An earlier step failed on this rank in the middle of its exchanges.
            JobError: Another thread is calling a step, or a run is in progress.
        """
        if not self._step.acquire(blocking=False):
            theirs, other = self._in_step()
            raise JobError(
                f"`{name}` was called from thread `{threading.current_thread().name}` while thread "
                f"`{other}` is running `{theirs}`. Exchanges match up between ranks by the order "
                "of the calls, and which of two threads calls first may differ between ranks, so "
                "one step's sums could be mixed up with the other's. Call steps from one thread, "
                "or make the threads' work jobs of a `jaxcross.Runner`, which agrees on an order."
            )
        # Only check this once we hold the lock. Until the other thread releases it, its step can
        # still fail in the middle of its exchanges and set `broken_step`.
        if self.broken_step:
            self._step.release()
            raise ExchangeError(
                f"`{name}` cannot exchange: `{self.broken_step}` failed halfway on this rank. "
                "Other ranks may still be in the rest of its exchanges, which would be mixed up "
                "with the exchanges of this call. Restart all ranks. To avoid this, make the loop "
                "a job of a `jaxcross.Runner`: a job that fails leaves on all ranks at once."
            )
        self._caller = (threading.get_ident(), name)
        return _releasing(self._step)

    def _in_step(self) -> tuple[str, str]:
        """Returns the step or run that holds `_step`, and its thread's name."""
        ident, theirs = self._caller
        return theirs, next((t.name for t in threading.enumerate() if t.ident == ident), str(ident))

    def check_due(self) -> bool:
        """Counts a call outside a run, and returns whether the ranks have to compare this call.

        The counts must be identical on all ranks, so call this just before the step communicates,
        not when it begins: a step that fails on a single rank before communicating must not be
        counted there.
        """
        self.unchecked += 1
        if self.unchecked < self.check_every:
            return False
        self.unchecked = 0
        return True

    def check_not_stray(self, step: str) -> None:
        """Raises if, during a run, a step is called from a thread that doesn't belong to a job.

        Raises:
            JobError: The step's exchanges would have no place in the order all ranks have agreed
                on.
        """
        thread = threading.current_thread()
        if self.in_run and thread not in self.job_threads:
            raise JobError(
                f"`{step}` was called from thread `{thread.name}`, which doesn't belong to any job "
                "of the running runner, so its exchanges have no place in the order that all ranks "
                "share. Call it directly in a job's function (`runner.add(name, fn)`) rather than "
                "in a thread started there, or before or after `runner.run()`. "
                "See docs/reference/limits-jobs.md#jobs."
            )


def _releasing(*locks: threading.Lock) -> ExitStack:
    # The caller already holds the locks; leaving the context releases them in the given order. That
    # way, if a lock can't be acquired, the traceback ends in the caller's own frame instead of
    # inside `contextlib`.
    context = ExitStack()
    for lock in reversed(locks):
        context.callback(lock.release)
    return context
