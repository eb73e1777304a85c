"""`jaxcross plan jobs.toml`: which jobs share ranks, in how many pieces and at which shares, from their profiles.

The file has a table for each job; a profile comes from the report of a run of the job alone:
`--profile-of report.json NAME FILE`.

    script = "train.py"        # only for `--launch`: started with the plan and the number of a group

    [[job]]
    name = "large"
    profile = "large.json"     # or a list, one for each cut that was measured
    ranks = 8                  # if not those of the profile
    steps = 10000              # if jobs do not run for equally long
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcross.plan import MachineContention, Plan
    from jaxcross.plan.jobs_file import JobsFile


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
    add("--profiles", type=Path, metavar="DIR", help="folder of the profiles (default: that of jobs.toml)")
    add("--memory", metavar="SIZE", help='device memory of a rank, as "80GB" (default: no limit)')
    add("--most", type=int, default=4, metavar="K", help="jobs of a group at most (default: %(default)s)")
    add("--floor", type=float, metavar="SPEED", help="least speed of a job, as a share of its own alone (default: 1/k)")
    add("--contention", metavar="FILE", help="contention of the machine, or `two-cores` (default: none)")
    add("--link-mbps", type=float, metavar="RATE", help="rate of the link, in Mbit/s, of profiles that do not name it")
    add("--json", type=Path, metavar="FILE", help="write the plan there")
    add("--picture", type=Path, metavar="FILE.png", help="draw the predicted timeline of a group")
    add("--group", type=int, default=0, metavar="N", help="the group to draw (default: %(default)s, the largest)")
    add("--launch", nargs=2, metavar=("slurm|mpijob", "DIR"), help="write files for a cluster that start the groups")
    add("--queue", default="jaxcross", help="Kueue queue of each `MPIJob` (default: %(default)s)")
    add(
        "--profile-of",
        nargs=3,
        metavar=("REPORT", "JOB", "FILE"),
        help="write the profile of a job that ran alone, from the report of its run, and end",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan and writes what was asked for; returns 2 for input that cannot be planned."""
    try:
        if args.link_mbps is not None and not 0 < args.link_mbps < math.inf:
            raise ValueError(f"`--link-mbps` must be above 0, got {args.link_mbps}.")
        if args.profile_of is not None:
            report, job, file = args.profile_of
            return _write_profile(report, job, file, args.link_mbps)
        if args.jobs is None:
            raise ValueError("name the file of jobs, as in `jaxcross plan jobs.toml`.")
        return _plan(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"jaxcross plan: {error}", file=sys.stderr)
        return 2


def _write_profile(report: str, job: str, file: str, link_mbps: float | None) -> int:
    from jaxcross.plan import Profile
    from jaxcross.report import Report

    path = Profile.of(Report.load(report), job, mbit_per_s=link_mbps).to_json(file)
    print(f"The profile of `{job}` is in {path}.")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from jaxcross.plan import of
    from jaxcross.plan.jobs_file import read_jobs

    jobs = read_jobs(args.jobs, profiles=args.profiles)
    named = (replace(each, mbit_per_s=each.mbit_per_s or args.link_mbps) for each in jobs.profiles)
    jobs = replace(jobs, profiles=tuple(named))
    contention = _contention(args.contention)
    plan = of(
        jobs.profiles, memory=args.memory, most=args.most, steps=jobs.steps, contention=contention, floor=args.floor
    )
    print(plan)
    if args.json is not None:
        print(f"The plan is in {plan.to_json(args.json)}.")
    if args.picture is not None:
        _draw(plan, jobs, contention, args.group, args.picture)
    if args.launch is not None:
        from jaxcross.commands.plan_launch import write_launch_files

        kind, folder = args.launch
        for path in write_launch_files(plan, kind, Path(folder), script=jobs.script, queue=args.queue):
            print(f"Written: {path}")
    return 0


def _contention(name: str | None) -> MachineContention | None:
    from jaxcross.plan.bounded import read_text
    from jaxcross.plan.contention import MAX_FILE_BYTES, TWO_CORES, MachineContention

    if name is None or name == "two-cores":
        return TWO_CORES if name else None
    path = Path(name)
    try:
        return MachineContention.from_json(json.loads(read_text(path, MAX_FILE_BYTES)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` is not the contention of a machine: {error}") from error


def _draw(plan: Plan, jobs: JobsFile, contention: MachineContention | None, number: int, path: Path) -> None:
    from jaxcross.plan import predict_group

    if not 0 <= number < len(plan.groups):
        raise ValueError(f"`--group` must be 0 to {len(plan.groups) - 1}, got {number}.")
    planned = plan.groups[number]
    prediction = predict_group(planned, jobs.profiles, contention=contention)
    headline = f"Predicted: group {number} makes {planned.progress:.2f} times the steps of one job after the other"
    if len(planned.jobs) == 1:
        headline = f"Predicted: `{planned.jobs[0].name}` alone"
    print(f"The picture is in {prediction.to_gantt(path, headline=headline)}.")
