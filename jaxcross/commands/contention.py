"""`jaxcross contention FILE -n 2 --hosts a,b`: measures how much computations and exchanges slow
each other down on a given machine.

Starts ranks like `jaxcross launch` and spends about a minute timing a step of a small network and
an all-reduce, first each by itself and then both at once. The resulting slowdown factors are
written to the file along with the rate of the link, for use by `--contention FILE` of `jaxcross
plan` and `jaxcross estimate`.

If the file already exists, the new measurement is added to it as another link rate. So use one file
per machine and MPI, and don't run anything else during the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jaxcross.commands import launch

if TYPE_CHECKING:
    from jaxcross.plan import MachineContention

RANK = "jaxcross.commands.contention_rank"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `contention` to the command line."""
    parser = subparsers.add_parser(
        "contention",
        help=(
            "measure how much computations and exchanges slow each other down, for `jaxcross plan` "
            "and `jaxcross estimate`"
        ),
        description=__doc__,
    )
    add = parser.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help="the file that gets the factors, for example contention.json",
    )
    how_long = (
        "how long to measure, about (default: %(default)g); a short time takes a smaller network "
        "and exchange"
    )
    add("--seconds", type=float, default=60.0, help=how_long)
    add(
        "--mbps",
        type=float,
        metavar="RATE",
        help="rate of the link, in Mbit/s (default: what exchanges reach)",
    )
    launch.add_options(parser)
    parser.set_defaults(run=run, module=None, program=[])


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table and writes the file.

    Returns the ranks' exit code, or 2 for a wrong option.
    """
    try:
        known = _checked(args)
    except ValueError as error:
        print(f"jaxcross contention: {error}", file=sys.stderr)
        return 2
    # Rank 0 may run on a different host, but we need to read its file here. Other hosts can't see a
    # temporary folder in this machine's /tmp, so put it in the working directory: if the hosts
    # share any folder with this machine, it's that one.
    where = Path.cwd() if args.hosts else None
    with tempfile.TemporaryDirectory(prefix="jaxcross-contention-", dir=where) as folder:
        written = Path(folder, "measured.json")
        args.module = [RANK, repr(args.seconds), str(written)]
        code = launch.run(args, {"JAXCROSS_PROGRESS": "0"})
        if code or args.dry_run:
            return code
        found = json.loads(written.read_text())
    return _finish(args, known, found)


def _checked(args: argparse.Namespace) -> MachineContention | None:
    """Checks the options. Returns the contents of the file, or None if it doesn't exist yet."""
    from jaxcross.plan import MachineContention

    if args.ranks < 2:
        raise ValueError(f"one rank exchanges nothing: `-n` must be at least 2, got {args.ranks}.")
    for name, value in (("seconds", args.seconds), ("mbps", args.mbps)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"`--{name}` must be above 0, got {value:g}.")
    file: Path = args.file
    if file.exists():
        try:
            known = MachineContention.load(file)
        except OSError as error:
            raise ValueError(
                f"`{file}` cannot be read: {error.strerror}. Name a readable file, or a new one."
            ) from error
    elif not file.parent.is_dir():
        raise ValueError(
            f"`{file}` cannot be written: there is no folder `{file.parent}`. Create it first."
        )
    else:
        known = None
    if not os.access(file if file.is_file() else file.parent, os.W_OK):
        raise ValueError(
            f"`{file}` cannot be written: permission denied. Name a file that you may write."
        )
    return known


def _finish(
    args: argparse.Namespace, known: MachineContention | None, found: Mapping[str, Any]
) -> int:
    """Prints the table and adds the measured rate to the file."""
    from jaxcross._files import write_whole
    from jaxcross.interleave import Contention
    from jaxcross.plan import MachineContention

    rounds = found["rounds"]
    ratios = {
        what: sorted(row[f"{what}_beside_s"] / row[f"{what}_s"] for row in rounds) for what in _WHAT
    }
    ranks = found["ranks"]
    received_mbit = (
        8 * found["megabytes"] * 2**20 / 1e6 * 2 * (ranks - 1) / ranks
    )  # what each rank receives in an all-reduce
    reached = received_mbit / median(row["exchange_s"] for row in rounds)
    rate = args.mbps or float(f"{reached:.3g}")
    there = Contention(compute=_factor(ratios["compute"]), exchange=_factor(ratios["exchange"]))
    print("\n".join(_table(found, ratios, reached)), flush=True)
    if known is None:
        machine = MachineContention(measured=((rate, there),))
    else:
        machine = known.with_point(rate, there)
    try:
        write_whole(args.file, json.dumps(machine.to_json(), indent=1) + "\n")
    except OSError as error:
        print(
            f"jaxcross contention: `{args.file}` cannot be written: {error.strerror}. Its content "
            "follows, so that you can save it elsewhere.",
            file=sys.stderr,
        )
        print(json.dumps(machine.to_json()))
        return 1
    others = len(machine.measured) - 1
    more = f", in addition to {others} other rate{'s' * (others > 1)}" if others else ""
    print(f"The factors at {rate:g} Mbit/s are in the file{more}. Use them:")
    print(f"  jaxcross plan jobs.toml --contention {args.file} --mbps {rate:g}")
    return 0


_WHAT = {"compute": "a step of computation", "exchange": "an exchange"}


def _factor(ratios: Sequence[float]) -> float:
    """Returns the median, but at least 1. A smaller value is noise."""
    return float(f"{max(1.0, median(ratios)):.4g}")


def _table(
    found: Mapping[str, Any], ratios: Mapping[str, Sequence[float]], reached: float
) -> list[str]:
    from jaxcross.report import seconds

    ranks = found["ranks"]
    local = found["local_ranks"]
    rounds = found["rounds"]
    where = "on this machine" if ranks == local else f"on {-(-ranks // local)} hosts"
    how_many = (
        f"{len(rounds)} rounds, {found['exchanges']} exchanges of "
        f"{found['megabytes'] * 1.048576:.0f} MB"
    )
    lines = [
        f"Contention of {ranks} ranks {where}, {found['vendor']}, {found['device']}: {how_many}",
        f"  {'':22}{'alone':>10}{'alongside the other':>20}{'times as long':>16}",
    ]
    for what, name in _WHAT.items():
        alone = median(row[f"{what}_s"] for row in rounds)
        together = median(row[f"{what}_beside_s"] for row in rounds)
        spread = f"   {ratios[what][0]:.2f} to {ratios[what][-1]:.2f} by round"
        lines.append(
            "  "
            f"{name:22}{seconds(alone):>10}{seconds(together):>20}{median(ratios[what]):>16.2f}{spread}"
        )
    return [*lines, f"  A rank receives {float(f'{reached:.3g}'):g} Mbit/s in an exchange alone."]
