"""Becomes a command that ends with its parent: `python end_with.py PARENT command ...`.

Uses only the standard library.

If the launcher is killed, `mpirun` must not outlive it, because nobody could then stop the ranks.
So the command gets SIGTERM if the thread that started it ends. That thread waits for the command,
so it ends first only if its whole process does. We don't do this in a `preexec_fn`, because
`subprocess` would then fork, which a process with JAX's threads must not do.
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
    """Returns a command that runs `line` until the process `parent` ends. Returns `line` itself on
    systems other than Linux.
    """
    if sys.platform != "linux":
        return list(line)
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(parent), *line]


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the command."""
    parent = int(arguments[0])
    command = list(arguments[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C prints no traceback from here
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
