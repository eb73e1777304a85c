"""Runs a command that ends together with its parent: `python end_with.py PARENT command ...`.

Uses only the standard library.

If the launcher is killed, `mpirun` must not keep running, because nobody could stop the ranks then.
On Linux, a process can ask the kernel for a signal when its parent dies (`PR_SET_PDEATHSIG`).

More precisely, the kernel sends this signal when the *thread* that started the process ends, even
if the parent process lives on. That's fine here, because that thread waits for the command, so it
only ends earlier if the whole launcher dies.

You'd usually make this system call in the child process, through the argument `preexec_fn` of
`subprocess`. We can't do that: with this argument, `subprocess` has to fork the launcher, and
forking a process in which JAX has started threads may deadlock. So the launcher starts this script
instead, which makes the call and then replaces itself by the command.
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
    """Returns a command that runs `line`, but at most until the process `parent` ends.

    On systems other than Linux, returns `line` itself.
    """
    if sys.platform != "linux":
        return list(line)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(parent), *line]


def main(arguments: Sequence[str]) -> NoReturn:
    """Asks for the signal and becomes the command. Never returns."""
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
            f"jaxcross launch: `{command[0]}` cannot be started: {error}",
            file=sys.stderr,
            flush=True,
        )
    os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
