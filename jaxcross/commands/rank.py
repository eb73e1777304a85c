"""Runs a rank's script, as `python -m mpi4py` does: `python -m jaxcross.commands.rank train.py
...`.

A rank that Ctrl-C reaches before `jaxcross.initialize()` has returned ends with code 130 and
without the traceback of what it was importing: `jaxcross launch` says in one line that the run was
stopped before its start.
"""

from __future__ import annotations

import runpy
import signal
import sys

from jaxcross.health.gc_safe_signals import install_interrupt

INTERRUPTED = 130


def main() -> None:
    """Runs the command line's script or module.

    Raises:
        SystemExit: With the script's own exit code; 130 after Ctrl-C.
    """
    install_interrupt()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `supervise` has blocked it
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        if (
            sys.excepthook is not sys.__excepthook__
        ):  # that of a world, which names the rank and ends the others
            raise
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
