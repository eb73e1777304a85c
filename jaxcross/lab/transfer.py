"""Measures a plain TCP transfer from one host to another.

These can be hosts in a lab or real machines. All we need is some way to run a command on each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxcross.lab.meter import PATIENCE_S

METER = Path(__file__).with_name("meter.py")
START_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A finished transfer.

    Attributes:
        bits_per_s: The rate at the receiver's socket. This excludes headers, so it's about 4% below
            the link's rate.
        round_trip_us: Shortest round-trip time seen during the transfer, in microseconds.
        source: Address of the sender.
        target: Address of the receiver.
        interface: The sender's network interface, or "" if none has that address.
    """

    bits_per_s: float
    round_trip_us: int
    source: str
    target: str
    interface: str


def measure_transfer(
    on_source: Callable[[Sequence[str]], Sequence[str]],
    on_target: Callable[[Sequence[str]], Sequence[str]],
    target: str,
    *,
    python: str,
    seconds: float,
    burst_bytes: int = 0,
    by_name: bool = True,
) -> Transfer:
    """Sends from one host to a free port on another for about `seconds`, and measures the rate.

    On links slower than a few Mbit/s, this overruns `seconds`, because at least a few packets have
    to arrive and everything still in flight needs to drain. It never takes more than a minute and a
    half.

    Args:
        on_source: Returns the command line that runs a command on the sender.
        on_target: Returns the command line that runs a command on the receiver.
        target: The receiver's name.
        python: Path of the Python interpreter, which must be the same on both hosts. We pipe the
            program into it, so nothing needs to be installed there.
        seconds: How long to measure, in seconds.
        burst_bytes: How many bytes an idle link lets through at full speed. These are left out of
            the measurement.
        by_name: Whether the sender must be able to resolve the receiver's name. If False, it tries
            the receiver's addresses as well.

    Raises:
        OSError: The transfer failed. The message comes from whichever end failed.
    """
    meter = [python, "-I", "-"]
    with _running(
        on_target([*meter, "receive", str(seconds), str(burst_bytes)]), seconds
    ) as receiver:
        assert receiver.stdout is not None
        # The shell's startup files on that host may print something first, so skip ahead to the
        # port.
        words = next(
            (words for line in receiver.stdout if (words := line.split()) and words[0].isdecimal()),
            None,
        )
        if words is None:
            raise OSError(_last_line(receiver.communicate()[1]))
        port, *addresses = words
        ends = [target] if by_name else [target, *addresses]
        with _running(on_source([*meter, "send", port, *ends]), seconds) as sender:
            facts, complaint = sender.communicate()
        if sender.returncode != 0:
            raise OSError(_last_line(complaint))
        answer, complaint = receiver.communicate()
    if receiver.returncode != 0:
        raise OSError(_last_line(complaint))
    return Transfer(bits_per_s=float(answer.split()[-1]), **json.loads(facts.splitlines()[-1]))


@contextmanager
def _running(line: Sequence[str], seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A context that starts one end of a transfer.

    Kills the process on exit from the context, or earlier if it runs over the time limit.
    """
    with METER.open() as script:
        process = subprocess.Popen(
            line,
            stdin=script,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    limit = threading.Timer(seconds + PATIENCE_S + START_S, _kill, [process])
    limit.daemon = True
    limit.start()
    with process:
        try:
            yield process
        finally:
            limit.cancel()
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and its children. The process must be the leader of its own process group.

    Any surviving children would keep the output pipe open, and whoever reads from it would block
    forever.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(complaint: str) -> str:
    lines = complaint.strip().splitlines()
    return lines[-1] if lines else "no answer in time"
