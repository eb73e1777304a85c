"""Runs a rank's script: `python -m jaxcross.commands.rank train.py ...`, like `python -m mpi4py`.

If you press Ctrl-C before `jaxcross.initialize()` has returned (i.e. while the ranks are still
starting up), Python would normally print a useless traceback through some import, once for each
rank. We make each rank quietly exit with code 130 instead, and `jaxcross launch` prints a single
line saying that the run was stopped before it started.
"""

from __future__ import annotations

import runpy
import signal
import sys

from jaxcross.health import install_interrupt

INTERRUPTED = 130


def main() -> None:
    """Runs the script or module named on the command line.

    Raises:
        SystemExit: With the script's own exit code; 130 after Ctrl-C.
    """
    install_interrupt()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `rank_supervisor` blocked it
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        if (
            sys.excepthook is not sys.__excepthook__
        ):  # the world has already installed its own, which names the rank and ends the others
            raise
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
