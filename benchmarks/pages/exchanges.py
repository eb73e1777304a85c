"""The tables of benchmarks/results/exchanges.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pages import Read, Table, with_spread
from pages.family import FAMILY


def choose(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What each exchange saves and costs, when to use it, and what we measured."""
    accuracy: dict[tuple[str, str], float] = {}
    with suppress(FileNotFoundError):
        accuracy = {
            (r["task"], r["strategy"]): r["final_accuracy"] for r in read("convergence")["rows"]
        }
    # One rank per host (ResNet-50 on two hosts, the Transformer on four), then two ranks per host.
    measured: list[dict[str, Any]] = []
    for name, model in (
        ("exchanges", "resnet50"),
        ("exchanges_4", "transformer"),
        ("exchanges_nodes", "transformer"),
    ):
        measured.append({})
        with suppress(FileNotFoundError):
            measured[-1] = read(name)["models"][model]["strategies"]
    *flat, nodes = measured

    def time(rows: dict[str, Any], name: str) -> str:
        return f"{statistics.median(ratios(rows, name, 'total')):.2f}"

    yield (
        "exchange",
        "bytes a rank receives",
        "time",
        "accuracy",
        "same",
        "use it when",
        "costs",
        "source (arXiv)",
    )
    for member in FAMILY:
        name = member.measured
        # Exchanges over nodes are meant for several ranks per host. With one rank per host, their
        # nodes would span two hosts each.
        for_nodes = name in nodes and ("hierarchical" in name or name not in flat[-1])
        times = [time(rows, name) for rows in (flat[:1] if for_nodes else flat) if name in rows]
        if for_nodes:
            times.append(f"{time(nodes, name)} on nodes")
        trained = member.trained or name
        lost = [
            f"{accuracy[task, trained] - accuracy[task, 'mean']:+.3f}"
            if (task, trained) in accuracy
            else "-"
            for task in ("images", "text")
        ]
        yield (
            member.exchange,
            member.received,
            ", ".join(times) or "-",
            ", ".join(lost),
            member.same,
            member.use,
            member.costs,
            member.source,
        )


def convergence(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """What each exchange reaches in the same number of steps, and the bytes that it receives."""
    found = read("convergence")
    by = {(row["task"], row["strategy"]): row for row in found["rows"]}
    columns = "accuracy", "over the mean's", "MB"
    yield "exchange", *(f"{task}: {column}" for task in found["tasks"] for column in columns)
    for strategy in dict.fromkeys(row["strategy"] for row in found["rows"]):
        cells: list[str] = []
        for task in found["tasks"]:
            if (task, strategy) not in by:
                cells += ["-"] * len(columns)
                continue
            row, dense = by[task, strategy], by[task, "mean"]["final_accuracy"]
            cells += [
                f"{row['final_accuracy']:.3f}",
                f"{row['final_accuracy'] - dense:+.3f}",
                f"{row['received_bytes'][-1] / 1e6:.2f}",
            ]
        yield strategy, *cells


def longer(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Top-k in the usual number of steps, and in three times as many."""
    found = read("convergence")
    parts = [[row for row in found["rows"] if row["task"] == "text"], found["longer"]["rows"]]
    yield (
        "exchange",
        *(
            f"{steps} steps"
            for steps in (found["tasks"]["text"]["steps"], found["longer"]["steps"])
        ),
    )
    of = [{row["strategy"]: row["final_accuracy"] for row in rows} for rows in parts]
    for name in of[1]:
        yield name, *(f"{each[name]:.3f} ({each[name] - each['mean']:+.3f})" for each in of)


def growth(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """Steps to an accuracy, and final accuracy, for more ranks at the best rate of one rank."""
    found = read("convergence")["growth"]
    sizes = list(dict.fromkeys(row["ranks"] for row in found["rows"]))
    yield "way", *(f"{n} ranks" if n > 1 else "1 rank" for n in sizes)
    for way in dict.fromkeys(row["way"] for row in found["rows"]):
        by = {row["ranks"]: row for row in found["rows"] if row["way"] == way}
        yield (
            way,
            *(f"{_steps(by[n]['steps_to_reach'])}, {by[n]['final_accuracy']:.3f}" for n in sizes),
        )


def _steps(count: float | None) -> str:
    return "never" if count is None else f"{count:.0f}"


def ratios(rows: dict[str, Any], name: str, key: str, over: str = "mean") -> list[float]:
    """Returns a strategy's time over that of `over`, in each repeat."""
    return [
        own / other
        for own, other in zip(rows[name][key]["raw"], rows[over][key]["raw"], strict=True)
    ]


def exchanges(read: Read, name: str) -> Iterator[tuple[str, ...]]:
    """Each exchange of a model's gradients relative to the mean.

    The columns are a step of exchange and SGD, the wire alone, and bytes.
    """
    models = read(name)["models"]
    heads = [
        f"{model}: {what}" for model in models for what in ("s", "over the mean's", "wire", "bytes")
    ]
    yield "exchange", *heads

    def cells(rows: dict[str, Any], strategy: str) -> tuple[str, ...]:
        if strategy not in rows:
            return "", "", "", ""
        row = rows[strategy]
        times = (
            with_spread(ratios(rows, strategy, key), digits)
            for key, digits in (("total", 2), ("wire", 3))
        )
        return f"{row['total']['median']:.3f}", *times, f"{row['bytes_over_mean']:.3f}"

    every = [model["strategies"] for model in models.values()]
    for strategy in dict.fromkeys(s for rows in every for s in rows):
        yield strategy, *(cell for rows in every for cell in cells(rows, strategy))


def selection(read: Read, _: str) -> Iterator[tuple[str, ...]]:
    """The two ways of finding the largest elements."""
    yield "elements", "k", "exact, ms", "threshold, ms", "the library takes"
    for row in read("selection")["rows"]:
        times = (f"{row['ways'][way]['s']['median'] * 1e3:.3g}" for way in ("exact", "threshold"))
        kind = "" if (data := row["data"]) == "normal" else f", {data}"
        yield f"{row['size']}{kind}", str(row["k"]), *times, row["chosen"]


TABLES: dict[str, Table] = {
    "choose": choose,
    "convergence": convergence,
    "growth": growth,
    "longer": longer,
    "exchanges": exchanges,
    "selection": selection,
}
