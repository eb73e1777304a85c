"""Enums for how a job ended, and for how a rank's process ended.

Their members are strings, because users compare `job.status` with strings, and because they're
written to files and messages.
"""

from __future__ import annotations

from enum import StrEnum


class _Ending(StrEnum):
    def __repr__(self) -> str:
        return repr(self.value)  # so that users see plain strings


class JobStatus(_Ending):
    """How a job ended.

    Attributes:
        ENDED: The job's function returned.
        STOPPED_EARLY: The function returned after early stopping (`job.stop_early`) had ended its
            loop.
        STOPPED: The job or the whole run was stopped by a request.
        FAILED: The function raised an error on some rank.
        EJECTED: Some rank ejected the job, e.g. because of a loss that wasn't finite, and no rank
            failed.
        LEFT_OUT: Some rank never added the job.
    """

    ENDED = "ended"
    STOPPED_EARLY = "stopped early"
    STOPPED = "stopped"
    FAILED = "failed"
    EJECTED = "ejected"
    LEFT_OUT = "left out"


class ExitKind(_Ending):
    """How a rank's process ended, according to its event file.

    Attributes:
        LEFT: The script ended normally.
        FAILED: An exception ended the process.
        TERMINATED: The process received SIGTERM.
        INTERRUPTED: The process was interrupted by Ctrl-C.
        TOLD: Another rank told the process to end.
        REPORTED: The process ended after reporting that other ranks had failed.
    """

    LEFT = "left"
    FAILED = "failed"
    TERMINATED = "terminated"
    INTERRUPTED = "interrupted"
    TOLD = "told"
    REPORTED = "reported"
