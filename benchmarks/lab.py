"""Run a command between two hosts and a shaped link on this machine, and say how fast the link really is.

    python benchmarks/lab.py [--rate 500mbit] [--hosts 2] [--latency 1ms] -- mpirun -n 2 python train.py

Prints the rate that a plain TCP transfer reaches in each direction before the command runs, and the megabytes that its
ranks sent over the links: a command whose ranks spoke over shared memory shows as 0 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from jaxcross.lab import Lab


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="default %(default)s")
    parser.add_argument("--rate", default="500mbit", help="of each link, as tc spells it (default %(default)s)")
    parser.add_argument("--latency", help="of each link, for example 1ms; needs netem in the kernel")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- then the command")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command: write it after --.")
    try:
        with Lab(args.hosts, args.rate, args.latency) as lab:
            there, back = lab.measure_rate()
            print(f"lab: {there / 1e6:.1f} and {back / 1e6:.1f} Mbit/s over the {lab.description}", file=sys.stderr)
            before = lab.bytes_crossed()
            process = subprocess.Popen(lab.wrap(command), env=lab.environment())
            while True:
                try:
                    status = process.wait()
                    break
                except KeyboardInterrupt:
                    continue  # the terminal has interrupted the command, too
            print(f"lab: {(lab.bytes_crossed() - before) / 1e6:.1f} MB crossed the link", file=sys.stderr)
            return status if status >= 0 else 128 - status
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
