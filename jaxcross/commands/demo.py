"""`jaxcross demo`: trains two jobs one after the other and then in crossover, and compares both."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxcross.commands.launch import terminable
from jaxcross.errors import MissingExtraError, require_extra

if TYPE_CHECKING:
    from jaxcross.commands.launch import Mpirun
    from jaxcross.lab import Lab
    from jaxcross.report import Comparison, Report

MODELS = ("resnet8", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet200")
PATIENCE_S = 10.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo", help="train two ResNets in crossover on this machine", description=__doc__
    )
    add = parser.add_argument
    add(
        "--link",
        default="500mbit",
        metavar="RATE",
        help="between the ranks, or `none` (default %(default)s)",
    )
    add("--ranks", type=_positive, default=2, metavar="N", help="MPI ranks (default %(default)s)")
    add(
        "--jobs", type=_positive, default=2, metavar="K", help="training jobs (default %(default)s)"
    )
    add(
        "--model",
        choices=MODELS,
        default="resnet50",
        metavar="NAME",
        help=f"{', '.join(MODELS)}; default %(default)s",
    )
    add("--image-size", type=_positive, default=224, metavar="PIXELS", help="default %(default)s")
    add(
        "--batch-size",
        type=_positive,
        default=4,
        metavar="B",
        help="images a rank and step (default %(default)s)",
    )
    add(
        "--steps",
        type=_positive,
        default=10,
        metavar="S",
        help="each job and way, in two turns (default %(default)s)",
    )
    add(
        "--output",
        type=Path,
        default=Path("jaxcross-demo"),
        metavar="DIR",
        help="default %(default)s",
    )
    add("--json", type=Path, metavar="FILE", help="write the measured numbers there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes a data set, trains on it and shows the comparison.

    Starts several processes and waits for them; none of them outlives this call. If the demo fails
    or you press Ctrl-C, the output folder is removed again, unless it existed before.
    """
    made = not args.output.exists()
    try:
        with terminable():
            return _demo(args)
    except BaseException as error:
        if made:
            shutil.rmtree(args.output, ignore_errors=True)
        if not isinstance(error, DemoError):
            raise
        print(f"jaxcross demo: {error}", file=sys.stderr)
        return 1


class DemoError(Exception):
    """The demo can't continue. The text is shown to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCommand:
    """The command that starts the ranks.

    Attributes:
        line: The command to execute.
        shown: The same command, the way a user would type it.
        environ: The command's environment.
        link: A description of the link between the ranks, included in all output.
    """

    line: Sequence[str]
    shown: str
    environ: Mapping[str, str]
    link: str


def _demo(args: argparse.Namespace) -> int:
    from jaxcross._link import Link
    from jaxcross.commands.launch import find_mpirun

    # Check all arguments up front, to avoid writing anything if one of them is wrong.
    try:
        require_extra(
            "all",
            "the demo",
            "tensorflow_datasets",
            "array_record",
            "grain",
            "cv2",
            "fsspec",
            "matplotlib",
        )
    except MissingExtraError as error:
        raise DemoError(str(error)) from None
    example = find_example()
    mpirun = find_mpirun()
    if mpirun is None:
        raise DemoError(
            "no `mpirun` was found. Run `pip install mpich`, or load your cluster's MPI module."
        )
    try:
        slow = Link.parse(args.link) is not None and args.ranks > 1
    except ValueError as error:
        raise DemoError(f"--link: {error}") from error
    for folder in (args.output, *([] if args.json is None else [args.json.parent])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoError(
                f"nothing can be written into `{folder}`: {error}. Name a different folder."
            ) from error
    if args.json is not None and args.json.is_dir():
        raise DemoError(f"`--json` must name a file, but `{args.json}` is a folder.")
    data = _write_data(args)
    with ExitStack() as stack:
        lab: Lab | None = None
        why_not = ""
        if slow:
            lab, why_not = _lab(args, stack)
        launch = _launch(args, example, mpirun, data, lab, slow=slow)
        _print(f"Link: {launch.link}" + (f" ({why_not})" if why_not else ""))
        _print(
            f"Training {args.jobs} jobs on {args.ranks} ranks, by turns one after the other and in "
            "crossover:\n"
        )
        _print(f"  {launch.shown}\n")
        _train(launch)
        if lab is not None:
            _print(f"{lab.bytes_crossed() / 1e6:.0f} MB crossed the link.")
    return _finish(args, launch)


def find_example() -> Path:
    """Returns the training script: next to the package in a checkout, inside it in a wheel.

    Raises:
        DemoError: There is no script in either place.
    """
    package = Path(__file__).resolve().parent.parent
    places = [package.parent / "examples", package / "_examples"]
    for folder in places:
        if (folder / "imagenet_resnet.py").exists():
            return folder / "imagenet_resnet.py"
    raise DemoError(
        f"imagenet_resnet.py is neither in {places[0]} nor in {places[1]}. Install jaxcross again."
    )


def _write_data(args: argparse.Namespace) -> Path:
    _print("Writing a small data set in ImageNet's format ...")
    from rich.console import Console
    from rich.progress import Progress

    from jaxcross.data import synthesise

    folder = args.output / "data"
    wanted = max(64, args.steps * args.batch_size * args.ranks)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("images", total=None)
        synthesise(
            folder,
            images=min(wanted, 1024),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    return folder


def _lab(args: argparse.Namespace, stack: ExitStack) -> tuple[Lab | None, str]:
    """Returns a lab with a real link, or None and the reason why the machine can't run one."""
    from jaxcross.lab import Lab

    try:
        return stack.enter_context(Lab(hosts=args.ranks, rate=args.link)), ""
    except (OSError, ValueError) as error:  # not permitted, or too many hosts for a lab
        return None, str(error)


def _launch(
    args: argparse.Namespace,
    example: Path,
    mpirun: Mpirun,
    data: Path,
    lab: Lab | None,
    *,
    slow: bool,
) -> RanksCommand:
    from jaxcross.commands.launch import (
        mpirun_command,
        printed,
        python_program,
        shared_accelerator,
    )
    from jaxcross.world import xla_pool

    emulated = f"emulated link {args.link}" if slow else "none"
    link = emulated if lab is None else lab.description
    cores = xla_pool.cores()
    line, extra = mpirun_command(
        mpirun=mpirun,
        ranks=args.ranks,
        program=python_program([str(example), *_options(args, data, emulate=slow and lab is None)]),
        root=os.geteuid() == 0,
        # The lab splits the cores between its hosts, so a rank only gets a share of them.
        cores=max(1, cores // args.ranks) if lab is not None and args.ranks <= cores else cores,
        environ=os.environ,
    )
    extra = {**extra, **shared_accelerator(os.environ)}
    environ = {**os.environ, **extra}
    if lab is None:
        return RanksCommand(line=line, shown=printed(line, extra), environ=environ, link=link)
    by_hand = [
        sys.executable,
        "-m",
        "jaxcross.lab",
        "--hosts",
        str(args.ranks),
        "--rate",
        args.link,
        "--",
        *line,
    ]
    return RanksCommand(
        line=lab.wrap(line),
        shown=printed(by_hand, extra),
        environ=lab.environment(environ),
        link=link,
    )


def _options(args: argparse.Namespace, data: Path, *, emulate: bool) -> list[str]:
    options = [
        "--data-dir",
        str(data.resolve()),
        "--model",
        args.model,
        "--image-size",
        str(args.image_size),
    ]
    options += [
        "--batch-size",
        str(args.batch_size),
        "--steps",
        str(args.steps),
        "--eval-steps",
        "0",
    ]
    for job in range(args.jobs):
        options += ["--job", f"lr={0.01 * 2**job:g},seed={job}"]
    options += ["--policy", "compare", "--output", str(args.output.resolve())]
    if emulate:
        options += ["--emulate-link", args.link]
    return options


def _train(launch: RanksCommand) -> None:
    """Runs the ranks with their output on this terminal, and waits for them even after Ctrl-C."""
    process = subprocess.Popen(launch.line, env=launch.environ)
    try:
        status = process.wait()
    except BaseException as error:
        # On Ctrl-C, the terminal has signalled mpirun as well, which is already shutting down its
        # ranks. Any other signal (e.g. SIGTERM) only reached us, so pass it on. Either way, give
        # mpirun some time to exit before terminating it and, as a last resort, killing it.
        if not isinstance(error, KeyboardInterrupt):
            process.terminate()
        for stronger in (process.terminate, process.kill):
            try:
                process.wait(PATIENCE_S)
                break
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                stronger()
        process.wait()
        raise
    if status != 0:
        raise DemoError(
            f"training ended with status {status}. Its output above says why; `jaxcross doctor` "
            "checks what training needs."
        )


def _finish(args: argparse.Namespace, launch: RanksCommand) -> int:
    from jaxcross.report import Comparison, draw_gantt

    _print("Drawing ...")
    turns = min(2, args.steps)
    ways = {name: _reports(args.output, name, turns) for name in ("sequential", "crossover")}
    comparison = Comparison.of(*ways.values())
    last = {name: reports[-1] for name, reports in ways.items()}
    trace = args.output / ("crossover-2.trace.json" if turns > 1 else "crossover.trace.json")
    gantt = draw_gantt(
        last["crossover"],
        args.output / "gantt.png",
        compare=last["sequential"],
        headline=comparison.headline,
    )
    if args.json:
        result = numbers(comparison, link=launch.link, trace=trace, gantt=gantt)
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(comparison)
    print(f"Chrome trace (open in https://ui.perfetto.dev): {trace}")
    print(f"Gantt chart of both runs: {gantt}", flush=True)
    return 0


def _reports(folder: Path, way: str, turns: int) -> list[Report]:
    """Returns the reports of one policy's runs, in order. Ignores files left by an earlier demo."""
    from jaxcross.report import Report

    paths = [folder / f"{way}.json", *([folder / f"{way}-2.json"] if turns > 1 else [])]
    return [replace(Report.load(path), policy=way) for path in paths]


def numbers(comparison: Comparison, *, link: str, trace: Path, gantt: Path) -> dict[str, Any]:
    """Returns the contents of the `--json` file.

    All times are in seconds per job-step, measured in steady state. `jobs` describes the jobs of
    the crossover runs. `ratio` is the raw ratio between the two times, i.e. how many times faster
    crossover was. `speedup` is the same number if the comparison is fair; otherwise it's null and
    `reason` says why.
    """
    alone = comparison.first
    rounds = comparison.second
    k = max(len(rounds.crossed), 1)
    return {
        "link": link,
        "sequential_s_per_step": alone.s_per_step,
        "crossover_s_per_step": rounds.s_per_step,
        "speedup": comparison.speedup,
        "ratio": comparison.ratio,
        "reason": comparison.reason,
        "bound_s_per_step": None if rounds.bound_s is None else rounds.bound_s / k,
        "efficiency": rounds.efficiency,
        "efficiency_alone": comparison.efficiency_alone,
        "compute_s_per_step": {"alone": alone.compute_s / k, "crossover": rounds.compute_s / k},
        "exchange_s_per_step": {"alone": alone.exchange_s / k, "crossover": rounds.exchange_s / k},
        "hidden_share": rounds.hidden_share,
        "jobs": [
            {
                "name": job.facts.name,
                "images_per_second": job.examples_per_s,
                "steps": job.facts.steps,
                "final_loss": _finite(job.facts.final_loss),
            }
            for job in rounds.jobs
        ],
        "trace": str(trace),
        "gantt": str(gantt),
    }


def _finite(value: float | None) -> float | None:
    """Replaces NaN and infinity with None, because JSON can't represent them."""
    return value if value is not None and math.isfinite(value) else None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number above 0")
    return int(text)


def _print(text: str) -> None:
    print(text, flush=True)
