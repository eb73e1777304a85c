"""How a job ended, and how a rank's process ended.

The members are texts: users compare `job.status` with them, and files and messages contain them.
"""

from __future__ import annotations

from enum import StrEnum


class _Ending(StrEnum):
    def __repr__(self) -> str:
        return repr(self.value)  # users see plain texts


class JobStatus(_Ending):
    """How a job ended.

    Attributes:
        ENDED: Its function returned.
        STOPPED_EARLY: The same, after `job.stop_early` had ended its loops.
        STOPPED: A request stopped the job or the whole run.
        FAILED: Its function raised on some rank.
        EJECTED: Some rank ejected it, e.g. for a loss that wasn't finite, and no rank failed.
        LEFT_OUT: Some rank never added it.
    """

    ENDED = "ended"
    STOPPED_EARLY = "stopped early"
    STOPPED = "stopped"
    FAILED = "failed"
    EJECTED = "ejected"
    LEFT_OUT = "left out"


class ExitKind(_Ending):
    """How a rank's process ended, as its event file says.

    Attributes:
        LEFT: Its script ended.
        FAILED: It raised.
        TERMINATED: It received SIGTERM.
        INTERRUPTED: Ctrl-C.
        TOLD: Another rank told it to end.
        REPORTED: It reported a failure of other ranks.
    """

    LEFT = "left"
    FAILED = "failed"
    TERMINATED = "terminated"
    INTERRUPTED = "interrupted"
    TOLD = "told"
    REPORTED = "reported"
