"""Draws the result of `fine_tuning.py`: time and memory against the number of adapters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

WAYS = {
    "k processes": ("one process per adapter", "#999999"),
    "crossover": ("jaxcross, one process", "#0072b2"),
}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws the time that one step of all adapters takes, and the memory of a host."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    places = range(len(rows))
    figure = Figure(figsize=(8.4, 3.8), dpi=140, layout="constrained")
    time, memory = figure.subplots(1, 2)
    width = 0.38
    for number, (way, (label, color)) in enumerate(WAYS.items()):
        at = [place + (number - 0.5) * width for place in places]
        seconds = [row[way]["s"]["median"] for row in rows]
        gigabytes = [row[way]["needed_bytes"] / 1e9 for row in rows]
        for axes, heights, digits in ((time, seconds, 1), (memory, gigabytes, 1)):
            bars = axes.bar(at, heights, width, color=color, label=label)
            axes.bar_label(bars, fmt=f"%.{digits}f", padding=2, fontsize=8)
    least = [
        (row["crossover"]["base_bytes"] + row["crossover"]["adapters_bytes"]) / 1e9 for row in rows
    ]
    for place, height in zip(places, least, strict=True):
        ends = (place + 0.04, place + width - 0.04)
        label = "base and adapters' states" if place == 0 else None
        memory.plot(ends, (height, height), color="black", lw=1.2, label=label)
    time.set(title="Time of a step of all adapters", ylabel="s")
    memory.set(title="Memory of a host", ylabel="GB")
    for axes in (time, memory):
        axes.set_xticks(list(places), [str(row["adapters"]) for row in rows])
        axes.set_xlabel("LoRA adapters of one base model")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title(result), x=0.01, ha="left", fontsize=11.5, weight="bold")
    figure.savefig(path)


def title(result: Mapping[str, Any]) -> str:
    last = result["rows"][-1]
    share = last["crossover"]["needed_bytes"] / last["k processes"]["needed_bytes"]
    rate = result["rate"].removesuffix("mbit")
    return (
        f"{last['adapters']} adapters at {rate} Mbit/s: "
        f"{last['times_as_fast']['median']:.2f} times as fast, in {share:.0%} of the memory"
    )
