"""`python -m jaxcross.lab --rate 500mbit -- mpirun -n 2 python train.py`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from jaxcross._processes import related
from jaxcross.lab.network import Lab


def main(arguments: list[str] | None = None, *, measure: bool = False) -> int:
    """Runs a command in a lab, waits for it, and returns its exit status.

    If `measure` is true, first measures a plain TCP transfer between two hosts in each direction,
    and prints the rates.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxcross.lab", description="Run a command among hosts on one machine."
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--rate", default="500mbit", help="of each link, as tc spells it; `none` leaves it unshaped"
    )
    parser.add_argument(
        "--latency", help="of each link, for example 1ms; needs netem in the kernel"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="-- then the command, usually mpirun -n N ..."
    )
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command was given. Write it after `--`, as `-- mpirun -n 2 ...`.")
    try:
        with Lab(
            options.hosts, None if options.rate == "none" else options.rate, options.latency
        ) as lab:
            if measure and lab.hosts == 1:
                print(f"lab: one host has no link to measure: {lab.description}", file=sys.stderr)
            elif measure:
                there, back = lab.measure_rate()
                rates = f"{there / 1e6:.1f} and {back / 1e6:.1f} Mbit/s"
                print(f"lab: {rates} over the {lab.description}", file=sys.stderr)
            before = lab.bytes_crossed()
            status = _run(lab, command)
            where = "link" if measure else lab.description  # don't print the description twice
            sent_mb = (lab.bytes_crossed() - before) / 1e6
            hint = ""
            if sent_mb < 0.01:
                hint = ": if the command has ranks, they did not communicate over it"
            print(f"lab: {sent_mb:.1f} MB crossed the {where}{hint}", file=sys.stderr)
            return status if status >= 0 else 128 - status
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _run(lab: Lab, command: Sequence[str]) -> int:
    """Runs the command, forwards signals to it and returns its status. A second SIGTERM kills it.

    The command is a child of `nsenter`, which enters the lab's namespaces. Signalling `nsenter`
    would only kill `nsenter` itself, because it doesn't forward signals. So we run it in its own
    session, out of reach of the terminal's signals, and signal the command directly. SIGINT goes to
    the command's whole process group, just like when a terminal handles Ctrl-C.
    """
    processes: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that arrived before the command started
    received: set[int] = set()

    def forward(number: int, _: object = None) -> None:
        if not processes:
            early.append(number)
            return
        if number == signal.SIGTERM and number in received:
            raise SystemExit(128 + number)  # this closes the lab, which kills all processes in it
        if number == signal.SIGHUP and number in received:
            return  # when a terminal closes, both the shell and the kernel send this signal
        received.add(number)
        children = related(processes[0].pid, group=number == signal.SIGINT)
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if not children:  # `nsenter` hasn't started the command yet
            processes[0].send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # it's ignored under nohup
            signal.signal(number, forward)
    processes.append(
        subprocess.Popen(lab.wrap(command), env=lab.environment(), start_new_session=True)
    )
    for number in early:
        forward(number)
    return processes[0].wait()


if __name__ == "__main__":
    raise SystemExit(main())
