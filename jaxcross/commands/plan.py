"""`jaxcross plan jobs.toml`: plans which jobs share ranks, and how, from their profiles.

The file contains a table for each job, including the path of the job's profile, which says how long
each part of its step takes. To get a profile, run the job by itself and extract it from the report
of that run: `--profile-of report.json NAME FILE`.

    script = "train.py"        # only for `--launch`: called with the plan and a group's number

    [[job]]
    name = "large"
    profile = "large.json"     # or a list, with one per cut that was measured
    ranks = 8                  # only if different from the profile
    steps = 10000              # only if the jobs vary in length
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcross.plan import JobsFile, MachineContention, Plan


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="plan which jobs share ranks, from their profiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("jobs", type=Path, nargs="?", metavar="jobs.toml", help="the jobs")
    add(
        "--profiles",
        type=Path,
        metavar="DIR",
        help="folder of the profiles (default: that of jobs.toml)",
    )
    add("--memory", metavar="SIZE", help='device memory of a rank, as "80GB" (default: no limit)')
    add(
        "--most",
        type=int,
        default=4,
        metavar="K",
        help="jobs of a group at most (default: %(default)s)",
    )
    add(
        "--floor",
        type=float,
        metavar="SPEED",
        help="least speed of a job, as a share of its own alone (default: 1/k)",
    )
    add(
        "--contention",
        metavar="FILE",
        help=(
            "what `jaxcross contention FILE` measured, or `two-cores` for hosts of two cores "
            "(default: none)"
        ),
    )
    add(
        "--mbps",
        type=float,
        metavar="RATE",
        help="rate of the link, in Mbit/s, of profiles that do not name it",
    )
    add("--json", type=Path, metavar="FILE", help="write the plan there")
    add("--picture", type=Path, metavar="FILE.png", help="draw the predicted timeline of a group")
    add("--group", type=int, metavar="N", help="the group to draw (default: 0, the largest)")
    add(
        "--launch",
        nargs=2,
        metavar=("slurm|mpijob", "DIR"),
        help="write files for a cluster that start the groups",
    )
    add("--queue", default="jaxcross", help="Kueue queue of each `MPIJob` (default: %(default)s)")
    add(
        "--profile-of",
        nargs=3,
        metavar=("REPORT", "JOB", "FILE"),
        help="write the profile of a job that ran alone, from the report of its run, and end",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan and writes the requested files. Returns 2 if the input can't be planned."""
    try:
        _check_options(args)
        if args.profile_of is not None:
            report, job, file = args.profile_of
            return _write_profile(Path(report), job, Path(file), args.mbps)
        return _plan(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"jaxcross plan: {error}", file=sys.stderr)
        return 2


def _check_options(args: argparse.Namespace) -> None:
    """Checks the options up front, because making the plan can take minutes."""
    from jaxcross.commands.plan_launch import check_cluster
    from jaxcross.errors import require_extra

    if args.mbps is not None and not 0 < args.mbps < math.inf:
        raise ValueError(f"`--mbps` must be above 0, got {args.mbps}.")
    if args.profile_of is None and args.jobs is None:
        raise ValueError("no jobs to plan: name the file of jobs, as in `jaxcross plan jobs.toml`.")
    if args.group is not None and args.picture is None:
        raise ValueError(
            f"`--group {args.group}` says which group `--picture` draws, but there is no "
            "`--picture`. Add `--picture FILE`, or leave out `--group`."
        )
    if args.group is not None and args.group < 0:
        raise ValueError(
            f"`--group` must be the number of a group for `--picture`, got {args.group}."
        )
    if args.launch is not None:
        check_cluster(args.launch[0], args.queue)
    if args.picture is not None:
        require_extra("plot", "`--picture`", "matplotlib")
    for option, file in (("--json", args.json), ("--picture", args.picture)):
        if file is not None and not file.parent.is_dir():
            raise ValueError(
                f"`{option} {file}` cannot be written: there is no folder `{file.parent}`. Create "
                "it first."
            )


@contextmanager
def _reading(what: str, remedy: str) -> Iterator[None]:
    """A context that turns failures to read a file into an explanatory `ValueError`."""
    from jaxcross.errors import clause

    try:
        yield
    except OSError as error:
        reason = clause(error.strerror or str(error))
        raise ValueError(f"{what} `{error.filename}` cannot be read: {reason}. {remedy}") from error


def _write_profile(report: Path, job: str, file: Path, mbps: float | None) -> int:
    from jaxcross.plan import Profile
    from jaxcross.report import Report

    if not file.parent.is_dir():
        raise ValueError(
            f"`{file}` cannot be written: there is no folder `{file.parent}`. Create it first."
        )
    with _reading("the report", "Write it with `report.to_json(path)` in the script."):
        run = Report.load(report)
    path = Profile.of(run, job, mbps=mbps).to_json(file)
    print(f"The profile of `{job}` is in {path}.")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from jaxcross.commands.plan_launch import check_script, write_launch_files
    from jaxcross.plan import make, read_jobs

    with _reading("the file of jobs", "`jaxcross plan --help` shows one."):
        jobs = read_jobs(args.jobs, profiles=args.profiles)
    named = (replace(each, mbps=each.mbps or args.mbps) for each in jobs.profiles)
    jobs = replace(jobs, profiles=tuple(named))
    if args.launch is not None:
        check_script(jobs.script)
    most = len({each.name for each in jobs.profiles})
    if args.group is not None and args.group >= most:
        raise ValueError(f"`--group` must be below {most}, the number of jobs, got {args.group}.")
    contention = read_contention(args.contention)
    plan = make(
        jobs.profiles,
        memory=args.memory,
        most=args.most,
        steps=jobs.steps,
        contention=contention,
        floor=args.floor,
    )
    plan = replace(plan, notes=(*plan.notes, *jobs.notes))
    number = args.group or 0
    if number >= len(plan.groups):  # check this before anything is written
        raise ValueError(
            f"`--group` must be 0 to {len(plan.groups) - 1}, since the plan has {len(plan.groups)} "
            f"group{'s' * (len(plan.groups) > 1)}, got {number}."
        )
    print(plan)
    if args.json is not None:
        print(f"The plan is in {plan.to_json(args.json)}.")
    if args.picture is not None:
        _draw(plan, jobs, contention, number, args.picture)
    if args.launch is not None:
        kind, folder = args.launch
        measured = {each.platform for each in jobs.profiles}
        for path in write_launch_files(
            plan,
            kind,
            Path(folder),
            script=jobs.script,
            queue=args.queue,
            accelerators=measured != {"cpu"},
        ):
            print(f"Written: {path}")
    return 0


def read_contention(name: str | None) -> MachineContention | None:
    """Returns the contention that `--contention` names; None if the option isn't given.

    Raises:
        ValueError: The file can't be read, or contains something else.
    """
    from jaxcross.plan import TWO_CORES, MachineContention

    if name is None or name == "two-cores":
        return TWO_CORES if name else None
    with _reading(
        "the contention",
        f"Measure it: `jaxcross contention {name} -n 2 --hosts A,B`; or give `two-cores`.",
    ):
        return MachineContention.load(name)


def _draw(
    plan: Plan, jobs: JobsFile, contention: MachineContention | None, number: int, path: Path
) -> None:
    from jaxcross.plan import predict_group

    planned = plan.groups[number]
    prediction = predict_group(planned, jobs.profiles, contention=contention)
    headline = (
        f"Predicted: group {number} makes {planned.progress:.2f} times the steps of one job after "
        "the other"
    )
    if len(planned.jobs) == 1:
        headline = f"Predicted: `{planned.jobs[0].name}` alone"
    print(f"The picture is in {prediction.to_gantt(path, headline=headline)}.")
