"""Runs a rank's script: `python -m jaxcross.commands.rank train.py ...`, like `python -m mpi4py`.

If Ctrl-C reaches a rank before `jaxcross.initialize()` has returned, the rank exits with code 130,
without the traceback of what it was importing: `jaxcross launch` says in one line that the run was
stopped before its start.
"""

from __future__ import annotations

import runpy
import signal
import sys

from jaxcross.health import install_interrupt

INTERRUPTED = 130


def main() -> None:
    """Runs the script or module of the command line.

    Raises:
        SystemExit: With the script's own exit code; 130 after Ctrl-C.
    """
    install_interrupt()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by `rank_supervisor`
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        if (
            sys.excepthook is not sys.__excepthook__
        ):  # a world has installed its hook, which names the rank and terminates the others
            raise
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
