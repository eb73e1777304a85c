"""Starts commands that don't outlive the benchmark that started them. Measures nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from jaxcross._processes import related

PATIENCE_S = 30


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Raises SystemExit inside on SIGTERM or SIGHUP, so that open resources are closed."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    handled = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN
    ]  # ignored e.g. under nohup
    before = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def started(line: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a command that is terminated when the block ends.

    `mpirun` gets time to terminate its ranks, which have their own process groups.
    """
    with subprocess.Popen(line, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            _tell(process)
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE_S)
            finally:  # even after a second signal
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _tell(process: subprocess.Popen[str]) -> None:
    """Sends SIGTERM.

    A lab starts commands with `nsenter`, which would end on SIGTERM without passing the signal on.
    So we signal the processes inside instead.
    """
    line = process.args
    inside = related(process.pid) if isinstance(line, list) and line[0] == "nsenter" else []
    for pid in inside:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    if not inside:
        process.terminate()


def run(line: Sequence[str], environ: Mapping[str, str]) -> None:
    """Runs a command to completion.

    Raises:
        CalledProcessError: The command failed.
    """
    with started(line, env=environ) as process:
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, line)
