"""Turns a run's report into a row, and rows into the table of imagenet_resnet.py. Runs nothing."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

import jaxcross

POLICIES = {"sequential": jaxcross.Sequential, "crossover": jaxcross.RoundRobin}
CACHES = ("cold", "warm")


def throughput_of(report: Any) -> dict[str, Any]:
    """Returns images per second, and what the input cost, from a run's report.

    Raises:
        ValueError: The jobs were never in steady state at the same time.
    """
    summary = report.summary()
    if summary["period_s"] is None:
        raise ValueError("the jobs were never in steady state together: give more `--steps`")
    images = sum(job.facts.steps * (job.facts.examples_per_step or 0) for job in report.rounds.jobs)
    waits: dict[str, dict[int, list[float]]] = {job.name: {} for job in report.jobs}
    for span in report.spans:
        if (
            span.kind == "input" and span.step > 0
        ):  # the first batch arrives while nothing can run yet
            waits[span.job].setdefault(span.rank, []).append((span.end_ns - span.start_ns) / 1e9)
    return {
        "images_per_s": summary["examples_per_s"],
        "images_per_s_by_job": {job["name"]: job["examples_per_s"] for job in summary["jobs"]},
        "wall_s": summary["wall_s"],
        "wall_images_per_s": images / summary["wall_s"],
        "input_wait_s": {
            job: max((statistics.fmean(times) for times in ranks.values()), default=0.0)
            for job, ranks in waits.items()
        },
        "input_lost_s": summary["lost_s"]["input"],
        "account": summary,
    }


def speedups(result: dict[str, Any]) -> dict[str, float | None]:
    """Returns the speed-ups of crossover over one job after the other."""
    made: dict[str, float | None] = {}
    for cache in CACHES:
        medians = {p: result["throughput"][cache][p]["images_per_s"]["median"] for p in POLICIES}
        made[cache] = medians["crossover"] / medians["sequential"]
    if "accuracy" in result:
        one, other = (result["accuracy"][policy]["s"] for policy in POLICIES)
        made["to_accuracy"] = one / other if one and other else None
    return made


def show(result: dict[str, Any]) -> None:
    throughput, accuracy = result["throughput"], result.get("accuracy", {})
    title = (
        f"{result['model']}, {result['ranks']} ranks, {result['device']}, "
        f"{throughput['link'] or 'no link given'}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("page cache")
    table.add_column("run")
    for name in (*result["jobs"], "all jobs", "input wait"):
        table.add_column(name, justify="right")
    for cache in CACHES:
        for policy in POLICIES:
            runs = throughput[cache][policy]["runs"]
            speeds = [list(run["images_per_s_by_job"].values()) for run in runs]
            by_job = [
                f"{statistics.median(speed[n] for speed in speeds):.1f}"
                for n in range(len(result["jobs"]))
            ]
            waits = statistics.median(max(run["input_wait_s"].values()) for run in runs)
            total = throughput[cache][policy]["images_per_s"]["median"]
            table.add_row(cache, policy, *by_job, f"{total:.1f}", f"{waits * 1e3:.1f} ms")
    console = Console(width=110)
    console.print(table)
    print("Images a second (medians); input wait: of the job that waited longest, a step.")
    for policy in POLICIES if accuracy else ():
        run = accuracy[policy]
        reached = f"after {run['s']:.1f} s" if run["s"] else run["reason"]
        print(f"accuracy {accuracy['goal']:g}, all jobs, {policy}: {reached}")
    for what, factor in result.get("speedup", {}).items():
        print(f"crossover over sequential, {what}: {f'{factor:.2f}x' if factor else 'not known'}")
