"""Prints, compares and draws the rows of `sweep_to_target.py`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

WAYS = {
    "one": "jaxcross, one trial after the other",
    "crossover": "jaxcross, {} trials in crossover",
    "ddp": "PyTorch DDP, one trial after the other",
    "ddp-k": "PyTorch DDP, {} trials side by side",
}
"""The ways to run the sweep, with the number of concurrent trials left open."""
COLOURS = {"one": "#56b4e9", "crossover": "#0072b2", "ddp": "#f0c674", "ddp-k": "#e69f00"}


def label(way: str, concurrent: int) -> str:
    return WAYS[way].format(concurrent)


def line(row: Mapping[str, Any]) -> str:
    """Returns the line to print once a way has run."""
    best = row["trials"][row["best"]]
    seconds = f"{row['s']:6.0f} s, of which {row['start_up_s']:.0f} s until the first step"
    return (
        f"repeat {row['repeat']}: {row['way']:9} {seconds}; {row['cpu_s']:.0f} s of CPU; "
        f"best: {shown(best['params'])} after {best['steps']} steps"
    )


def shown(params: Mapping[str, float]) -> str:
    return f"rate {params['rate']:g}, momentum {params['momentum']:g}"


def of_way(rows: Sequence[Mapping[str, Any]], way: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["way"] == way]


def values(rows: Sequence[Mapping[str, Any]], way: str, key: str) -> list[float]:
    return [row[key] for row in of_way(rows, way)]


def ratios(rows: Sequence[Mapping[str, Any]], over: str, way: str, key: str = "s") -> list[float]:
    """Returns how many times as much of `key` one way takes as another, in each repeat."""
    by = {(row["way"], row["repeat"]): row[key] for row in rows}
    repeats = sorted({repeat for _, repeat in by})
    return [
        by[over, repeat] / by[way, repeat]
        for repeat in repeats
        if {(over, repeat), (way, repeat)} <= by.keys()
    ]


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares what the ways found out.

    Returns:
        `equal_to_the_bit` says whether all runs of `one` and `crossover` have the same losses,
        accuracies, steps and final states; it's None unless both ways have run. `winners` has the
        parameters that won in each way, once per distinct winner. `same_winner` says whether they
        are the same in all ways.
    """
    trained = {
        way: [
            [
                (t["steps"], t["score"], t["digest"], [list(c) for c in t["curve"]])
                for t in row["trials"]
            ]
            for row in of_way(rows, way)
        ]
        for way in ("one", "crossover")
    }
    every = [run for runs in trained.values() for run in runs]
    winners: dict[str, list[Any]] = {}
    for row in rows:
        found = winners.setdefault(row["way"], [])
        params = row["trials"][row["best"]]["params"]
        if params not in found:
            found.append(params)
    distinct = [params for found in winners.values() for params in found]
    return {
        "equal_to_the_bit": all(run == every[0] for run in every)
        if all(trained.values())
        else None,
        "winners": winners,
        "same_winner": all(params == distinct[0] for params in distinct),
    }


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws the minutes and core-minutes of each way, and when its trials ran."""
    from matplotlib.figure import Figure

    rows, concurrent = result["rows"], result["concurrent"]
    ways = [way for way in WAYS if of_way(rows, way)]
    figure = Figure(figsize=(9.5, 3.4), dpi=150, layout="constrained")
    times, cpu = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for at, way in enumerate(ways):
        start, seconds = (values(rows, way, key) for key in ("start_up_s", "s"))
        for axes, taken in ((times, seconds), (cpu, values(rows, way, "cpu_s"))):
            middle = median(taken) / 60
            error = [[middle - min(taken) / 60], [max(taken) / 60 - middle]]
            axes.barh(at, middle, 0.66, color=COLOURS[way], xerr=error, error_kw={"lw": 0.9})
            axes.text(
                max(taken) / 60, at, f"  {middle:.1f}", va="center", fontsize=11, weight="bold"
            )
        times.barh(at, median(start) / 60, 0.66, color="white", alpha=0.45, hatch="///", lw=0)
    times.set_yticks(range(len(ways)), [label(way, concurrent) for way in ways])
    times.invert_yaxis()
    times.set_xlabel("minutes (hatched: until the first step)")
    cpu.set_xlabel("core-minutes")
    for axes in (times, cpu):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.2)
    trials, target = len(result["sweep"]["trials"]), result["sweep"]["target"]
    figure.suptitle(
        f"How long does a sweep of {trials} trials to an accuracy of {target:.0%} take?",
        x=0.01,
        ha="left",
        fontsize=12.5,
        weight="bold",
    )
    figure.savefig(path)
