"""`jaxcross estimate -n 2 script.py ...`: would several jobs of it run faster alongside each other?

Starts the script like `jaxcross launch`, waits until it calls a `crossover` step for the first
time, times that step on copies of its arguments, and ends the script there. So it doesn't train
anything, and you don't need to change the script.

If the script uses a `Runner`, only the first job is started, and its checkpoints and metrics are
left alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jaxcross.commands import launch
from jaxcross.commands.plan import read_contention

if TYPE_CHECKING:
    from jaxcross.plan import MachineContention

_STOPPED = (130, 143)  # exit codes after Ctrl-C and SIGTERM


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `estimate` to the command line."""
    parser = subparsers.add_parser(
        "estimate",
        help="predict from a few steps of a script what several jobs gain",
        description=__doc__,
    )
    parser.add_argument(
        "--jobs", type=_count, default=2, help="number of equal jobs (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=_count, default=3, help="number of steps to time (default: %(default)s)"
    )
    parser.add_argument(
        "--mbps",
        type=_above_zero,
        metavar="RATE",
        help="rate of a link in Mbit/s that the ranks do not have here",
    )
    parser.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help='memory of a rank, as "80GB" (default: what the device has)',
    )
    parser.add_argument(
        "--step", metavar="NAME", help="the step to time (default: the first that is called)"
    )
    parser.add_argument(
        "--contention",
        metavar="FILE",
        help=(
            "what `jaxcross contention FILE` measured on these hosts (default: `two-cores`, but "
            "none on accelerators)"
        ),
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all numbers")
    launch.add_options(parser)
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="a module and its arguments, not a script",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script.py and its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the script up to its first step.

    Returns its exit code, 1 if there's no such step, or 2 if the contention can't be read.
    """
    try:
        contention = read_contention(args.contention)
    except ValueError as error:
        print(f"jaxcross estimate: {error}", file=sys.stderr)
        return 2
    start = launch.prepared(args)
    if isinstance(start, int):
        return start
    # Rank 0 may run on a different host, but we need to read its file here. Other hosts can't see a
    # temporary folder in this machine's /tmp, so put it in the working directory: if the hosts
    # share any folder with this machine, it's that one.
    where = Path.cwd() if args.hosts else None
    with tempfile.TemporaryDirectory(prefix="jaxcross-estimate-", dir=where) as folder:
        written = Path(folder, "estimate.json") if args.json is None else args.json.absolute()
        written.unlink(missing_ok=True)
        note = unconverted_note(args.module, args.program)
        if note:
            print(note, file=sys.stderr, flush=True)
        code = start({"JAXCROSS_ESTIMATE": request_of(args, written, contention)})
        if args.dry_run or written.exists() or code in _STOPPED:
            return code
    which = "`crossover` step"
    hint = "Is its train step decorated with `jaxcross.crossover`?"
    if args.step is not None:
        which = f"`crossover` step `{args.step}`"
        hint = "A step has its function's name; without `--step` the first is timed."
    if code:
        text = (
            f"the script ended with exit code {code} before it called a {which}, so nothing was "
            "measured."
        )
    else:
        text = (
            f"the script ended without calling a {which}. {hint}"
            " Steps of a `ParameterServer` cannot be estimated."
        )
    print(f"jaxcross estimate: {text}", file=sys.stderr)
    return code or 1


def unconverted_note(module: list[str] | None, program: list[str]) -> str:
    """Returns a warning if the script never mentions `crossover`, otherwise "".

    Doesn't warn if we can't read the script.
    """
    script = Path(next((word for word in program if word != "--"), ""))
    try:
        if module or not script.is_file() or "crossover" in script.read_text(errors="replace"):
            return ""
    except OSError:
        return ""
    return (
        f"jaxcross estimate: `{script}` names no `crossover`. Unless a module that it imports "
        "decorates the train step with `jaxcross.crossover`, it will train to its end, and nothing "
        "can be estimated: decorate the step first, or call `jaxcross.estimate(step, ...)`."
    )


def request_of(
    args: argparse.Namespace, written: Path, contention: MachineContention | None
) -> str:
    """Returns the value of `JAXCROSS_ESTIMATE`, which tells the ranks what to measure."""
    wanted = {
        "jobs": args.jobs,
        "steps": args.steps,
        "mbps": args.mbps,
        "memory": args.memory,
        "step": args.step,
        "json": str(written),
        "contention": None if contention is None else contention.to_json(),
    }
    return json.dumps({name: value for name, value in wanted.items() if value is not None})


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number of at least 1")
    return count


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number above 0")
    return value


def _size(text: str) -> str:
    from jaxcross.jobs import as_bytes

    try:
        as_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
