"""Runs a command that dies along with its parent: `python end_with.py PARENT command ...`.

Uses only the standard library.

If the launcher gets killed, `mpirun` mustn't keep going, because there would be nobody left to stop
the ranks. Linux lets a process ask the kernel for a signal when its parent dies
(`PR_SET_PDEATHSIG`).

Strictly speaking, the kernel sends this signal as soon as the *thread* that started the process
exits, even if the parent process lives on. That's fine here: the thread stays around to wait for
the command, so it only exits early if the whole launcher dies.

Normally you'd make this system call in a `preexec_fn`, but passing one forces `subprocess` to fork
the launcher, and forking a process in which JAX has started threads can deadlock. So the launcher
runs this script instead, which makes the call and then execs the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_BY_SIGNAL = 128


def tied(line: Sequence[str], parent: int) -> list[str]:
    """Returns a command that runs `line`, but not for longer than the process `parent`.

    Anywhere but on Linux, returns `line` unchanged.
    """
    if sys.platform != "linux":
        return list(line)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(parent), *line]


def main(arguments: Sequence[str]) -> NoReturn:
    """Requests the signal and execs the command. Never returns."""
    parent = int(arguments[0])
    command = list(arguments[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # otherwise Ctrl-C would print a traceback
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_BY_SIGNAL + signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"jaxcross launch: `{command[0]}` cannot be started: {error}. It must exist at this "
            "path on this machine, and be executable.",
            file=sys.stderr,
            flush=True,
        )
    os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
