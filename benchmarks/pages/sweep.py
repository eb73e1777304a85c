"""The table of a whole sweep on docs/results/speed.md, and its line in the README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from sweep_to_target_show import WAYS, label, of_way, ratios, shown, values

from pages import Read, Table, Text, with_spread


def table(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What the sweep took and which trial won, a line per way."""
    found = read("sweep_to_target")
    rows = found["rows"]
    yield (
        "way",
        "minutes",
        "of which until the first step",
        "times as fast as `one`",
        "core-minutes",
        "best trial",
    )
    for way in (way for way in WAYS if of_way(rows, way)):
        minutes, start, cpu = (
            with_spread([s / 60 for s in values(rows, way, key)], 1)
            for key in ("s", "start_up_s", "cpu_s")
        )
        yield (
            f"`{way}`: {label(way, found['concurrent'])}",
            minutes,
            start,
            with_spread(ratios(rows, "one", way)),
            cpu,
            "; ".join(dict.fromkeys(best(row) for row in of_way(rows, way))),
        )
    for way, reason in found["left_out"].items():
        yield f"`{way}`: {label(way, found['concurrent'])}", reason, "", "", "", ""


def best(row: Mapping[str, Any]) -> str:
    trial = row["trials"][row["best"]]
    return f"{shown(trial['params'])} ({trial['steps']} steps)"


def line(read: Read) -> str:
    """Returns the README's line about the sweep."""
    found = read("sweep_to_target")
    rows, trials = found["rows"], len(found["sweep"]["trials"])
    one, crossover = (_minutes(rows, way) for way in ("one", "crossover"))
    text = (
        f"A sweep of {trials} trials, in which a small ResNet learns handwritten digits to an "
        f"accuracy of {found['sweep']['target']:.0%}, takes **{crossover} minutes in crossover**, "
        f"and {one} minutes one trial after the other ({_core_minutes(rows, 'crossover')} and "
        f"{_core_minutes(rows, 'one')} core-minutes)"
    )
    if of_way(rows, "ddp") and of_way(rows, "ddp-k"):
        text += (
            f". PyTorch's DDP takes {_minutes(rows, 'ddp')} minutes one after the other, and "
            f"{_minutes(rows, 'ddp-k')} minutes side by side ({_core_minutes(rows, 'ddp')} and "
            f"{_core_minutes(rows, 'ddp-k')} core-minutes)"
        )
    repeats = len(of_way(rows, "one"))
    text += "; measured once" if repeats == 1 else f"; medians of {repeats} runs"
    return f"{text}. {_winner(found)} See [A whole sweep](docs/results/speed.md#a-whole-sweep)."


def _minutes(rows: Sequence[Mapping[str, Any]], way: str) -> str:
    return f"{median(values(rows, way, 's')) / 60:.1f}"


def _core_minutes(rows: Sequence[Mapping[str, Any]], way: str) -> str:
    return f"{median(values(rows, way, 'cpu_s')) / 60:.1f}"


def _winner(found: Mapping[str, Any]) -> str:
    bits = "crossover gives bitwise the same losses and states as one after the other"
    if found["same_winner"]:
        ways = {2: "both", 3: "all three", 4: "all four"}[len(found["winners"])]
        return f"The same trial wins in {ways} ways, and {bits}."
    return f"With jaxcross, the same trial wins both times, and {bits}; with DDP, another one wins."


TABLES: dict[str, Table] = {"sweep-to-target": table}
LINES: dict[str, Text] = {"sweep-to-target": line}
