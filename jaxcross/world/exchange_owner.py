"""Decides who may exchange: either a single run of jobs, or a single thread outside any run.

MPI matches up the exchanges of different ranks by nothing but their order. If two threads of a
process exchanged at the same time, their exchanges would alternate in an arbitrary order, which may
differ between ranks. A gradient of one thread's step would then be summed with a gradient of the
other thread's, without any error.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import final

from jaxcross.errors import ExchangeError, JobError

VARIABLE = "JAXCROSS_CHECK_CALLS"


def check_interval(environ: Mapping[str, str]) -> int:
    """Returns n if the ranks compare their calls of steps outside a run on every n-th call.

    Raises:
        ValueError: `JAXCROSS_CHECK_CALLS` is not a whole number of at least 1.
    """
    text = environ.get(VARIABLE, "").strip() or "1"
    if not (text.isdecimal() and int(text) >= 1):
        raise ValueError(
            f"`{VARIABLE}` in the environment must be a whole number of at least 1, the calls of "
            f"steps from one comparison of the ranks to the next, got {text!r}."
        )
    return int(text)


@final
class ExchangeOwner:
    """Decides whether a thread of this process may exchange now. Never waits or communicates.

    Attributes:
        broken_step: The name of a step that failed outside a run in the middle of its exchanges, or
            "". Other ranks may still be waiting in the remaining exchanges of that step.
        must_agree: Whether a step failed outside a run before its first exchange. Perhaps it failed
            only on this rank, so the ranks have to agree on the next step.
        check_every: n if the ranks compare on every n-th call outside a run which step they are
            calling. Identical across ranks.
        unchecked: Number of calls since the last such comparison.
        functions: Number of steps that the ranks have agreed on outside a run.
        lane_threads: The lanes' threads that are alive.
        job_threads: The jobs' threads that are alive.
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
        """Whether any thread of a run is alive in this process."""
        return bool(self.lane_threads or self.job_threads)

    def run(self) -> ExitStack:
        """Returns a context in which a run may exchange, from its first message to its last one.

        Raises:
            JobError: Another run is in progress, a run that broke has left a lane's thread behind,
                or another thread is calling a step outside any run.
        """
        refusal = JobError(
            "A run is in progress in this process, and two at once would mix up their messages. "
            "Add these jobs to its runner (`runner.add(name, fn)`, on every rank), or run them "
            "after it. A job calls its step itself."
        )
        if not self._run.acquire(blocking=False):
            raise refusal
        if self.lane_threads:
            self._run.release()
            raise refusal
        # Make sure that no other thread is in a step outside the run, or begins one. A run already
        # sends messages before it has an exchange lane, and MPI could match these messages with
        # those of such a step.
        if not self._step.acquire(blocking=False):
            theirs, other = self._in_step()
            self._run.release()
            raise JobError(
                f"A run was to begin in thread `{threading.current_thread().name}` while thread "
                f"`{other}` is in `{theirs}`: the run's messages would be mixed with that step's. "
                "Begin the run after it, or make that thread's work a job of the runner "
                "(`runner.add(name, fn)`, on every rank)."
            )
        self._caller = (threading.get_ident(), "runner.run()")
        return _releasing(self._step, self._run)

    def step(self, name: str) -> ExitStack:
        """Returns a context in which this thread may make the exchanges of a step outside any run.

        Raises:
            ExchangeError: An earlier step has failed on this rank in the middle of its exchanges.
            JobError: Another thread is calling a step, or a run is in progress.
        """
        if not self._step.acquire(blocking=False):
            theirs, other = self._in_step()
            raise JobError(
                f"`{name}` was called from thread `{threading.current_thread().name}` while thread "
                f"`{other}` is in `{theirs}`. Ranks meet in the order of the calls, and which of "
                "two threads calls first may differ between them: one step's sums would be mixed "
                "with the other's. Call steps from one thread, or make the threads' work jobs of a "
                "`jaxcross.Runner`, which agrees on an order."
            )
        # Check this only after acquiring the lock. As long as another thread holds it, the step of
        # that thread may still fail in the middle of its exchanges, and set `broken_step`.
        if self.broken_step:
            self._step.release()
            raise ExchangeError(
                f"`{name}` cannot exchange: `{self.broken_step}` failed halfway on this rank. "
                "Other ranks may be in the rest of its exchanges, and what comes now would be "
                "mixed with them. Restart all ranks. A job of a `jaxcross.Runner` that fails "
                "leaves on all ranks at once."
            )
        self._caller = (threading.get_ident(), name)
        return _releasing(self._step)

    def _in_step(self) -> tuple[str, str]:
        """Returns the step or run that holds `_step`, and the name of its thread."""
        ident, theirs = self._caller
        return theirs, next((t.name for t in threading.enumerate() if t.ident == ident), str(ident))

    def check_due(self) -> bool:
        """Counts a call outside a run. Returns whether the ranks have to compare what they call.

        The counts have to be identical across ranks. So call this when the step is about to
        communicate, rather than when it begins: a step may fail on a single rank before it has
        communicated, and must not be counted there.
        """
        self.unchecked += 1
        if self.unchecked < self.check_every:
            return False
        self.unchecked = 0
        return True

    def check_not_stray(self, step: str) -> None:
        """Raises if a step is called during a run by a thread that isn't a job's thread.

        Raises:
            JobError: The step's exchanges would have no place in the order that all ranks agreed
                on.
        """
        thread = threading.current_thread()
        if self.in_run and thread not in self.job_threads:
            raise JobError(
                f"`{step}` was called from thread `{thread.name}`, which is not a job of the "
                "runner that is in progress. Its exchanges would have no place in the order that "
                "all ranks share. Call it in a job's own function (`runner.add(name, fn)`), not in "
                "a thread started there, or before or after `runner.run()`. "
                "See docs/reference/limits.md#jobs."
            )


def _releasing(*locks: threading.Lock) -> ExitStack:
    # The returned context releases the locks, in the order of the arguments. It doesn't acquire
    # them, because the caller has done that already. Thus, if a lock can't be acquired, the
    # traceback ends in the caller's own frame, rather than in a frame of `contextlib`.
    context = ExitStack()
    for lock in reversed(locks):
        context.callback(lock.release)
    return context
